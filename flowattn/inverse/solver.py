"""How an inverse is computed, to what error, and in which precision."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowattn.checks import check_positive, check_positive_number, without_autocast
from flowattn.contractions import Contraction, Declared
from flowattn.inverse.iteration import InverseNotConverged, Iterated, Solution, iterate, lipschitz_of, watched
from flowattn.inverse.steps import AndersonStep, ChordStep, NewtonStep, PlainStep, Step
from flowattn.lipschitz.norms import sequence_norm

#: What f is given beside the tokens: a mask, a context, and the scale of its rows.
Known = tuple[Tensor | None, Tensor | None, Tensor]

#: How many tokens of a causal map take a step of their own, and how many numbers their blocks may have.
FIRST_TOKENS, MAX_NUMBERS = 8, 2**16


@dataclass(frozen=True)
class Solver:
    """How an inverse is computed.

    Half precision is computed in single. Where single precision cannot see an error as small as the tolerance, the
    last steps are taken in double, for which the parameters of f are replaced meanwhile: do not share f with another
    thread. Rounding the result to the type of y comes on top of the certified error.

    Args:
        tolerance: largest certified error of a sample, in the norm of the contraction; 1e-5 in single precision and
            1e-10 in double unless given. Where that is out of reach, as it is by rounding far from the origin, samples
            longer than 1 are content with this error relative to their length.
        max_steps: evaluations of f after which a sample is given up, in each precision.
        history: how many past steps Anderson's combination looks back on; 0 leaves the plain iteration. They are kept
            in memory, two tensors like y each, but only for samples that need so many steps.

    Example:
        >>> from flowattn.contractions import L2SelfAttention
        >>> f, x = L2SelfAttention(4, 2), torch.randn(3, 5, 4)
        >>> solution = Solver(tolerance=1e-6).solve(f, x + f(x))
        >>> bool((solution.certified_error <= 1e-6).all())
        True
    """

    tolerance: float | None = None
    max_steps: int = 1000
    history: int = 20

    def __post_init__(self) -> None:
        check_positive(max_steps=self.max_steps)
        if self.tolerance is not None:
            check_positive_number(tolerance=self.tolerance)
        if self.history < 0:
            raise ValueError(f"history must be at least 0; got history={self.history}.")

    @torch.no_grad()
    def solve(self, f: Contraction, y: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Solution:
        """The inverse of x + f(x) at y [B, N, D]; padding is zero."""
        with without_autocast(y):
            y, context = f._checked(y, mask, context)
            lipschitz = lipschitz_of(f, y.shape[1])
            if not lipschitz < 1:
                raise InverseNotConverged(
                    f"x + f(x) is not known to be invertible: the Lipschitz bound of f is {lipschitz:.3g}, not below "
                    "1. Give the contraction a coefficient."
                )
            tolerance = self.tolerance or (1e-10 if y.dtype == torch.float64 else 1e-5)
            x, error, count = self._solve(f, y, mask, context, lipschitz, tolerance)
            self._raise_unless_small(error, tolerance, sequence_norm(x, f.norm), count, f.coefficient)
            return Solution(x.to(y.dtype), error, count)

    def _solve(
        self,
        f: Contraction,
        y: Tensor,
        mask: Tensor | None,
        context: Tensor | None,
        lipschitz: float,
        tolerance: float,
    ) -> Solution:
        scale = f.scale(y.shape[1], mask)
        single = torch.promote_types(y.dtype, torch.float32)
        finest = single if y.device.type == "mps" else torch.float64

        def run(dtype: torch.dtype, function: Callable[..., Any], *args: Tensor | None) -> Any:
            """Calls a function of f in this precision."""
            cast = [_to(t, dtype) for t in args]
            return function(*cast) if dtype == y.dtype else _in_precision(f, dtype, function, *cast)

        def solve_some(samples: Tensor | None, start: Tensor | None, dtype: torch.dtype) -> Iterated:
            known = _of(samples, mask, context, scale)
            iterate = functools.partial(self._iterate, f, lipschitz, tolerance, is_last=dtype == finest)
            found, following = run(dtype, iterate, _pick(y, samples), _pick(start, samples), *known)
            return found._replace(certified_error=certified(found, known, dtype)), following

        def certified(found: Solution, known: Known, dtype: torch.dtype) -> Tensor:
            """The errors with what rounding hides of f, which takes no digits to tell."""
            error = found.certified_error
            is_small = error <= tolerance
            if not is_small.any():
                return error
            unit = 4 * torch.finfo(dtype).eps / (1 - lipschitz)
            total = error + unit * run(single, f.rounding, found.x, *known)
            unclear = is_small & ~(total <= tolerance) if dtype == finest else is_small[:0]
            for k in unclear.nonzero().flatten().tolist():  # one by one, since a closer look takes memory
                one = slice(k, k + 1)
                look = functools.partial(f.rounding, sharp=True)
                total[one] = error[one] + unit * run(dtype, look, found.x[one], *_of(one, *known))
            return total

        solution, following = solve_some(None, None, single)
        late = ~(solution.certified_error <= tolerance)
        if single == finest or not late.any():
            return solution
        # Through the factor 1 / (1 - L) single precision does not see its own error.
        if late.all():
            finer, _ = solve_some(None, following, finest)
            x, error = (t.to(single) for t in finer[:2])
            return Solution(x, error, finer.num_evaluations + solution.num_evaluations)
        samples = late.nonzero().squeeze(-1)
        finer, _ = solve_some(samples, following, finest)
        for whole, part in zip(solution[:2], finer[:2], strict=True):
            whole[samples] = part.to(single)
        solution.num_evaluations[samples] += finer.num_evaluations
        return solution

    def _iterate(
        self,
        f: Contraction,
        lipschitz: float,
        tolerance: float,
        y: Tensor,
        start: Tensor | None,
        mask: Tensor | None,
        context: Tensor | None,
        scale: Tensor,
        *,
        is_last: bool,
    ) -> Iterated:
        step = self._step(f, y, mask, context, scale, is_near=start is not None)

        def look(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
            here, given, row_scale = _of(active, mask, context, scale)
            if not isinstance(step, NewtonStep):
                return f.scaled(x, here, given, row_scale), None
            value, blocks = f.free_diagonal(x, here, given)
            return value * row_scale.unsqueeze(-1), blocks.scaled(row_scale).dense()

        def norm(t: Tensor) -> Tensor:
            return sequence_norm(t, f.norm)

        evaluate = watched(look, lipschitz, norm, len(y)) if isinstance(f, Declared) else look
        start = y.clone() if start is None else start  # which may be the solution, and is not the caller's
        goal = tolerance / 2 if is_last else tolerance  # the other half is for what rounding hides of f
        return iterate(evaluate, y, start, step, norm, lipschitz, goal, self.max_steps, is_last=is_last)

    def _step(
        self, f: Contraction, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor, *, is_near: bool
    ) -> Step:
        """How to go on from x, or from a point that is near the solution already."""
        if self.history == 0:
            return PlainStep()
        if f.structure == "tokenwise":
            return NewtonStep()
        step = AndersonStep(self.history)
        has_closed_form = type(f).free_diagonal is not Contraction.free_diagonal
        count = min(FIRST_TOKENS, MAX_NUMBERS // f.features**2)
        if is_near or f.structure == "dense" or not has_closed_form or count == 0:
            return step
        first = slice(count)
        mask = None if mask is None else mask[:, first]
        scale = scale if scale.shape[-1] == 1 else scale[..., first]
        context = context if context is None or context.shape[1] == 1 else context[:, first]
        _, blocks = f.free_diagonal(x[:, first], mask, context)
        return ChordStep(blocks.scaled(scale).dense(), step)

    def _raise_unless_small(
        self, error: Tensor, tolerance: float, length: Tensor, count: Tensor, coefficient: float | None
    ) -> None:
        length = length.clamp_min(1)
        bad = ~(error <= tolerance * length)
        if not bad.any():
            return
        worst = int((error / length).where(bad, -math.inf).argmax())
        cause = (
            f"{int(bad.sum())} of {len(bad)} samples are not inverted: "
            f"worst certified error {error[worst].item():.1e} > tolerance {tolerance:.0e}"
        )
        if length[worst] > 1:
            cause += f" relative to a length of {length[worst].item():.1e}"
        if not error[worst].isfinite():
            advice = (
                "The iteration came to values that are not finite: either f is not the contraction it is declared to "
                "be, or its weights are not finite."
            )
        elif (count[bad] >= self.max_steps).any():
            advice = f"Raise max_steps, now {self.max_steps}"
            advice += "." if coefficient is None else f", or lower the coefficient, now {coefficient}."
        else:
            advice = (
                "The iteration came to a halt before: either f is not the contraction it is declared to be, "
                "or the tolerance is below rounding error."
            )
        raise InverseNotConverged(f"{cause}. {advice}")


def _pick(t: Tensor | None, samples: Tensor | slice | None) -> Tensor | None:
    """These samples of t, or all of them."""
    return t if t is None or samples is None else t[samples]


def _of(samples: Tensor | slice | None, mask: Tensor | None, context: Tensor | None, scale: Tensor) -> Known:
    """What f is given of these samples beside their tokens; a scale of one dimension is that of all of them."""
    own_scale = scale if samples is None or scale.ndim == 1 else scale[samples]
    return _pick(mask, samples), _pick(context, samples), own_scale


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t.to(dtype) if t is not None and t.is_floating_point() else t


class _Holding(nn.Module):
    """A function that uses f, as a module that has the parameters of f."""

    def __init__(self, f: Contraction, function: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _in_precision(f: Contraction, dtype: torch.dtype, function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function with the parameters and buffers of f in another precision, be they leaves or computed."""
    named = itertools.chain(f.named_parameters("f"), f.named_buffers("f"))
    cast = {name: tensor.to(dtype) for name, tensor in named if tensor.is_floating_point()}
    return torch.func.functional_call(_Holding(f, function), cast, args)
