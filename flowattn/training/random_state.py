"""The randomness of a run: different on every rank, and part of its checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from flowattn.data.batch import generator as seeded
from flowattn.logdet import LogDet


class RandomState(Callback):
    """Keeps torch's random state and that of every `torch.Generator` in the model in the checkpoints, rank by rank.

    Ranks start from the same seed, because they must build the same model. When training starts each draws a seed of
    its own, so that the probes of stochastic log-determinants differ between ranks. A run that is resumed
    gets its states back just before its first batch, after everything else that could have drawn a number. With more
    ranks than before, those that have no state yet start afresh.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._module: nn.Module | None = None
        self._restored: list[dict[str, Any]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size > 1:
            for number, generator in enumerate([None, *generators(pl_module)]):
                seed = torch.initial_seed() if generator is None else generator.initial_seed()
                own = seeded(seed % 2**63, number, trainer.global_rank).initial_seed()
                _ = torch.manual_seed(own) if generator is None else generator.manual_seed(own)
        states, self._restored = self._restored, None
        if states is not None and trainer.global_rank < len(states):
            set_state(pl_module, states[trainer.global_rank])

    def state_dict(self) -> dict[str, Any]:
        # Called on every rank, though only the first one writes.
        if self._module is None:
            return {}
        own = get_state(self._module)
        if not (dist.is_available() and dist.is_initialized()):
            return {"ranks": [own]}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict.get("ranks")


def get_state(module: nn.Module) -> dict[str, Any]:
    """Torch's random states on the CPU and on the device of the module, and those of the module's generators."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    device = _device(module)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    state["generators"] = [generator.get_state() for generator in generators(module)]
    return state


def set_state(module: nn.Module, state: dict[str, Any]) -> None:
    """Undoes everything that was drawn since `get_state`."""
    torch.set_rng_state(_bytes(state["cpu"]))
    device = _device(module)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)
    own = generators(module)
    if len(own) != len(state["generators"]):
        raise ValueError(
            f"The checkpoint has the states of {len(state['generators'])} random generators; the model has {len(own)}."
        )
    for generator, saved in zip(own, state["generators"], strict=True):
        generator.set_state(_bytes(saved))


def generators(module: nn.Module) -> list[torch.Generator]:
    """Every torch.Generator that a module, or what its attributes hold, draws from; each once, in a fixed order."""
    found: dict[int, torch.Generator] = {}

    def search(thing: Any) -> None:
        if isinstance(thing, torch.Generator):
            found.setdefault(id(thing), thing)
        elif isinstance(thing, list | tuple):
            for part in thing:
                search(part)
        elif isinstance(thing, LogDet):
            search(list(vars(thing).values()))

    for part in module.modules():
        search([value for name, value in vars(part).items() if not name.startswith("_")])
    return list(found.values())


def _device(module: nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def _bytes(state: Tensor) -> Tensor:
    return state.to("cpu", torch.uint8)
