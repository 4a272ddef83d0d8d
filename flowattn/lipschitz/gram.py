r"""The largest singular value or eigenvalue from above, by squaring the Gram matrix again and again.

Plain, the squares are powers. Shifted, they are nearly Chebyshev polynomials, which tell the largest eigenvalue from
the others with half the squarings. With :math:`P_0 = W W^T` of r rows and :math:`\lambda_k` the largest eigenvalue of
:math:`P_k`,

.. math:: P_{k+1} = Q_k^2, \qquad Q_k = P_k / s_k - I, \qquad
    s_k = \frac{\operatorname{tr} P_k^2}{2 \operatorname{tr} P_k}, \qquad
    \lambda_k = s_k \Bigl(1 + \sqrt{\lambda_{k+1}}\Bigr).

Proof: :math:`s_k \le \lambda_k / 2`, so no eigenvalue of :math:`Q_k` is larger than that of :math:`\lambda_k`. It is
also the s for which :math:`\operatorname{tr} P_{k+1} = r`. The last eigenvalue is bounded by the mean m of all and
their deviation: :math:`\lambda_K \le m + \sqrt{1 - 1/r}\, \|P_K - m I\|_F`.

References:
    | Bounds for Eigenvalues Using Traces (Wolkowicz, Styan, 1980)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowattn.checks import nothing_is_recorded

#: From this many rows on the products of shifted squarings take longer than the steps between them.
SHIFTED_FROM = 192

#: From this many rows on a symmetric product is computed up to its diagonal, in panels of a quarter of its columns.
PANELS_FROM = 384

#: Traces of Gram matrices below this are those of zeros.
SMALLEST_TRACE = 1e-12

#: How far above the singular value so many shifted squarings may end, over (log r + 0.7)^2.4: more than was found by
#: a search over spectra of 3 to 4096 values. Each further one at least halves it.
EXCESS = (0.045, 0.0116, 0.003, 0.00077, 0.0002, 0.000075, 0.000031)


class Iteration(NamedTuple):
    """A way to bound a number of each matrix of a batch, and to differentiate the bound."""

    #: Takes matrices to the bounds, [batch, 1, 1], and to what `gradient` needs if that is to be kept.
    run: Callable[[Tensor, bool], list[Tensor]]
    #: Takes that to the gradients of the bounds, like the matrices.
    gradient: Callable[[Sequence[Tensor]], Tensor]


def singular_value(W: Tensor, tolerance: float) -> Iteration:
    """For matrices like W: too large by this share of it at most, and by rounding."""
    return of_gram(_of_symmetric(min(W.shape[-2:]), tolerance))


def eigenvalue(P: Tensor, tolerance: float) -> Iteration:
    """The same for symmetric matrices without negative eigenvalues, of a trace of 1 or more, or 0."""
    run, gradient = _of_symmetric(P.shape[-1], math.sqrt(1 + tolerance) - 1)
    return Iteration(lambda P, keep: run(P.clone(), keep), gradient)


def upper_bound(matrices: Tensor, iteration: Iteration) -> Tensor:
    """The bounds, [batch]."""
    if torch.compiler.is_compiling() or nothing_is_recorded():
        return iteration.run(matrices, torch.compiler.is_compiling())[0].view(-1)
    return _Bound.apply(matrices, iteration)[0].view(-1)


def use_up(P: Tensor, tolerance: float, *, keep: bool) -> tuple[Tensor, Callable[[], Tensor]]:
    """The bounds of `eigenvalue`, computed in the memory of P, and a function that computes their gradients.

    Neither is recorded. The function works if its material is to be kept.
    """
    iteration = _of_symmetric(P.shape[-1], math.sqrt(1 + tolerance) - 1)
    found, *tape = iteration.run(P, keep)
    return found.view(-1), functools.partial(iteration.gradient, tape)


def scaled(W: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of largest entry 1, and that entry. A bound of W / size times size needs no gradient of size."""
    # Without |W|, whose fresh memory costs more than looking twice.
    highest, lowest = (extreme(W.detach(), (-2, -1), keepdim=True) for extreme in (torch.amax, torch.amin))
    size = torch.maximum(highest, -lowest)
    return W / size.clamp_min(_tiny(W)), size


def is_wide(W: Tensor) -> bool:
    """Whether matrices have no more rows than columns."""
    return W.shape[-2] <= W.shape[-1]


