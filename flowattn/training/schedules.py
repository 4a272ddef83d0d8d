"""How the learning rate changes over the steps of training."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowattn.checks import check_positive


class WarmupCosine(LRScheduler):
    r"""Rises linearly, then falls along half a cosine.

    .. math:: \eta_t / \eta = \min\Bigl(\frac{t + 1}{w},\;
        f + (1 - f) \tfrac12 \bigl(1 + \cos \pi \tfrac{\max(t - w, 0)}{T - w}\bigr)\Bigr)

    Args:
        optimizer: whose learning rates these are.
        warmup_steps: the steps w of the rise.
        total_steps: the steps T until the end; those of the whole training unless given.
        final: the fraction f that is left at the end.
    """

    def __init__(
        self, optimizer: Optimizer, warmup_steps: int = 100, total_steps: int | None = None, final: float = 0.01
    ) -> None:
        check_positive(warmup_steps=warmup_steps)
        if total_steps is not None:
            check_positive(total_steps=total_steps)
        if not 0 <= final <= 1:
            raise ValueError(f"final must be between 0 and 1; got final={final}.")
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.final = final
        super().__init__(optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there, to the end that this training has: it may be longer than the one before."""
        super().load_state_dict(state_dict | {"total_steps": self.total_steps})

    def get_lr(self) -> list[float | Tensor]:
        rise = (self.last_epoch + 1) / self.warmup_steps
        total = self.total_steps or math.inf
        done = min(1.0, max(0, self.last_epoch - self.warmup_steps) / max(1, total - self.warmup_steps))
        fall = self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))
        return [base * min(rise, fall) for base in self.base_lrs]
