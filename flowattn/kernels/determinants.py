r"""log|det(I + M)| and inverses of many small matrices near the identity.

.. math:: (I - N)^{-1} = (I + N^2 + N^4 + \dots)(I + N), \qquad \log\det(I - N) = -\sum_k \operatorname{tr} N^k / k

Where N is small, a few terms are as exact as the arithmetic. They are products of matrices, several times faster than
many small eliminations, and they lose no digits to logarithms of numbers near one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import nothing_is_recorded
from flowattn.kernels.scratch import Scratch, as_they_are

#: More products of matrices than this take as long as elimination.
MAX_PRODUCTS = 10

#: Inverses, which are gradients, are as exact as so many units of the precision times their own size.
UNITS = 128

#: Fewer numbers than this are eliminated before the terms are called.
MANY = 2**14

_scratch = Scratch(as_they_are)


def logabsdet_plus_identity(M: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """log|det(I + M)|, by series where M is small and by elimination elsewhere.

    Example:
        >>> logabsdet_plus_identity(torch.diag(torch.tensor([1.0, 0.5]))).exp()
        tensor(3.)
    """
    if torch.compiler.is_compiling() or nothing_is_recorded():
        return torch.linalg.slogdet(_identity(M) + M).logabsdet
    logabsdet: Tensor = _LogAbsDet.apply(M)[0]
    return logabsdet


def logabsdet_of_blocks(J: Float[Tensor, "batch n d n d"]) -> Float[Tensor, " batch"]:
    """log|det(I + J)| of a Jacobian over tokens.

    Example:
        >>> logabsdet_of_blocks(torch.full((1, 1, 1, 1, 1), 2.0)).exp()
        tensor([3.])
    """
    return logabsdet_plus_identity(J.permute(0, 2, 1, 4, 3).flatten(3).flatten(1, 2))


class _LogAbsDet(torch.autograd.Function):
    """The value and, on the way to it, its gradient."""

    @staticmethod
    def forward(M: Tensor) -> tuple[Tensor, Tensor]:
        N = -M.reshape(-1, *M.shape[-2:])
        gradient = torch.empty_like(N)
        return invert(N, gradient).view(M.shape[:-2]), gradient.view(M.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> Tensor | None:
        if g is None:
            return None
        M, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            gradient = torch.linalg.inv(_identity(M) + M).mT
        return g[..., None, None] * gradient

    @staticmethod
    def jvp(ctx: Any, dM: Tensor) -> Any:
        (M,) = ctx.saved_tensors
        return trace(torch.linalg.solve(_identity(M) + M, dM)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, M: Tensor) -> Any:
        return _LogAbsDet.apply(M.movedim(in_dims[0], 0)), (0, 0)


def invert(
    N: Float[Tensor, "batch n n"], out: Float[Tensor, "batch n n"], *spare: Float[Tensor, "batch n n"]
) -> Float[Tensor, " batch"]:
    """log|det(I - N)|, leaving the transposed inverses of I - N in `out`, by whichever way is faster.

    Up to two tensors like N that are `spare` are written over on the way: memory that was in use just now is in the
    cache.

    Example:
        >>> out = torch.empty(1, 1, 1)
        >>> invert(torch.tensor([[[0.5]]]), out), out
        (tensor([-0.6931]), tensor([[[2.]]]))
    """
    at_a_time = max(1, small_enough_for_the_cache(N) // max(1, N.shape[-1] ** 2))
    if len(N) > at_a_time:
        splits = (t.split(at_a_time) for t in (N, out, *spare))
        return torch.cat([invert(*parts) for parts in zip(*splits, strict=True)])
    found = None
    if N.numel() >= MANY:
        found = invert_by_series(N, (out, *spare, *_scratch(N, *[N.shape] * (2 - len(spare)))))
    if found is None:
        found = invert_by_elimination(N)
        out.copy_(found[0])
    return found[1]


def invert_by_series(
    N: Float[Tensor, "batch n n"], work: Iterable[Float[Tensor, "batch n n"]]
) -> tuple[Float[Tensor, "batch n n"], Float[Tensor, " batch"]] | None:
    r"""The transposed inverses of I - N and log|det(I - N)|, or None if they need too many products.

    With :math:`t_k` the trace of :math:`N^k` and :math:`X = (I + N)(I + E)`, E being the sum of the powers of
    :math:`N^2` up to the j-th, the last trace comes with the inverse: :math:`\operatorname{tr} N X` is
    :math:`t_1 + \dots + t_{2j+2}`.

    The inverses are in the first of three tensors like N to work in, the last of which is for long series only: what is
    used should stay in the cache.
    """
    square, *rooms = work
    torch.bmm(N.mT, N.mT, out=square)
    size, eps = _largest_norm(square), torch.finfo(N.dtype).eps
    if not size < (UNITS * eps) ** (1 / MAX_PRODUCTS):  # or NaN
        return None
    # The first test follows from the second, and is quicker.
    if size**1.5 <= UNITS * eps and size * _largest_norm(N) <= UNITS * eps:
        value = trace(N).add_(trace(square), alpha=1 / 2).add_(_inner(N, square, rooms[0]), alpha=1 / 3)
        square.diagonal(dim1=-2, dim2=-1).add_(1)
        return square.add_(N.mT), -value
    num_powers = _num_powers(1, size**2, size, eps)
    powers, first, j = square, trace(N), 1  # E, transposed
    value = torch.zeros_like(first)
    while True:
        # Each trace is divided by its exponent: what later sums have of it is weighted by the difference.
        next_odd = 2 * j + (2 if j == num_powers else 3)
        value.add_(trace(powers), alpha=1 / (2 * j) - 1 / (2 * j + 2))
        # The square is not needed any more when the last sum is there, which then is in a room.
        free = square if 1 < j == num_powers else rooms[1 - j % 2]
        value.add_(_inner(N, powers, free), alpha=1 / (2 * j + 1) - 1 / next_odd)
        if j == num_powers:
            break
        powers = torch.baddbmm(square, square, powers, out=rooms[1 - j % 2])
        j += 1
        if j == 2 and num_powers > 2:  # a fourth power is often much smaller than the square of a square
            fourth = _largest_norm(torch.sub(powers, square, out=rooms[1]))
            rests = ((2, fourth * size), (3, fourth**2))
            num_powers = min(num_powers, *(_num_powers(*rest, size, eps) for rest in rests))
    powers.diagonal(dim1=-2, dim2=-1).add_(1)
    if j == 1:
        powers = rooms[0].copy_(powers)
    inverse = torch.baddbmm(powers, powers, N.mT, out=square)
    last = 1 / (2 * j + 2)
    return inverse, -value.add_(_inner(N, inverse, powers), alpha=last).add_(first, alpha=1 - last)


def _num_powers(least: int, rest: float, size: float, eps: float) -> int:
    r"""From how many powers j of the square on the rest is small, bounded so after the least of them.

    A bound of :math:`|N^{2j+2}|` made of norms of even powers is one of :math:`\sum |\lambda|^{2j+2}` over eigenvalues,
    too, all of which are at most the root of `size`: so it bounds the first trace that is left out, of
    :math:`N^{2j+3}`. A gradient needs fewer digits than this, which is summed over all tokens.
    """
    num_powers = least
    while rest > UNITS * eps or size**0.5 * rest > 8 * (2 * num_powers + 3) * eps:
        num_powers, rest = num_powers + 1, rest * size
    return num_powers


def _inner(one: Tensor, other: Tensor, room: Tensor) -> Tensor:
    return torch.mul(one, other, out=room).sum((-2, -1))


def _largest_norm(matrices: Tensor) -> float:
    return torch.linalg.vector_norm(matrices, dim=(-2, -1)).amax().item()


def invert_by_elimination(
    N: Float[Tensor, "batch n n"],
) -> tuple[Float[Tensor, "batch n n"], Float[Tensor, " batch"]]:
    """What `invert_by_series` gives, for any N."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(_identity(N) - N.mT)
    inverse = torch.linalg.lu_solve(factors, pivots, _identity(N).expand_as(N))
    return inverse, factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


def small_enough_for_the_cache(like: Tensor) -> int:
    """How many numbers to work on at a time."""
    return 2**19 if like.device.type == "cpu" else 2**25


def precise(t: Tensor) -> Tensor:
    """A tensor in double precision, where the device has it."""
    return t if t.device.type == "mps" else t.double()


def trace(matrices: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch"]:
    """The sum of the diagonal of each."""
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