def wide(W: Tensor) -> Tensor:
    """Wide matrices of the same norm."""
    return W if is_wide(W) else W.mT


def symmetric_product(X: Tensor, Y: Tensor, out: Tensor | None = None) -> Tensor:
    """X Y, where that is symmetric. Of large ones on CPU what is above the diagonal is a copy, unless this is recorded.

    Example:
        >>> symmetric_product(torch.ones(1, 2, 3), torch.ones(1, 3, 2))
        tensor([[[3., 3.],
                 [3., 3.]]])
    """
    size = X.shape[-2]
    if size < PANELS_FROM or not nothing_is_recorded() or X.device.type != "cpu":
        return torch.bmm(X, Y, out=out)  # quicker to call than @
    out = X.new_empty(len(X), size, size) if out is None else out
    width = math.ceil(size / 4)
    for start in range(0, size, width):
        rest, columns = slice(start, size), slice(start, start + width)
        torch.bmm(X[:, rest], Y[..., columns], out=out[:, rest, columns])
        out[:, columns, start + width :] = out[:, start + width :, columns].mT
    return out


def times(A: Tensor, W: Tensor) -> Tensor:
    """Symmetric matrices times the wide ones, laid out as W."""
    return torch.bmm(A, W) if is_wide(W) else torch.bmm(W, A)


def of_gram(iteration: Iteration) -> Iteration:
    """The largest singular value, whose square is the largest eigenvalue of the Gram matrix."""
    return Iteration(functools.partial(_root, iteration), functools.partial(_root_gradient, iteration))


def _root(iteration: Iteration, W: Tensor, keep: bool) -> list[Tensor]:
    W, size = scaled(W)
    X = wide(W)
    square, *tape = iteration.run(symmetric_product(X, X.mT), keep)
    root = square.clamp_min(0.5).sqrt()  # at least 1, but for a zero matrix, where it would have no gradient
    return [root * size, W, root, *tape]


def _root_gradient(iteration: Iteration, tape: Sequence[Tensor]) -> Tensor:
    W, root, *rest = tape
    return times(iteration.gradient(rest), W) / root


def _of_symmetric(rank: int, tolerance: float) -> Iteration:
    """For a tolerance of the square root of the eigenvalue. It uses up the matrices, unless that is recorded."""
    if rank < SHIFTED_FROM:
        return plain(_num_plain(rank, tolerance))
    return shifted(_num_shifted(rank, tolerance))


def _num_plain(rank: int, tolerance: float) -> int:
    return math.ceil(math.log2(max(1.0, math.log(rank) / (4 * math.log1p(tolerance)))))


def _num_shifted(rank: int, tolerance: float) -> int:
    wanted = tolerance / (math.log(rank) + 0.7) ** 2.4
    enough = (k for k, excess in enumerate(EXCESS) if excess <= wanted)
    return next(enough, len(EXCESS) - 1 + math.ceil(math.log2(max(1.0, EXCESS[-1] / wanted))))


def plain(num_squarings: int) -> Iteration:
    """Powers P, P^2, P^4, ..., each up to a factor."""
    return Iteration(functools.partial(_plain, num_squarings), _plain_gradient)


def _plain(num_squarings: int, P: Tensor, keep: bool) -> list[Tensor]:
    size, power = _normalized(P)
    powers, share, spare = [power], torch.ones_like(size), None if keep else torch.empty_like(P)
    for k in range(1, num_squarings + 1):
        power, spare = _square(power, spare)
        if k % 3 == 0 or k == num_squarings:  # three squarings shrink a power of norm 1 to no less than r^-4
            norm, power = _normalized(power)
            share = share * norm ** (1 / 2**k)
        powers.append(power)
    return [size * share, share, *powers] if keep else [size * share]


def _normalized(P: Tensor) -> tuple[Tensor, Tensor]:
    # The clamp is for a zero matrix, whose bound is 0 and whose gradient is 0.
    norm = torch.linalg.vector_norm(P, dim=(-2, -1), keepdim=True).clamp_min(_tiny(P))
    return norm, _divided(P, norm)


def _divided(P: Tensor, by: Tensor) -> Tensor:
    # Fresh memory costs more than the division.
    return P / by if torch.is_grad_enabled() else P.div_(by)


