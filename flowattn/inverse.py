r"""Solves y = x + f(x) for a contraction f, sample by sample, with a certified error.

.. math:: |x_k - x| \le \frac{|y - x_k - f(x_k)|}{1 - L} \quad\text{for any } x_k

The plain iteration :math:`x \leftarrow y - f(x)` always converges, if slowly. Faster steps are tried first: Newton's on
each token where f is tokenwise (the diagonal blocks are then the whole Jacobian), Anderson's otherwise. A step that
does not bring a sample closer is replaced by a plain one, so the guarantee of the plain iteration is kept.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from nflows.transforms.base import InverseNotAvailable
from torch import Tensor

from flowattn.checks import can_look, check_positive
from flowattn.contractions import Contraction
from flowattn.lipschitz.norms import Norm, sequence_norm

#: f at points x of the samples `active`, and its diagonal blocks if the step wants them.
Evaluate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class InverseNotConverged(InverseNotAvailable):
    """The inverse was not found to the tolerance. No approximation is returned in its place."""


class Solution(NamedTuple):
    """The inverse, an upper bound of each sample's error, and how often f was evaluated for it."""

    x: Tensor
    certified_error: Tensor
    num_evaluations: Tensor


@dataclass(frozen=True)
class Solver:
    """How an inverse is computed.

    Args:
        tolerance: largest certified error of a sample, in the norm of the contraction; 1e-5 in single precision and
            1e-10 in double unless given. Rounding the result to the precision of y comes on top.
        max_steps: evaluations of f after which a sample is given up.
        history: how many past steps Anderson's combination looks back on; 0 leaves the plain iteration.

    Example:
        >>> from flowattn.contractions import L2SelfAttention
        >>> f, x = L2SelfAttention(4, 2), torch.randn(3, 5, 4)
        >>> solution = Solver(tolerance=1e-6).solve(f, x + f(x))
        >>> bool((solution.certified_error <= 1e-6).all())
        True
    """

    tolerance: float | None = None
    max_steps: int = 1000
    history: int = 5

    def __post_init__(self) -> None:
        check_positive(max_steps=self.max_steps)
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a positive number; got tolerance={self.tolerance}.")
        if self.history < 0:
            raise ValueError(f"history must be at least 0; got history={self.history}.")

    @torch.no_grad()
    def solve(self, f: Contraction, y: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Solution:
        """The inverse of x + f(x) at y [B, N, D]; padding is zero."""
        y, context = f._checked(y, mask, context)
        lipschitz = _lipschitz(f, y.shape[1])
        if not lipschitz < 1:
            raise InverseNotConverged(
                f"x + f(x) is not known to be invertible: the Lipschitz bound of f is {lipschitz:.3g}, not below 1. "
                "Give the contraction a coefficient."
            )
        tolerance = self.tolerance or (1e-10 if y.dtype == torch.float64 else 1e-5)
        scale = f.scale(y.shape[1], mask)
        x, error, count = self._iterate(f, y, y, mask, context, scale, lipschitz, tolerance)
        todo = (error > tolerance).nonzero().squeeze(-1)
        if len(todo) and y.dtype != torch.float64:
            # Through the factor 1 / (1 - L) single precision does not see its own error. Finish in double.
            fine, scale = copy.deepcopy(f).double(), (scale if scale.ndim == 1 else scale[todo]).double()
            start, goal = x[todo].double(), y[todo].double()
            few = _pick(mask, todo), _pick(context, todo)
            part = self._iterate(fine, goal, start, few[0], few[1], scale, lipschitz, tolerance)
            x[todo], error[todo], count[todo] = part[0].to(x), part[1].to(error), count[todo] + part[2]
        self._raise_unless_small(error, count, tolerance, f.coefficient)
        return Solution(x, error, count)

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
    ) -> Solution:
        context = context if context is None else context.to(y.dtype)

        def evaluate(x: Tensor, active: Tensor) -> tuple[Tensor, Tensor | None]:
            row_scale = scale if scale.ndim == 1 else scale[active]
            here, given = _pick(mask, active), _pick(context, active)
            if f.structure != "tokenwise":
                return f.free(x, here, given) * row_scale.unsqueeze(-1), None
            value, blocks = f.free_diagonal(x, here, given)
            return value * row_scale.unsqueeze(-1), blocks.scaled(row_scale).dense()

        step: _Step = _NewtonStep() if f.structure == "tokenwise" else _AndersonStep(self.history)
        return _iterate(
            evaluate, y, start, step, lambda t: sequence_norm(t, f.norm), lipschitz, tolerance, self.max_steps
        )

    def _raise_unless_small(self, error: Tensor, count: Tensor, tolerance: float, coefficient: float | None) -> None:
        bad = ~(error <= tolerance)
        if not bad.any():
            return
        worst = error[bad].max().item()
        cause = (
            f"{int(bad.sum())} of {len(bad)} samples are not inverted: "
            f"worst certified error {worst:.1e} > tolerance {tolerance:.0e}"
        )
        if (count[bad] >= self.max_steps).any():
            advice = f"Raise max_steps, now {self.max_steps}"
            advice += "." if coefficient is None else f", or lower the coefficient, now {coefficient}."
        else:
            advice = (
                "The iteration came to a halt before: either f is not the contraction it is declared to be, "
                "or the tolerance is below rounding error."
            )
        raise InverseNotConverged(f"{cause}. {advice}")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def invert(
    f: Contraction,
    y: Tensor,
    mask: Tensor | None = None,
    context: Tensor | None = None,
    solver: Solver | None = None,
) -> Tensor:
    r"""The inverse of x + f(x) at y, differentiable in y, the context and the parameters; padding is passed through.

    .. math:: dx = (I + J)^{-1} (dy - \partial_\theta f\, d\theta)

    The gradient is solved for as the inverse is, with no trace of the iteration in memory. It is not differentiable
    once more, and says so.
    """
    if not can_look():
        raise NotImplementedError(
            "the inverse of x + f(x) is found by an iteration that looks at its values, which torch.func cannot trace. "
            "Differentiate it by torch.autograd, or transform the forward direction."
        )
    solver = Solver() if solver is None else solver
    x = solver.solve(f, y, mask, context).x
    if torch.is_grad_enabled():
        leaf = x.requires_grad_()
        change = f(leaf, mask, context)
        if y.requires_grad or change.grad_fn is not None:
            x = (y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0)) - change
            lipschitz = _lipschitz(f, y.shape[1])
            x.register_hook(lambda g: _solve_adjoint(change, leaf, g, f.norm, lipschitz, solver))
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, y)


