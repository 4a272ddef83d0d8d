"""An exponential moving average of the weights, which is what is evaluated and used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

TRAINED = "trained_state_dict"


class EMA(Callback):
    r"""Averages the weights over the steps of training.

    .. math:: \bar w_t = d_t\, \bar w_{t-1} + (1 - d_t)\, w_t, \qquad d_t = \min(d, t / (t + 9))

    so that early averages do not hang on to the start. Validation sees the average. So does everybody who loads a
    checkpoint: its `state_dict` is the average, and the weights that training goes on from are beside it. Buffers
    are not averaged.

    Args:
        decay: the weight d of what is old.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must be between 0 and 1; got decay={decay}.")
        self.decay = decay
        self.step = 0
        self.average: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A checkpoint is read before the model is moved to its device.
        self.average = {name: value.to(pl_module.device) for name, value in self.average.items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step:  # gradients are still being accumulated
            return
        self.step = trainer.global_step
        decay = min(self.decay, self.step / (self.step + 9))
        for name, weight in _weights(pl_module):
            # The first step may set weights from the data, so the average starts after it.
            if name in self.average:
                self.average[name].lerp_(weight.detach(), 1 - decay)
            else:
                self.average[name] = weight.detach().clone()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average:
            self._trained = {name: weight.detach().clone() for name, weight in _weights(pl_module)}
            _copy(pl_module, self.average)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trained:
            _copy(pl_module, self._trained)
            self._trained = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.average:
            checkpoint[TRAINED] = checkpoint["state_dict"]
            checkpoint["state_dict"] = checkpoint["state_dict"] | self.average

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit" and TRAINED in checkpoint:
            average = checkpoint["state_dict"]
            self.average = {name: average[name].clone() for name, _ in _weights(pl_module)}
            pl_module.load_state_dict(checkpoint[TRAINED])


def _weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters()


@torch.no_grad()
def _copy(module: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, weight in _weights(module):
        weight.copy_(weights[name])
