"""The iteration that every inverse and every gradient of one goes through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from nflows.transforms.base import InverseNotAvailable
from torch import Tensor

from flowattn.contractions import Contraction
from flowattn.inverse.steps import Step

#: f at points x of the samples `active`, and its diagonal blocks if the step wants them.
Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class InverseNotConverged(InverseNotAvailable):
    """The inverse was not found to the tolerance. No approximation is returned in its place."""


class Solution(NamedTuple):
    """The inverse, an upper bound of each sample's error, and how often f was evaluated for it."""

    x: Tensor
    certified_error: Tensor
    num_evaluations: Tensor


def iterate(
    evaluate: Evaluate,
    y: Tensor,
    start: Tensor,
    step: Step,
    norm: Callable[[Tensor], Tensor],
    lipschitz: float,
    tolerance: Tensor | float,
    max_steps: int,
) -> Solution:
    """Solves x + f(x) = y until every sample is certified, comes to a halt, or has had `max_steps` evaluations.

    Each sample keeps its best point. After a step that failed to improve it, the plain step from there is tried, which
    for a contraction can fail only by rounding: then the sample has come to a halt. What rounding may hide of a
    residual is added to it, and is in proportion to x and y.
    """
    size = len(y)
    eps = 8 * torch.finfo(y.dtype).eps
    length = norm(y)
    tolerance = torch.as_tensor(tolerance, dtype=y.dtype, device=y.device).expand(size)
    best, best_plain = start.clone(), start.clone()
    best_residual, rounding = y.new_full((size,), math.inf), y.new_zeros(size)
    count = torch.zeros(size, dtype=torch.long, device=y.device)
    active = torch.arange(size, device=y.device)
    x, was_plain = start, torch.zeros(size, dtype=torch.bool, device=y.device)
    for _ in range(max_steps):
        value, blocks = evaluate(x, active)
        plain = y[active] - value
        residual = norm(plain - x)
        count[active] += 1
        better = residual < best_residual[active]
        improved = active[better]
        best[improved], best_plain[improved], best_residual[improved] = x[better], plain[better], residual[better]
        rounding[improved] = eps * (length[improved] + norm(x[better]))
        certified = (best_residual[active] + rounding[active]) / (1 - lipschitz) <= tolerance[active]
        halted = (was_plain & ~better) | (best_residual[active] <= rounding[active])
        going = ~certified & ~halted
        if not going.any():
            break
        proposed = step.propose(x, plain, blocks)
        proposed = torch.where(proposed.isfinite().all(-1).all(-1)[:, None, None], proposed, plain)
        x = torch.where(better[:, None, None], proposed, best_plain[active])
        was_plain = ~better
        if not going.all():
            step.keep(going)
            active, x, was_plain = active[going], x[going], was_plain[going]
    return Solution(best, (best_residual + rounding) / (1 - lipschitz), count)


def lipschitz_of(f: Contraction, num_tokens: int) -> float:
    """A constant that f is known not to exceed, in its norm; its coefficient, which costs nothing, if it has one."""
    return f.lipschitz_bound(num_tokens, f.norm).item() if f.coefficient is None else f.coefficient