def _solve_adjoint(
    change: Tensor, leaf: Tensor, g: Tensor | None, norm: Norm, lipschitz: float, solver: Solver
) -> Tensor | None:
    """Solves u + J^T u = g, in the norm dual to that of the contraction."""
    if g is None:
        return None
    if torch.is_grad_enabled():
        raise NotImplementedError("the inverse can be differentiated once; a second derivative was asked for.")

    def evaluate(u: Tensor, active: Tensor) -> tuple[Tensor, None]:
        whole = torch.zeros_like(g).index_copy(0, active, u)
        return torch.autograd.grad(change, leaf, whole, retain_graph=True)[0][active], None

    def dual_norm(u: Tensor) -> Tensor:
        if norm == "token":
            return torch.linalg.vector_norm(u, dim=-1).sum(-1)
        return torch.linalg.vector_norm(u, ord=1 if norm == "inf" else 2, dim=(-2, -1))

    relative = 1e-12 if g.dtype == torch.float64 else 1e-6
    tolerance = relative * dual_norm(g) / (1 - lipschitz)
    u, error, _ = _iterate(
        evaluate, g, g, _AndersonStep(solver.history), dual_norm, lipschitz, tolerance, solver.max_steps
    )
    # Rounding may end the iteration above so small a tolerance; what must not pass is an iteration that ran away.
    if not (error <= 1e3 * tolerance).all():
        raise InverseNotConverged(
            f"the gradient of the inverse was not found in max_steps={solver.max_steps}. Raise max_steps."
        )
    return u


