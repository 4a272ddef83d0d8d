"""Stops at the first number that is none, before it reaches the weights."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from flowattn.context import split_context, zero_padding
from flowattn.data.batch import Batch


class NotFinite(ArithmeticError):
    """A batch, a loss or a gradient that is infinite or not a number."""


def check_batch(batch: Batch, where: str) -> None:
    """Raises, and says which value of which sequence it is, unless all real tokens and their context are finite."""
    try:
        _, mask = split_context(batch.context, batch.inputs)
    except ValueError as error:
        raise NotFinite(f"{where}: {error}") from error
    inputs = zero_padding(batch.inputs, mask)
    if torch.isfinite(inputs.sum()):
        return
    bad = ~torch.isfinite(inputs)
    if bad.any():
        row, token, feature = bad.nonzero()[0].tolist()
        raise NotFinite(
            f"{where}: sequence {batch.index[row].item()} is {inputs[row, token, feature].item()} at token {token}, "
            f"feature {feature}. The weights are as they were before this batch."
        )


def check_loss(loss: Tensor, where: str) -> None:
    """Raises unless the loss is a number, before anything is derived from it."""
    if not torch.isfinite(loss):
        raise NotFinite(
            f"{where}: the loss is {loss.item()}, though the data are finite. The weights are as they were before this "
            "batch. Lower the learning rate, or clip gradients (trainer.gradient_clip_val)."
        )


class FiniteGradients(Callback):
    """Raises when a gradient is not finite, before the optimiser steps."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return  # a scaled loss overflows now and then, and its scaler leaves such steps out
        gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
        if gradients and not torch.isfinite(torch.nn.utils.get_total_norm(gradients)):
            bad = [name for name, weight in pl_module.named_parameters() if not _is_finite(weight.grad)]
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
            raise NotFinite(
                f"train batch {batch}, step {trainer.global_step}: the gradient of {', '.join(bad[:3])} is not finite, "
                "though the loss is. The weights are as they were before this batch. Lower the learning rate."
            )


def _is_finite(gradient: Any) -> bool:
    return gradient is None or bool(torch.isfinite(gradient).all())
