"""The inverse, differentiable without a trace of the iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.contractions import Contraction
from flowattn.inverse.iteration import InverseNotConverged, iterate, lipschitz_of
from flowattn.inverse.solver import Solver
from flowattn.inverse.steps import AndersonStep, PlainStep
from flowattn.lipschitz.norms import Norm


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
    if not can_look() or in_forward_mode():
        raise NotImplementedError(
            "the inverse of x + f(x) is found by an iteration that looks at its values, which neither torch.func nor "
            "forward mode can trace. Differentiate it by torch.autograd, backwards, or transform the forward direction."
        )
    solver = Solver() if solver is None else solver
    x = solver.solve(f, y, mask, context).x
    if torch.is_grad_enabled() and _wants_gradient(f, x, y, mask, context):
        leaf = x.detach().requires_grad_()
        change = f(leaf, mask, context)
        implicit = (y if mask is None else y.masked_fill(~mask.unsqueeze(-1), 0)) - change
        lipschitz = lipschitz_of(f, y.shape[1])
        implicit.register_hook(lambda g: _solve_adjoint(change, leaf, g, f.norm, lipschitz, solver))
        x = x + (implicit - implicit.detach()).to(x.dtype)  # the value that was certified, to the last digit
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, y)


def _wants_gradient(f: Contraction, x: Tensor, y: Tensor, mask: Tensor | None, context: Tensor | None) -> bool:
    known = (y, *f.parameters()) if context is None else (y, context, *f.parameters())
    # A module of a user may hold on to what it got elsewhere.
    return any(t.requires_grad for t in known) or f(x, mask, context).requires_grad


def _solve_adjoint(
    change: Tensor, leaf: Tensor, g: Tensor | None, norm: Norm, lipschitz: float, solver: Solver
) -> Tensor | None:
    """Solves u + J^T u = g, in the norm dual to that of the contraction."""
    if g is None:
        return None
    if torch.is_grad_enabled():
        raise NotImplementedError("the inverse can be differentiated once; a second derivative was asked for.")
    if not g.isfinite().all():
        return g * torch.nan  # for whoever asked, such as a scaler of losses, which skips the step

    def evaluate(u: Tensor, active: Tensor) -> tuple[Tensor, None]:
        whole = torch.zeros_like(g).index_copy(0, active, u)
        return torch.autograd.grad(change, leaf, whole, retain_graph=True)[0][active], None

    def dual_norm(u: Tensor) -> Tensor:
        if norm == "token":
            return torch.linalg.vector_norm(u, dim=-1).sum(-1)
        return torch.linalg.vector_norm(u, ord=1 if norm == "inf" else 2, dim=(-2, -1))

    relative = 1e-12 if g.dtype == torch.float64 else 1e-6
    step = AndersonStep(solver.history) if solver.history else PlainStep()
    tolerance = relative * dual_norm(g) / (1 - lipschitz)
    (u, error, _), _ = iterate(evaluate, g, g, step, dual_norm, lipschitz, tolerance, solver.max_steps)
    # Rounding may end the iteration above so small a tolerance; what must not pass is an iteration that ran away.
    if not (error <= 1e3 * relative * dual_norm(u).maximum(dual_norm(g)) / (1 - lipschitz)).all():
        raise InverseNotConverged(
            f"the gradient of the inverse was not found in max_steps={solver.max_steps}. Raise max_steps."
        )
    return u