def _lipschitz(f: Contraction, num_tokens: int) -> float:
    """A constant that f is known not to exceed, in its norm; its coefficient, which costs nothing, if it has one."""
    return f.lipschitz_bound(num_tokens, f.norm).item() if f.coefficient is None else f.coefficient


def _pick(t: Tensor | None, samples: Tensor) -> Tensor | None:
    return None if t is None else t[samples]


class _Step(ABC):
    """Proposes the next point from the last one x, its plain step g = y - f(x), and the blocks J_ii there."""

    @abstractmethod
    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        """The next point of each sample."""

    @abstractmethod
    def keep(self, going: Tensor) -> None:
        """Forgets all samples but those that go on."""


class _NewtonStep(_Step):
    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        assert blocks is not None
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        return x + torch.linalg.solve(identity + blocks, (g - x).unsqueeze(-1)).squeeze(-1)

    def keep(self, going: Tensor) -> None:
        pass


class _AndersonStep(_Step):
    """The combination of past steps whose residual is smallest.

    References:
        | Anderson Acceleration for Fixed-Point Iterations (Walker, Ni, 2011)
    """

    def __init__(self, history: int) -> None:
        self.history = history
        self.num_past = 0
        self.last: list[Tensor] = []  # the last plain step and its residual
        self.past: list[Tensor] = []  # the differences of those before, [B, history, N D] each, in a ring

    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        if self.history == 0:
            return g
        now = [g.flatten(1), (g - x).flatten(1)]
        if not self.last:
            self.last = now
            self.past = [t.new_zeros(len(t), self.history, t.shape[1]) for t in now]
            return g
        for past, new, old in zip(self.past, now, self.last, strict=True):
            torch.sub(new, old, out=past[:, self.num_past % self.history])
        self.last = now
        self.num_past += 1
        G, R = (past[:, : self.num_past] for past in self.past)
        gram = R @ R.mT
        ridge = gram.diagonal(dim1=1, dim2=2).amax(-1) * 100 * torch.finfo(x.dtype).eps + torch.finfo(x.dtype).tiny
        gram = gram + torch.diag_embed(ridge.unsqueeze(-1).expand(gram.shape[:2]))
        weights = torch.linalg.solve(gram, R @ now[1].unsqueeze(-1))
        return g - (weights.mT @ G).view_as(g)

    def keep(self, going: Tensor) -> None:
        self.last = [t[going] for t in self.last]
        self.past = [t[going] for t in self.past]


def _iterate(
    evaluate: Evaluate,
    y: Tensor,
    start: Tensor,
    step: _Step,
    norm: Callable[[Tensor], Tensor],
    lipschitz: float,
    tolerance: Tensor | float,
    max_steps: int,
) -> Solution:
    """Solves x + f(x) = y until every sample is certified, comes to a halt, or has had `max_steps` evaluations.

    Each sample keeps its best point. After a step that failed to improve it, the plain step from there is tried, which
    for a contraction can fail only by rounding: then the sample has come to a halt.
    """
    size = len(y)
    rounding = 8 * torch.finfo(y.dtype).eps * norm(y)
    tolerance = torch.as_tensor(tolerance, dtype=y.dtype, device=y.device).expand(size)
    best, best_plain = start.clone(), start.clone()
    best_residual = y.new_full((size,), math.inf)
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
        certified = (best_residual[active] + rounding[active]) / (1 - lipschitz) <= tolerance[active]
        halted = (was_plain & ~better) | (best_residual[active] <= rounding[active])
        going = ~certified & ~halted
        if not going.any():
            break
        x = torch.where(better[:, None, None], step.propose(x, plain, blocks), best_plain[active])
        was_plain = ~better
        if not going.all():
            step.keep(going)
            active, x, was_plain = active[going], x[going], was_plain[going]
    return Solution(best, (best_residual + rounding) / (1 - lipschitz), count)
