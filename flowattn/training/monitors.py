"""What to watch while a flow trains: how much of its Lipschitz bounds it uses, its inverse, its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn

from flowattn.checks import check_positive
from flowattn.context import split_context, zero_padding
from flowattn.data.batch import Batch
from flowattn.inverse import InverseNotConverged
from flowattn.lipschitz import local_lipschitz
from flowattn.lipschitz.norms import token_norm
from flowattn.transforms import ResidualTransform


class _Monitor(Callback):
    """Looks at the first sequences of the validation split, on the first rank, without touching any random state.

    Args:
        num_sequences: how many.
        every_n_validations: how often.
    """

    def __init__(self, num_sequences: int = 8, every_n_validations: int = 1) -> None:
        check_positive(num_sequences=num_sequences, every_n_validations=every_n_validations)
        self.num_sequences = num_sequences
        self.every_n_validations = every_n_validations
        self._validations = 0

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._validations += 1
        if self._validations % self.every_n_validations or not trainer.is_global_zero:
            return
        devices = [pl_module.device] if pl_module.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            self.look(trainer, pl_module, first_batch(trainer, self.num_sequences, pl_module.device))

    def look(self, trainer: Trainer, module: Any, batch: Batch) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]


class LipschitzMonitor(_Monitor):
    """Logs each residual block's certified Lipschitz bound, and how much of it some sequence uses.

    `lipschitz/K_bound` is what no input exceeds, `lipschitz/K_used` the largest local constant found at
    sequences of the validation split over that bound: near 1, the block is as steep as it may be.
    """

    def look(self, trainer: Trainer, module: Any, batch: Batch) -> None:
        with captured_inputs(module) as inputs:
            module.log_prob(batch.inputs, batch.context)
        values = {}
        for number, (block, x, context) in enumerate(inputs):
            features, mask = split_context(context, x)
            if block.contraction.context_features is None:
                features = None
            bound = block.contraction.lipschitz_bound(x.shape[1], block.contraction.norm)
            used = [local_lipschitz(f, rows, block.contraction.norm) for f, rows in maps(block, x, features, mask)]
            values[f"lipschitz/{number}_bound"] = bound
            values[f"lipschitz/{number}_used"] = torch.cat(used).max() / bound
        log(trainer, values)


class InverseMonitor(_Monitor):
    """Logs `inverse/error`, the largest distance of a token from itself after a way to the noise and back."""

    def look(self, trainer: Trainer, module: Any, batch: Batch) -> None:
        _, mask = split_context(batch.context, batch.inputs)
        try:
            error = token_norm(module.reconstruct(batch) - zero_padding(batch.inputs, mask)).max()
        except InverseNotConverged as failure:  # what is watched must not end what it watches
            rank_zero_warn(f"inverse/error at step {trainer.global_step}: {failure}")
            error = torch.tensor(torch.inf)
        log(trainer, {"inverse/error": error})


class SamplePlots(_Monitor):
    """Draws samples beside data, into TensorBoard and as `pictures/samples-STEP.png` in the run's folder."""

    def __init__(self, num_sequences: int = 64, every_n_validations: int = 5) -> None:
        super().__init__(num_sequences, every_n_validations)

    def look(self, trainer: Trainer, module: Any, batch: Batch) -> None:
        try:
            samples = module.sample(len(batch.inputs), batch.context)
        except InverseNotConverged as failure:
            rank_zero_warn(f"samples at step {trainer.global_step}: {failure}")
            return
        _, mask = split_context(batch.context, samples)
        if mask is not None:
            samples = samples.masked_fill(~mask.unsqueeze(-1), torch.nan)
        figure = trainer.datamodule.draw(batch, samples)  # type: ignore[attr-defined]
        path = Path(trainer.default_root_dir) / "pictures" / f"samples-{trainer.global_step:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("samples", figure, trainer.global_step)


def first_batch(trainer: Trainer, num_sequences: int, device: torch.device) -> Batch:
    """The first sequences of the validation split."""
    split = trainer.datamodule.split("val")  # type: ignore[attr-defined]
    batch = split.batch(torch.arange(min(num_sequences, len(split))))
    return Batch(*(None if part is None else part.to(device) for part in batch))  # type: ignore[arg-type]


@contextmanager
def captured_inputs(module: nn.Module) -> Iterator[list[tuple[ResidualTransform, Tensor, Tensor | None]]]:
    """What every residual block is given in the passes to come."""
    inputs: list[tuple[ResidualTransform, Tensor, Tensor | None]] = []

    def keep(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context = args[1] if len(args) > 1 else kwargs.get("context")
        inputs.append((block, args[0], context))  # type: ignore[arg-type]

    blocks = [part for part in module.modules() if isinstance(part, ResidualTransform)]
    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def log(trainer: Trainer, values: dict[str, Tensor]) -> None:
    """Logs on the first rank alone, which is where monitors look."""
    for logger in trainer.loggers:
        logger.log_metrics({name: float(value) for name, value in values.items()}, step=trainer.global_step)


def maps(
    block: ResidualTransform, x: Tensor, features: Tensor | None, mask: Tensor | None
) -> Iterator[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """The contraction of a block as maps of tokens alone, and where to look at them; one by one if these differ."""
    if features is None and mask is None:
        yield block.contraction, x
        return
    for row in range(len(x)):
        own = [None if part is None else part[row : row + 1] for part in (mask, features)]

        def f(tokens: Tensor, own: list[Tensor | None] = own) -> Tensor:
            many = [None if part is None else part.expand(len(tokens), *part.shape[1:]) for part in own]
            return block.contraction(tokens, *many)

        yield f, x[row : row + 1]
