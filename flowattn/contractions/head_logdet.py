r"""log|det| of the diagonal blocks of attention, by series about what tokens have in common.

.. math:: \sum_i \log|\det(I + C_i K)|, \qquad C_i = \operatorname{diag}(C_i^1, \dots, C_i^H)

The matrix K is the same for all tokens, and C differs little between tokens at nearby places. With :math:`\bar C` the
mean over a stretch of them and :math:`A = I + \bar C K`,

.. math:: I + C_i K = (I - N_i) A, \qquad N_i = (\bar C - C_i) K A^{-1},

so A is inverted once per stretch, and every :math:`N_i` is small. A few terms of

.. math:: (I - N)^{-1} = (I + N^2 + N^4 + \dots)(I + N), \qquad \log\det(I - N) = -\sum_k \operatorname{tr} N^k / k

are as exact as the arithmetic. They are products of matrices, several times faster than many small eliminations, and
they lose no digits to logarithms of numbers near one. A stretch whose tokens differ too much is eliminated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import nothing_is_recorded

#: More terms of the series than this take as long as elimination.
MAX_TERMS = 16


def head_logabsdet(C: Tensor, K: Tensor) -> Tensor:
    """The sum over tokens of log|det(I + C_i K)|, [B], for C [B, H, N, d, d] and K [H, d, H d].

    Example:
        >>> head_logabsdet(torch.full((1, 1, 3, 1, 1), 0.5), torch.ones(1, 1, 1)).exp()
        tensor([3.3750])
    """
    if nothing_is_recorded():
        return _expand(C, K, with_gradient=False)[0]
    logabsdet: Tensor = _HeadLogAbsDet.apply(C, K)[0]
    return logabsdet


class _HeadLogAbsDet(torch.autograd.Function):
    """The value and on the way to it its gradient, so that no matrix of a token is kept."""

    @staticmethod
    def forward(C: Tensor, K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _expand(C, K, with_gradient=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.save_for_forward(*inputs)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        C, K, dC, dK = ctx.saved_tensors
        if torch.is_grad_enabled():
            return torch.func.vjp(_plain_head_logabsdet, C, K)[1](g)
        return dC * g[:, None, None, None, None], (g[:, None, None, None] * dK).sum(0)

    @staticmethod
    def jvp(ctx: Any, C_change: Tensor | None, K_change: Tensor | None) -> Any:
        C, K = ctx.saved_tensors  # of `forward` the gradients are known, but not how they change
        product = _products(C, K)
        change = torch.zeros_like(product)
        if C_change is not None:
            change = change + _products(C_change, K)
        if K_change is not None:
            change = change + _products(C, K_change)
        return _trace(torch.linalg.solve(_eye(product) + product, change)).sum(-1), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, C: Tensor, K: Tensor) -> Any:
        def one(i: int) -> Any:
            given = zip((C, K), in_dims, strict=True)
            return _HeadLogAbsDet.apply(*(t if dim is None else t.select(dim, i) for t, dim in given))

        results = zip(*map(one, range(info.batch_size)), strict=True)
        return tuple(map(torch.stack, results)), (0, 0, 0)


def _plain_head_logabsdet(C: Tensor, K: Tensor) -> Tensor:
    product = _products(C, K)
    return torch.linalg.slogdet(_eye(product) + product).logabsdet.sum(-1)


def _products(C: Tensor, K: Tensor) -> Tensor:
    """The matrices C_i K, [B, N, H d, H d]."""
    return torch.einsum("bhnij,hjk->bnhik", C, K).flatten(2, 3)


def _expand(C: Tensor, K: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log|det|, [B], and its gradients after C and, for each sequence, after K."""
    batch, heads, tokens, width, _ = C.shape
    n = heads * width
    C = C.transpose(0, 1)
    logabsdet, dC, dK = C.new_zeros(batch), C.new_zeros(C.shape), C.new_zeros(heads, batch, width, n)
    if C.numel() == 0:
        return logabsdet, dC.transpose(0, 1), dK.transpose(0, 1)
    longest = min(tokens, max(1, (2**19 if C.device.type == "cpu" else 2**25) // (batch * n * n)))
    stretches = list(_stretches(tokens, longest))
    means = torch.stack([C[:, :, stretch].mean((1, 2)) for stretch in stretches])
    inverses, values = _eliminate(_to_double(-(means @ K).flatten(1, 2)))  # an error here is one of the whole stretch
    work = C.new_empty(5, batch * longest * n * n)  # memory that is used again stays in the cache
    for stretch, mean, inverse, value in zip(stretches, means, inverses.to(C), values.to(C), strict=True):
        rows = C[:, :, stretch].contiguous()
        N, *spare = work[:, : rows.numel() * heads].view(5, -1, n, n)
        K_A = (K.flatten(0, 1) @ inverse.mT).view_as(K)
        found = _series(_multiply(mean[:, None, None] - rows, K_A, N, spare[0]), spare)
        if found is None:
            K_A, inverse, value = K, _eye(inverse), torch.zeros_like(value)
            found = _eliminate(_multiply(-rows, K, N, spare[0]))
        logabsdet += found[1].view(batch, -1).sum(-1) + rows.shape[2] * value
        if with_gradient:
            columns = N.view(heads, -1, n)
            columns.view(heads, -1, width, n).copy_(found[0].view(-1, heads, width, n).transpose(0, 1))
            dC[:, :, stretch] = torch.bmm(K_A, columns.mT).view(heads, width, *rows.shape[1:4]).movedim(1, -1)
            of_sequences = rows.view(heads * batch, -1, width).mT @ columns.view(heads * batch, -1, n)
            dK += (of_sequences @ inverse).view_as(dK)
    return logabsdet, dC.transpose(0, 1), dK.transpose(0, 1)


def _stretches(tokens: int, longest: int) -> Iterator[slice]:
    """Places that are alike: the more a token sees already, the less the next one differs from it."""
    start = 0
    while start < tokens:
        stop = min(tokens, start + max(1, min(3 * start, longest)))
        yield slice(start, stop)
        start = stop


def _multiply(C: Tensor, K: Tensor, out: Tensor, spare: Tensor) -> Tensor:
    """The matrices C_i K into `out`, for C [H, B, N, d, d]."""
    heads, width, n = K.shape
    torch.bmm(C.view(heads, -1, width), K, out=spare.view(heads, -1, n))
    out.view(-1, heads, width, n).copy_(spare.view(heads, -1, width, n).transpose(0, 1))
    return out


def _series(N: Tensor, work: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor] | None:
    """The transposed inverses of I - N [batch, n, n] and log|det(I - N)|, or None if they need too many terms.

    N is changed, and the inverses are in `work`, four tensors like it.
    """
    spare, square, *turns = work
    torch.bmm(N.mT, N.mT, out=square)
    size = torch.linalg.vector_norm(square, dim=(-2, -1)).amax().item()
    precision = torch.finfo(N.dtype).eps
    if not size**MAX_TERMS < precision:  # or NaN
        return None
    num_terms = 2
    while size**num_terms > precision:
        num_terms += 1

    def traces(powers: Tensor) -> tuple[Tensor, Tensor]:
        return _trace(powers), torch.mul(N, powers, out=spare).sum((-2, -1))

    powers, (even, odd) = square, traces(square)  # the sum of the even powers of N from the second on, transposed
    value = _trace(N) + even / 2 + odd / 3
    for j in range(2, num_terms):
        powers = torch.baddbmm(square, square, powers, out=turns[j % 2])
        (last_even, last_odd), (even, odd) = (even, odd), traces(powers)
        value += (even - last_even) / (2 * j) + (odd - last_odd) / (2 * j + 1)
    for matrices in (powers, N):
        matrices.diagonal(dim1=-2, dim2=-1).add_(1)
    return torch.bmm(powers, N.mT, out=spare), -value


def _eliminate(N: Tensor) -> tuple[Tensor, Tensor]:
    """What `_series` gives, for any N."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(_eye(N) - N.mT)
    inverse = torch.linalg.lu_solve(factors, pivots, _eye(N).expand_as(N))
    return inverse.contiguous(), factors.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)


def _to_double(t: Tensor) -> Tensor:
    return t if t.device.type == "mps" else t.double()


def _eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
