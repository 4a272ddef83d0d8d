r"""log|det| of the diagonal blocks of attention, by series about what tokens have in common.

.. math:: \sum_i \log|\det(I + C_i K)|, \qquad C_i = \operatorname{diag}(C_i^1, \dots, C_i^H)

The matrix K is the same for all tokens, and C differs little between tokens at nearby places. With :math:`\bar C` the
mean over a stretch of them and :math:`A = I + \bar C K`,

.. math:: I + C_i K = (I - N_i) A, \qquad N_i = (\bar C - C_i) K A^{-1},

so A is eliminated once per stretch, and every :math:`N_i` is small, trained or not: a case for the series of
`flowattn.kernels.determinants`. A stretch whose tokens differ too much is eliminated token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import nothing_is_recorded
from flowattn.kernels.determinants import (
    invert_by_elimination,
    invert_by_series,
    logabsdet_plus_identity,
    precise,
    small_enough_for_the_cache,
    trace,
)
from flowattn.kernels.scratch import Scratch, as_they_are

_scratch = Scratch(as_they_are)


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
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: None) -> Any:
        if g is None:
            return None, None
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
        identity = torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)
        return trace(torch.linalg.solve(identity + product, change)).sum(-1), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, C: Tensor, K: Tensor) -> Any:
        def one(i: int) -> Any:
            given = zip((C, K), in_dims, strict=True)
            return _HeadLogAbsDet.apply(*(t if dim is None else t.select(dim, i) for t, dim in given))

        results = zip(*map(one, range(info.batch_size)), strict=True)
        return tuple(map(torch.stack, results)), (0, 0, 0)


def _plain_head_logabsdet(C: Tensor, K: Tensor) -> Tensor:
    return logabsdet_plus_identity(_products(C, K)).sum(-1)


def _products(C: Tensor, K: Tensor) -> Tensor:
    """The matrices C_i K, [B, N, H d, H d]."""
    return torch.einsum("bhnij,hjk->bnhik", C, K).flatten(2, 3)


def _expand(C: Tensor, K: Tensor, *, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """log|det|, [B], and its gradients after C and, for each sequence, after K."""
    at_a_time = max(16, small_enough_for_the_cache(C) // K.shape[-1] ** 2)
    parts = [_expand_some(some, K, at_a_time, with_gradient) for some in C.split(at_a_time)]
    logabsdet, dC, dK = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return logabsdet, dC, dK


def _expand_some(C: Tensor, K: Tensor, at_a_time: int, with_gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, width, _ = C.shape
    n = heads * width
    C = C.transpose(0, 1)
    logabsdet, dC, dK = C.new_zeros(batch), C.new_empty(C.shape), C.new_zeros(heads, batch, width, n)
    if C.numel() == 0:
        return logabsdet, dC.transpose(0, 1), dK.transpose(0, 1)
    longest = min(tokens, max(1, at_a_time // batch))
    (work,) = _scratch(C, (4, batch * longest * n * n))
    for stretch, (mean, inverse, value) in _centres(C, K, list(_stretches(tokens, longest))):
        rows = C[:, :, stretch].contiguous()
        N, *spare = work[:, : rows.numel() * heads].view(4, -1, n, n)
        K_A = (K.flatten(0, 1) @ inverse.mT).view_as(K)
        found = invert_by_series(_multiply(mean[:, None, None] - rows, K_A, N, spare[0]), spare)
        if found is None:
            K_A, inverse, value = K, torch.eye(n, dtype=C.dtype, device=C.device), torch.zeros_like(value)
            found = invert_by_elimination(_multiply(-rows, K, N, spare[0]))
        logabsdet += found[1].view(batch, -1).sum(-1) + rows.shape[2] * value
        if with_gradient:
            columns = N.view(heads, -1, n)
            columns.view(heads, -1, width, n).copy_(found[0].reshape(-1, heads, width, n).transpose(0, 1))
            dC[:, :, stretch] = torch.bmm(K_A, columns.mT).view(heads, width, *rows.shape[1:4]).movedim(1, -1)
            of_sequences = rows.view(heads * batch, -1, width).mT @ columns.view(heads * batch, -1, n)
            dK += (of_sequences @ inverse).view_as(dK)
    return logabsdet, dC.transpose(0, 1), dK.transpose(0, 1)


def _centres(C: Tensor, K: Tensor, stretches: list[slice]) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Of each stretch the mean of C, the transposed inverse of A, and log|det A|; many at a time if they are small."""
    step = max(1, small_enough_for_the_cache(C) // K.shape[-1] ** 2)
    for start in range(0, len(stretches), step):
        some = stretches[start : start + step]
        means = torch.stack([C[:, :, stretch].mean((1, 2)) for stretch in some])
        M = -(means @ K).flatten(1, 2)
        # An error here is one of every token of the stretch.
        inverses, values = (found.to(C) for found in invert_by_elimination(precise(M)))
        yield from zip(some, zip(means, inverses, values, strict=True), strict=True)


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
