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


#: The best points, and where to go from there: those are better still, but nobody has looked.
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
    *,
    is_last: bool = True,
) -> Iterated:
    """Solves x + f(x) = y until every sample is certified, comes to a halt, or has had `max_steps` evaluations.

    Each sample keeps its best point. After a step that failed to improve it, the plain step from there is tried, which
    for a contraction can fail only by rounding: then the sample has come to a halt. What rounding may hide of a
    residual is added to it, and is in proportion to x and y. If that alone exceeds the tolerance and this precision
    is not the last, a sample leaves as soon as its next point should do.
    """
    size, eps = len(y), torch.finfo(y.dtype).eps
    parts: list[tuple[Tensor, ...]] = []
    # All of what follows is about the samples that are still active.
    active = torch.arange(size, device=y.device)
    small = torch.as_tensor(tolerance, dtype=y.dtype, device=y.device).expand(size) * (1 - lipschitz)
    x = best = best_plain = start
    rounding_of_y, best_residual = eps * norm(y), y.new_full((size,), math.inf)
    has_failed: Tensor | None = None  # by its last step; None says that no sample has
    for count in range(1, max_steps + 1):
        value, blocks = evaluate(x, active)
        plain = y - value
        residual, last_residual = norm(plain - x), best_residual
        better = residual < best_residual
        all_better = bool(better.all())
        if all_better:  # as mostly
            best, best_plain, best_residual = x, plain, residual
        else:
            best, best_plain = _choose(better, x, best), _choose(better, plain, best_plain)
            best_residual = torch.where(better, residual, best_residual)
        rounding = torch.add(rounding_of_y, norm(best), alpha=eps)
        allowed = small - 8 * rounding
        going = best_residual > torch.maximum(allowed, rounding)
        if has_failed is not None:
            going = going & (better | ~has_failed)
        proposed = None
        if not is_last and count > 1:
            foreseen = residual * residual < 0.5 * small * last_residual
            leaving = going & better & (allowed < 0) & foreseen
            if leaving.any():
                going = going & ~leaving
                proposed = _propose(step, x, plain, blocks, better, best_plain)
                best_plain = _choose(leaving, proposed, best_plain)
        num_going = int(going.sum()) if count < max_steps else 0
        if num_going < len(active) or size == 0:
            error = (best_residual + 8 * rounding) / (1 - lipschitz)
            finished = (best, error, torch.full_like(active, count), best_plain, active)
            if num_going == 0:
                parts.append(finished)
                break
            parts.append(tuple(t[~going] for t in finished))
            step.keep(going)
            active, y, x, plain, best, best_plain, rounding_of_y, best_residual, better, small = (
                t[going] for t in (active, y, x, plain, best, best_plain, rounding_of_y, best_residual, better, small)
            )
            blocks, proposed = (t if t is None else t[going] for t in (blocks, proposed))
            all_better = all_better or bool(better.all())
        if proposed is None:
            proposed = _propose(step, x, plain, blocks, None if all_better else better, best_plain)
        x, has_failed = proposed, None if all_better else ~better
    *found, order = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    if len(parts) > 1:
        found = [t[order.argsort()] for t in found]
    return Solution(*found[:3]), found[3]


def watched(evaluate: Evaluate, lipschitz: float, norm: Callable[[Tensor], Tensor], size: int) -> Evaluate:
    """The same, unless of so many samples one changes by more than a map of this constant may between two points."""
    last: list[tuple[Tensor, Tensor, Tensor]] = []

    def watch(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
        value, blocks = evaluate(x, active)
        if last:
            samples, last_x, last_value = last.pop()
            place = torch.searchsorted(samples, active)
            moved, changed = norm(x - last_x[place]), norm(value - last_value[place])
            excess = changed - lipschitz * moved - 64 * torch.finfo(x.dtype).eps * (norm(x) + norm(value))
            if (excess > 0).any():
                worst = int(excess.argmax())
                raise InverseNotConverged(
                    f"{int((excess > 0).sum())} of {size} samples are not inverted: f is not the contraction it is "
                    f"declared to be. Its bound is {lipschitz:.3g}, but points of sample {int(active[worst])} that are "
                    f"{moved[worst].item():.3g} apart become {changed[worst].item():.3g} apart. Correct the bound."
                )
        last.append((active, x, value))
        return value, blocks

    return watch


def _propose(
    step: Step, x: Tensor, plain: Tensor, blocks: Tensor | None, better: Tensor | None, best_plain: Tensor
) -> Tensor:
    """The next points. Samples that are not better, and steps that are not finite, go by the plain step."""
    proposed = step.propose(x, plain, blocks)
    if proposed is not plain:
        proposed = _choose(proposed.sum((1, 2)).isfinite(), proposed, plain)
    return proposed if better is None else _choose(better, proposed, best_plain)


def _choose(first: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """The one where `first` is true, the other where not; mostly all samples are alike."""
    return one if first.all() else torch.where(first[:, None, None], one, other)


def lipschitz_of(f: Contraction, num_tokens: int) -> float:
    """A constant that f is known not to exceed, in its norm; its coefficient, which costs nothing, if it has one."""
    return f.lipschitz_bound(num_tokens, f.norm).item() if f.coefficient is None else f.coefficient