def _square(Q: Tensor, spare: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The square of Q, in the memory to spare if there is any, and then that of Q to spare."""
    return symmetric_product(Q, Q, spare), None if spare is None else Q


def _plain_gradient(tape: Sequence[Tensor]) -> Tensor:
    # tr P^2p has the gradient P^(2p-1) = P^p P^(p-1) with p - 1 = p/2 + ... + 2 + 1. The factors that the powers
    # were divided by are restored by <gradient, P> = bound, the map being homogeneous.
    share, *powers, product = tape
    for power in reversed(powers):
        product = torch.bmm(product, power)
    along = (product * tape[1]).sum((-2, -1), keepdim=True).clamp_min(_tiny(product))
    return product * (share / along)


def shifted(num_squarings: int) -> Iteration:
    """Squares with shifts between them."""
    return Iteration(functools.partial(_shifted, num_squarings), _shifted_gradient)


def _shifted(num_squarings: int, P: Tensor, keep: bool) -> list[Tensor]:
    rank, eps = P.shape[-1], torch.finfo(P.dtype).eps
    # The clamps are for a zero matrix.
    mean = P.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(SMALLEST_TRACE) / rank
    steps: list[tuple[Tensor, Tensor, Tensor]] = []
    spare = None if keep else torch.empty_like(P)
    for _ in range(num_squarings):
        share = torch.linalg.vector_norm(P, dim=(-2, -1), keepdim=True).square() / (2 * rank * mean.square())
        s = share.clamp_min(0.25) * mean
        Q = _add_identity(_divided(P, s), -1.0)
        steps.append((Q, s, share))
        (P, spare), mean = _square(Q, spare), torch.ones_like(s)
    D = _add_identity(P, -mean)
    deviation = (_inner(D, D) + eps**2).sqrt()  # smooth at zero
    eigenvalue = mean + math.sqrt(1 - 1 / rank) * deviation
    tape = [D, deviation]
    for Q, s, share in reversed(steps):
        root = eigenvalue.sqrt()
        eigenvalue = s * (1 + root)
        tape += [Q, share, root]
    return [eigenvalue, *tape] if keep else [eigenvalue]


def _shifted_gradient(tape: Sequence[Tensor]) -> Tensor:
    r"""That of :math:`\lambda_k` is a polynomial A_k of P_k, so all of these commute, and

    .. math:: A_k = Q_k \Bigl( \frac{A_{k+1}}{\sqrt{\lambda_{k+1}}} + \frac{s_k}{\operatorname{tr} P_k}
        \Bigl(1 - \frac{\langle A_{k+1}, Q_k \rangle}{\sqrt{\lambda_{k+1}}}\Bigr) I \Bigr).
    """
    D, deviation, *steps = tape
    rank = D.shape[-1]
    A = _add_identity(math.sqrt(1 - 1 / rank) / deviation * D, 1 / rank)
    for Q, share, root in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        weight = (1 - _inner(A, Q) / root) * share / rank
        A = symmetric_product(Q, A).div_(root).addcmul_(Q, weight)
    return A


def _add_identity(P: Tensor, factor: Tensor | float) -> Tensor:
    """P + factor I, in place."""
    P.diagonal(dim1=-2, dim2=-1).add_(factor if isinstance(factor, float) else factor.squeeze(-1))
    return P


def _inner(P: Tensor, Q: Tensor) -> Tensor:
    """The inner products of matrices, [batch, 1, 1], with no room for the products of their entries."""
    return torch.bmm(P.reshape(len(P), 1, -1), Q.reshape(len(Q), -1, 1))


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


class _Bound(torch.autograd.Function):
    """An iteration with half the products in its backward pass, because the matrices on its way commute."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrices: Tensor, iteration: Iteration) -> tuple[Tensor, ...]:
        return tuple(iteration.run(matrices, True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        matrices, ctx.iteration = inputs
        ctx.save_for_backward(matrices, *output[1:])
        ctx.save_for_forward(matrices)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: None) -> Any:
        if g is None:
            return None, None
        matrices, *tape = ctx.saved_tensors
        if torch.is_grad_enabled():
            pull = torch.func.vjp(lambda matrices: ctx.iteration.run(matrices, True)[0], matrices)[1]
            return *pull(g), None
        return ctx.iteration.gradient(tape) * g, None

    @staticmethod
    def jvp(ctx: Any, change: Tensor, *_: None) -> Any:
        _, *tape = ctx.iteration.run(ctx.saved_tensors[0], True)  # anew, to be differentiable
        return (ctx.iteration.gradient(tape) * change).sum((-2, -1), keepdim=True), *[None] * len(tape)
