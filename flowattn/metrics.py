"""How well a density fits: nats per sequence, nats per token, bits per dimension."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchmetrics import Metric

from flowattn.context import split_context


class ExactSums(Metric):
    """A metric made of counts, which are whole numbers, and of sums, in float64 where the device has it.

    Both are added up over ranks when the result is asked for: ranks may see different numbers of batches.
    """

    full_state_update = False
    higher_is_better = False

    def __init__(self, counts: Sequence[str], sums: Sequence[str]) -> None:
        super().__init__()
        self._sums = tuple(sums)
        for name in counts:
            self.add_state(name, torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")
        for name in sums:
            self.add_state(name, torch.zeros((), dtype=_exact(self.device)), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = ()) -> nn.Module:
        """Moves the sums along with all else, to a type that the new device has."""
        super()._apply(fn, (*exclude_state, *self._sums))

        def move(x: Any) -> Tensor:  # by way of the CPU, which has all types
            return x.cpu().to(_exact(self.device)).to(self.device)

        for name in self._sums:
            self._defaults[name] = move(self._defaults[name])
            setattr(self, name, move(getattr(self, name)))
        return self


class Likelihood(ExactSums):
    r"""The negative log-likelihood of sequences of any length, in three units.

    .. math:: \text{nll} = -\frac1M \sum_m \log p(X_m), \qquad
        \text{token\_nll} = -\frac{\sum_m \log p(X_m)}{\sum_m N_m}, \qquad
        \text{bpd} = -\frac{\sum_m \log p(X_m)}{D \ln 2 \sum_m N_m}

    M sequences of :math:`N_m` real tokens, D wide. `nll_error` is the standard error of the first, which a single
    sequence does not have: not a number. A sequence counts the same whatever batch or rank it is on.

    Args:
        features: the width D of a token.
        is_mean_free: whether one token is given by the others, so that there are :math:`N_m - 1` in the last unit.

    Example:
        >>> metric = Likelihood(features=2)
        >>> metric.update(torch.tensor([-3.0, -5.0]), torch.tensor([1, 3]))
        >>> {name: round(value, 3) for name, value in metric.values().items()}
        {'nll': 4.0, 'nll_error': 1.0, 'token_nll': 2.0, 'bpd': 1.443}
    """

    count: Tensor
    total: Tensor
    squares: Tensor
    tokens: Tensor

    def __init__(self, features: int, is_mean_free: bool = False) -> None:
        super().__init__(counts=("count", "tokens"), sums=("total", "squares"))
        self.features = features
        self.is_mean_free = is_mean_free

    def update(self, log_prob: Float[Tensor, " batch"], lengths: Int[Tensor, " batch"]) -> None:
        """Counts these sequences: their log-densities, and how many real tokens they have."""
        if log_prob.shape != lengths.shape or log_prob.ndim != 1:
            raise ValueError(
                f"log_prob and lengths must have one entry per sequence; got shapes {list(log_prob.shape)} and "
                f"{list(lengths.shape)}."
            )
        nll = -log_prob.detach().to(self.total.dtype)
        self.count += len(nll)
        self.total += nll.sum()
        self.squares += nll.square().sum()
        self.tokens += lengths.sum()

    def compute(self) -> dict[str, Tensor]:
        """`nll`, `nll_error`, `token_nll` and `bpd`; not a number before the first sequence."""
        mean = self.total / self.count
        variance = (self.squares / self.count - mean.square()).clamp_min(0) / (self.count - 1)
        token_nll = self.total / self.tokens
        dimensions = self.features * (self.tokens - self.count if self.is_mean_free else self.tokens)
        return {
            "nll": mean,
            "nll_error": variance.sqrt(),
            "token_nll": token_nll,
            "bpd": self.total / (dimensions * math.log(2)),
        }

    def values(self) -> dict[str, float]:
        """What `compute` says, as numbers; without a warning on a rank that had no sequence of its own."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* was called before the ``update`` method")
            return {name: value.item() for name, value in self.compute().items()}


def _exact(device: torch.device) -> torch.dtype:
    """The type of sums: double, but for Apple's GPUs, which have none."""
    return torch.float32 if device.type == "mps" else torch.float64


def lengths(inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None) -> Int[Tensor, " batch"]:
    """The number of real tokens of each sequence, by its context (`flowattn.context`)."""
    _, mask = split_context(context, inputs)
    if mask is None:
        return torch.full((len(inputs),), inputs.shape[1], device=inputs.device)
    return mask.sum(1)
