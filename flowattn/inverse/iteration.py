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


#: The best points, and the plain steps from there: those are better still, but nobody has looked.
Iterated = tuple[Solution, Tensor]


def iterate(
    evaluate: Evaluate,
    y: Tensor,
    start: Tensor,
    step: Step,
    norm: Callable[[Tensor], Tensor],
    lipschitz: float,
    tolerance: Tensor | float,
    max_steps: int,
) -> Iterated:
    """Solves x + f(x) = y until every sample is certified, comes to a halt, or has had `max_steps` evaluations.

    Each sample keeps its best point. After a step that failed to improve it, the plain step from there is tried, which
    for a contraction can fail only by rounding: then the sample has come to a halt. What rounding may hide of a
    residual is added to it, and is in proportion to x and y.
    """
    size, eps = len(y), torch.finfo(y.dtype).eps
    solution = Solution(start.clone(), y.new_full((size,), math.inf), torch.zeros(size, dtype=torch.long).to(y.device))
    following = start.clone()
    # All of what follows is about the samples that are still active.
    active = torch.arange(size, device=y.device)
    tolerance = torch.as_tensor(tolerance, dtype=y.dtype, device=y.device).expand(size)
    x = best = best_plain = start
    length, best_residual = norm(y), y.new_full((size,), math.inf)
    was_plain = torch.zeros(size, dtype=torch.bool, device=y.device)
    for count in range(1, max_steps + 1):
        value, blocks = evaluate(x, active)
        plain = y - value
        residual = norm(plain - x)
        better = residual < best_residual
        best_residual = torch.where(better, residual, best_residual)
        best, best_plain = _choose(better, x, best), _choose(better, plain, best_plain)
        rounding = eps * (length + norm(best))
        error = (best_residual + 8 * rounding) / (1 - lipschitz)
        going = ~(error <= tolerance) & ~((was_plain & ~better) | (best_residual <= rounding))
        if count == max_steps or not (going.any() and going.all()):
            stay = ~going if count < max_steps else torch.ones_like(going)
            done = active[stay]
            for whole, part in zip((*solution[:2], following), (best, error, best_plain), strict=True):
                whole[done] = part[stay]
            solution.num_evaluations[done] = count
            if stay.all():
                break
            step.keep(going)
            active, y, x, plain, best, best_plain, length, best_residual, better, tolerance = (
                t[going] for t in (active, y, x, plain, best, best_plain, length, best_residual, better, tolerance)
            )
            blocks = None if blocks is None else blocks[going]
        proposed = step.propose(x, plain, blocks)
        x = _choose(better & proposed.sum((1, 2)).isfinite(), proposed, best_plain)
        was_plain = ~better
    return solution, following


def _choose(first: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The one where `first` is true, the other where not; mostly all samples are alike."""
    return one if first.all() else torch.where(first[:, None, None], one, other)


def lipschitz_of(f: Contraction, num_tokens: int) -> float:
    """A constant that f is known not to exceed, in its norm; its coefficient, which costs nothing, if it has one."""
    return f.lipschitz_bound(num_tokens, f.norm).item() if f.coefficient is None else f.coefficient
