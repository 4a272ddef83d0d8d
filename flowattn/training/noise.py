"""Noise on the inputs of training, for small data sets."""

from __future__ import annotations

import math
from typing import Any

import torch
from pytorch_lightning import Callback, Trainer

from flowattn.data.batch import Batch


class NoisyInputs(Callback):
    r"""Adds normal noise to the sequences of every training batch.

    .. math:: x_{t,k} + \epsilon\, \sigma_k\, n_{t,k}, \qquad n \sim N(0, 1)

    With few sequences a flow learns to put spikes of density on them; noise keeps the spikes as wide as it is.
    Validation and test see the sequences as they are, so that their likelihoods are those of the data.

    Args:
        scale: the noise :math:`\epsilon` over the standard deviation :math:`\sigma_k` of a feature in the train split.
    """

    def __init__(self, scale: float) -> None:
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be a positive number; got scale={scale!r}.")
        self.scale = scale

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        deviation = pl_module.standardize.scale.to(batch.inputs)
        batch.inputs.add_(torch.randn_like(batch.inputs) * deviation, alpha=self.scale)
