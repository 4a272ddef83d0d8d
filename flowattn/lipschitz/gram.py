r"""The largest singular value from above, by squaring the Gram matrix again and again.

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
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import nothing_is_recorded

#: From this many rows on the products of shifted squarings take longer than the steps between them.
SHIFTED_FROM = 192

#: How far above the singular value so many shifted squarings may end, over (log r + 0.7)^2.4: more than was found by
#: a search over spectra of 3 to 4096 values. Each further one at least halves it.
EXCESS = (0.045, 0.0116, 0.003, 0.00077, 0.0002, 0.000075, 0.000031)


def largest_singular_value(W: Tensor, tolerance: float) -> Tensor:
    """A bound of that of each matrix [batch, rows, columns], too large by this share of it at most, and by rounding."""
    is_shifted, num_squarings = _plan(W, tolerance)
    if torch.compiler.is_compiling() or nothing_is_recorded():
        return (_shifted if is_shifted else _plain)(W, num_squarings)[0]
    return _GramIteration.apply(W, num_squarings, is_shifted)[0]


def iterate(W: Tensor, tolerance: float) -> tuple[Tensor, Callable[[], Tensor]]:
    """The same bound and its gradient, which is computed when it is called for. Neither is recorded."""
    is_shifted, num_squarings = _plan(W, tolerance)
    bound, *tape = (_shifted if is_shifted else _plain)(W, num_squarings)
    return bound, functools.partial(_shifted_gradient if is_shifted else _plain_gradient, tape)


def _plan(W: Tensor, tolerance: float) -> tuple[bool, int]:
    """Whether to shift, and how often to square."""
    rank = min(W.shape[-2:])
    is_shifted = rank >= SHIFTED_FROM
    return is_shifted, _num_shifted(rank, tolerance) if is_shifted else _num_plain(rank, tolerance)


def largest_entry(W: Tensor) -> Tensor:
    """The largest entry. A bound of W / size times size does not depend on it, so it needs no gradient."""
    return W.detach().abs().amax((-2, -1), keepdim=True)


def _gram(W: Tensor) -> Tensor:
    return torch.bmm(W, W.mT) if W.shape[-2] <= W.shape[-1] else torch.bmm(W.mT, W)  # which is quicker to call than @


def _add_identity(P: Tensor, factor: Tensor | float) -> Tensor:
    """P + factor I, in place."""
    P.diagonal(dim1=-2, dim2=-1).add_(factor if isinstance(factor, float) else factor.squeeze(-1))
    return P


# -- plain


def _num_plain(rank: int, tolerance: float) -> int:
    return math.ceil(math.log2(max(1.0, math.log(rank) / (4 * math.log1p(tolerance)))))


def _plain(W: Tensor, num_squarings: int) -> list[Tensor]:
    """The bound, and what `_plain_gradient` makes its derivative of: powers A, A^2, A^4, ..., each up to a factor."""
    size, tiny = largest_entry(W), torch.finfo(W.dtype).tiny
    W = W / size.clamp_min(tiny)
    power, root, powers = _gram(W), torch.ones_like(size), []
    for k in range(num_squarings + 1):
        if k % 3 == 0 or k == num_squarings:  # three squarings shrink a power of norm 1 to no less than r^-4
            # The clamp is for a zero matrix, whose bound is 0 and whose gradient is 0, where the root has none.
            scale = torch.linalg.vector_norm(power, dim=(-2, -1), keepdim=True).clamp_min(tiny)
            root = root * scale ** (0.5 / 2**k)
            power = power / scale
        powers.append(power)
        if k < num_squarings:
            power = torch.bmm(power, power)
    return [(root * size).view(-1), W, root, *powers]


def _plain_gradient(tape: Sequence[Tensor]) -> Tensor:
    # tr A^2p has the gradient A^(2p-1) W with A^(2p-1) = A^p A^(p-1) and p - 1 = p/2 + ... + 2 + 1. The factors that
    # the powers were divided by are restored by <gradient, W> = bound, the map being homogeneous.
    W, root, *powers, product = tape
    for power in reversed(powers):
        product = torch.bmm(product, power)
    direction = torch.bmm(product, W) if product.shape[-1] == W.shape[-2] else torch.bmm(W, product)
    along = (direction * W).sum((-2, -1), keepdim=True).clamp_min(torch.finfo(W.dtype).tiny)
    return direction * (root / along)


# -- shifted


def _num_shifted(rank: int, tolerance: float) -> int:
    wanted = tolerance / (math.log(rank) + 0.7) ** 2.4
    enough = (k for k, excess in enumerate(EXCESS) if excess <= wanted)
    return next(enough, len(EXCESS) - 1 + math.ceil(math.log2(max(1.0, EXCESS[-1] / wanted))))


def _shifted(W: Tensor, num_squarings: int) -> list[Tensor]:
    """The bound, and what `_shifted_gradient` makes its derivative of."""
    rank, info, size = min(W.shape[-2:]), torch.finfo(W.dtype), largest_entry(W)
    W = W / size.clamp_min(info.tiny)
    P = _gram(W)
    # The largest entry of W is 1 now: both clamps are for a zero matrix.
    mean = torch.linalg.vector_norm(W, dim=(-2, -1), keepdim=True).square().clamp_min(0.5) / rank
    steps = []
    for _ in range(num_squarings):
        share = torch.linalg.vector_norm(P, dim=(-2, -1), keepdim=True).square() / (2 * rank * mean.square())
        s = share.clamp_min(0.25) * mean
        Q = _add_identity(P / s, -1.0)
        steps.append((Q, s, share))
        P, mean = torch.bmm(Q, Q), torch.ones_like(s)
    D = _add_identity(P, -mean)
    deviation = (D.square().sum((-2, -1), keepdim=True) + info.eps**2).sqrt()  # smooth at zero
    root = (mean + math.sqrt(1 - 1 / rank) * deviation).sqrt()
    tape = [W, D, deviation, root]
    for Q, s, share in reversed(steps):
        root = (s * (1 + root)).sqrt()
        tape += [Q, share, root]
    return [(root * size).view(-1), *tape]


def _shifted_gradient(tape: Sequence[Tensor]) -> Tensor:
    r"""The gradient of the bound.

    That of :math:`\lambda_k` is a polynomial A_k of P_k, so all of these commute, and

    .. math:: A_k = Q_k \Bigl( \frac{A_{k+1}}{\sqrt{\lambda_{k+1}}} + \frac{s_k}{\operatorname{tr} P_k}
        \Bigl(1 - \frac{\langle A_{k+1}, Q_k \rangle}{\sqrt{\lambda_{k+1}}}\Bigr) I \Bigr).
    """
    W, D, deviation, root, *steps = tape
    rank = D.shape[-1]
    A = _add_identity(math.sqrt(1 - 1 / rank) / deviation * D, 1 / rank)
    for Q, share, next_root in zip(steps[::3], steps[1::3], steps[2::3], strict=True):
        weight = (1 - (A * Q).sum((-2, -1), keepdim=True) / root) * share / rank
        A, root = torch.baddbmm(weight * Q, Q / root, A), next_root
    return (torch.bmm(A, W) if rank == W.shape[-2] else torch.bmm(W, A)) / root


class _GramIteration(torch.autograd.Function):
    """Either iteration with half the products in its backward pass, because the matrices on its way commute."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, num_squarings: int, is_shifted: bool) -> tuple[Tensor, ...]:
        return tuple((_shifted if is_shifted else _plain)(W, num_squarings))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        W, ctx.num_squarings, ctx.is_shifted = inputs
        ctx.save_for_backward(W, *output[1:])
        ctx.save_for_forward(W)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: None) -> Any:
        W, *tape = ctx.saved_tensors
        if torch.is_grad_enabled():
            iterate = _shifted if ctx.is_shifted else _plain
            pull = torch.func.vjp(lambda W: iterate(W, ctx.num_squarings)[0], W)[1]
            return *pull(g), None, None
        gradient = _shifted_gradient(tape) if ctx.is_shifted else _plain_gradient(tape)
        return gradient * g[..., None, None], None, None

    @staticmethod
    def jvp(ctx: Any, dW: Tensor, *_: None) -> Any:
        W = ctx.saved_tensors[0]
        tape = (_shifted if ctx.is_shifted else _plain)(W, ctx.num_squarings)[1:]  # anew, to be differentiable
        gradient = _shifted_gradient(tape) if ctx.is_shifted else _plain_gradient(tape)
        return (gradient * dW).sum((-2, -1)), *[None] * len(tape)
