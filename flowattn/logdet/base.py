"""The one interface of all ways to compute log|det(I + J)|."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flowattn.contractions import Contraction


class LogDet(ABC):
    """A way to compute log|det(I + J)| for the Jacobian J of a contraction f, together with f itself.

    Both come from one call because they share most of the work. The log-determinant is differentiable in the inputs,
    the context and the parameters, in training and in evaluation alike. An estimator's gradient is that of what it
    estimates on average: the truncated series of `PowerSeries`, the log-determinant itself of `RussianRoulette`.
    """

    @abstractmethod
    def __call__(
        self, contraction: Contraction, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The map f(x) [B, N, D] and log|det(I + J)| [B], of real tokens only."""


def probes(x: Tensor, mask: Tensor | None, num_probes: int, generator: torch.Generator | None) -> Tensor:
    r"""Random signs v [num_probes, B, N, D] with :math:`E\,v v^T = I`, zero at padding."""
    place = x.device if generator is None else generator.device
    signs = torch.randint(0, 2, (num_probes, *x.shape), generator=generator, device=place, dtype=torch.int8)
    v = signs.to(x) * 2 - 1
    return v if mask is None else v * mask.unsqueeze(-1)
