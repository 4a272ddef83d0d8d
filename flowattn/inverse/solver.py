"""How an inverse is computed, to what error, and in which precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowattn.checks import check_positive, check_positive_number, without_autocast
from flowattn.contractions import Contraction
from flowattn.inverse.iteration import InverseNotConverged, Iterated, Solution, iterate, lipschitz_of
from flowattn.inverse.steps import AndersonStep, NewtonStep, PlainStep, Step
from flowattn.lipschitz.norms import sequence_norm


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

        def solve_some(samples: Tensor, start: Tensor, dtype: torch.dtype) -> Iterated:
            own_scale = (scale if scale.ndim == 1 else scale[samples]).to(dtype)
            few, features = _pick(mask, samples), _pick(context, samples)
            features = features if features is None else features.to(dtype)
            given = (f, y[samples].to(dtype), start.to(dtype), few, features, own_scale, lipschitz, tolerance)
            return self._iterate(*given) if dtype == y.dtype else _in_precision(f, dtype, self._iterate, *given)

        everyone = torch.arange(len(y), device=y.device)
        single = torch.promote_types(y.dtype, torch.float32)
        solution, following = solve_some(everyone, y, single)
        late = everyone[~(solution.certified_error <= tolerance)]
        if len(late) and single != torch.float64 and y.device.type != "mps":
            # Through the factor 1 / (1 - L) single precision does not see its own error.
            finer, _ = solve_some(late, following[late], torch.float64)
            solution.x[late], solution.certified_error[late] = finer.x.to(single), finer.certified_error.to(single)
            solution.num_evaluations[late] += finer.num_evaluations
        return solution

    def _iterate(
        self,
        f: Contraction,
        y: Tensor,
        start: Tensor,
        mask: Tensor | None,
        context: Tensor | None,
        scale: Tensor,
        lipschitz: float,
        tolerance: float,
    ) -> Iterated:
        step: Step = PlainStep()
        if self.history > 0:
            step = NewtonStep() if f.structure == "tokenwise" else AndersonStep(self.history)

        def evaluate(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
            row_scale = scale if scale.ndim == 1 else scale[active]
            here, given = _pick(mask, active), _pick(context, active)
            if not isinstance(step, NewtonStep):
                return f.free(x, here, given) * row_scale.unsqueeze(-1), None
            value, blocks = f.free_diagonal(x, here, given)
            return value * row_scale.unsqueeze(-1), blocks.scaled(row_scale).dense()

        return iterate(
            evaluate, y, start, step, lambda t: sequence_norm(t, f.norm), lipschitz, tolerance, self.max_steps
        )

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
        if (count[bad] >= self.max_steps).any():
            advice = f"Raise max_steps, now {self.max_steps}"
            advice += "." if coefficient is None else f", or lower the coefficient, now {coefficient}."
        else:
            advice = (
                "The iteration came to a halt before: either f is not the contraction it is declared to be, "
                "or the tolerance is below rounding error."
            )
        raise InverseNotConverged(f"{cause}. {advice}")


def _pick(t: Tensor | None, samples: Tensor) -> Tensor | None:
    return None if t is None else t[samples]


class _Holding(nn.Module):
    """A function that uses f, as a module that has the parameters of f."""

    def __init__(self, f: Contraction, function: Callable[..., Iterated]) -> None:
        super().__init__()
        self.f = f
        self.function = function

    def forward(self, *args: Any) -> Iterated:
        return self.function(*args)


def _in_precision(f: Contraction, dtype: torch.dtype, function: Callable[..., Iterated], *args: Any) -> Iterated:
    """Calls the function with the parameters and buffers of f in another precision, be they leaves or computed."""
    named = itertools.chain(f.named_parameters("f"), f.named_buffers("f"))
    cast = {name: tensor.to(dtype) for name, tensor in named if tensor.is_floating_point()}
    return torch.func.functional_call(_Holding(f, function), cast, args)
