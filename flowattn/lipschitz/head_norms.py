"""The spectral norms that the bounds of attention are made of, recorded as one step each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode, is_traced, nothing_is_recorded, without_autocast
from flowattn.lipschitz.gram import eigenvalue, is_wide, scaled, symmetric_product, times, upper_bound, use_up, wide
from flowattn.lipschitz.spectral import at_least_single, margin, spectral_norm_bound

#: The large matrix of all heads is not worth as many squarings as each of them.
TOLERANCE, TOLERANCE_OF_ALL = 0.01, 0.085

#: Gram matrices with traces between these have lost nothing to numbers that are too small or too large.
LOWEST, HIGHEST = 1e-10, 1e10

Norms = tuple[Tensor, ...]

#: Takes the gradients of norms to those of W and B.
Pull = Callable[..., tuple[Tensor, Tensor]]


def head_norms(W: Tensor, B: Tensor) -> Norms:
    """Upper bounds of the norms of W [H, D, d] and B [H, d, D] of each head, [H], and of the stack of all B, []."""
    return _by_grams(_grams, _head_norms, _plain_head_norms, W, B)


def single_head_norms(W: Tensor, B: Tensor) -> Norms:
    r"""Upper bounds of :math:`|W||B|` and :math:`\tfrac12 |\alpha B B^T + \alpha^{-1} W^T W|` of one head, [1]."""
    return _by_grams(_two_grams, _single_head_norms, _plain_single_head_norms, W, B)


def _by_grams(
    grams_of: Callable[..., tuple[Tensor, ...]],
    norms_of: Callable[..., tuple[Norms, Pull]],
    plain: Callable[..., Norms],
    W: Tensor,
    B: Tensor,
) -> Norms:
    """The norms from Gram matrices, or the plain way where these may not be looked at, or have lost something."""
    if W.ndim != 3 or B.ndim != 3 or W.shape[::2] != B.shape[:2]:
        raise ValueError(
            f"W must have shape [heads, features, width] and B [heads, width, features_out]; "
            f"got {list(W.shape)} and {list(B.shape)}."
        )
    is_usual = W.shape[1] == B.shape[2] and W.dtype == B.dtype in (torch.float32, torch.float64)
    # A trace would keep the numbers below for ever.
    if not (is_usual and can_look(W, B)) or in_forward_mode() or is_traced():
        return plain(W, B)
    with without_autocast(W):
        with torch.no_grad():
            traces, *grams = grams_of(W, B)
        if not all(LOWEST < trace < HIGHEST for trace in traces.tolist()):  # or NaN
            return plain(W, B)
        if nothing_is_recorded():
            return norms_of(W, B, traces, *grams, keep=False)[0]
        norms: Norms = _Norms.apply(W, B, (traces, *grams), norms_of, plain)
        return norms


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, W: Tensor, B: Tensor, grams: tuple[Tensor, ...], norms_of: Any, plain: Any) -> Norms:
        ctx.save_for_backward(W, B)
        ctx.plain = plain
        norms, ctx.pull = norms_of(W, B, *grams, keep=True)
        return norms

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        W, B = ctx.saved_tensors
        if torch.is_grad_enabled() or not can_look(*g):
            return *torch.func.vjp(ctx.plain, W, B)[1](g), None, None, None
        return *ctx.pull(W, B, *g), None, None, None


# -- many heads


def _plain_head_norms(W: Tensor, B: Tensor) -> Norms:
    norm_W, norm_B = (spectral_norm_bound(t, TOLERANCE) for t in (W, B))
    return norm_W, norm_B, spectral_norm_bound(B.flatten(0, 1), TOLERANCE_OF_ALL)


def _grams(W: Tensor, B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The Gram matrices of W and B of each head, their traces in front, and that of the stack of all B."""
    heads, of_W, of_B, stack = len(W), wide(W), wide(B), wide(_stack(B))
    of_all = symmetric_product(stack, stack.mT)
    of_each = B.new_empty(2 * heads, *of_B.shape[1:2] * 2)
    torch.bmm(of_W, of_W.mT, out=of_each[:heads])
    if is_wide(_stack(B)):  # then those of its heads are in it
        of_each[heads:] = _own_blocks(of_all, heads)
    else:
        torch.bmm(of_B, of_B.mT, out=of_each[heads:])
    return of_each.diagonal(dim1=-2, dim2=-1).sum(-1), of_each, of_all


def _head_norms(
    W: Tensor, B: Tensor, traces: Tensor, of_each: Tensor, of_all: Tensor, *, keep: bool
) -> tuple[Norms, Pull]:
    size, size_of_all = margin(*B.shape[1:]), margin(*_stack(B).shape[1:])
    squares, gradients = use_up(of_each, (1 + TOLERANCE) ** 2 - 1, keep=keep)
    square_of_all, gradient_of_all = use_up(of_all, (1 + TOLERANCE_OF_ALL) ** 2 - 1, keep=keep)
    each, whole = squares.sqrt() * size, square_of_all.sqrt() * size_of_all

    def pull(W: Tensor, B: Tensor, g_W: Tensor, g_B: Tensor, g_all: Tensor) -> tuple[Tensor, Tensor]:
        # With A the gradient of the square after X X^T, that of its root r after X is A X / r.
        A_W, A_B = (gradients() * (torch.cat([g_W, g_B]) * each / squares)[:, None, None]).chunk(2)
        A, stack = gradient_of_all() * (g_all * whole / square_of_all), _stack(B)
        if is_wide(stack):
            _own_blocks(A, len(B)).add_(A_B)
            return times(A_W, W), times(A, stack).view(B.shape)
        return times(A_W, W), times(A_B, B) + times(A, stack).reshape(B.shape)

    return (*each.chunk(2), whole.view(())), pull


def _stack(B: Tensor) -> Tensor:
    return B.reshape(1, -1, B.shape[2])


def _own_blocks(of_all: Tensor, heads: int) -> Tensor:
    """The blocks of each head with itself, [H, d, d], as a view."""
    return of_all[0].unflatten(1, (heads, -1)).unflatten(0, (heads, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)


# -- one head


def _plain_single_head_norms(W: Tensor, B: Tensor) -> Norms:
    with without_autocast(W):
        (of_W, size_W), (of_B, size_B) = (_gram_of_trace_one(t) for t in map(at_least_single, (W.mT, B)))
        grams = torch.cat([of_W, of_B, (of_W + of_B) / 2])
        norms = upper_bound(grams, eigenvalue(grams, TOLERANCE)) * margin(*B.shape[1:])
        product = norms[:2].prod(0, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny).sqrt()
        size = size_W * size_B
        return product * size, torch.minimum(product, norms[2:]) * size


def _gram_of_trace_one(X: Tensor) -> tuple[Tensor, Tensor]:
    """The Gram matrix of X over its Frobenius norm, so that W and B have the same share in their mean; that norm."""
    X, largest = scaled(X)
    size = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp_min(0.5)  # for a zero matrix
    X = X / size
    return symmetric_product(X, X.mT), (size * largest).view(1)


def _two_grams(W: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """The traces of the Gram matrices of W^T and B, and these."""
    factors = torch.cat([W.mT, B])
    grams = symmetric_product(factors, factors.mT)
    return grams.diagonal(dim1=-2, dim2=-1).sum(-1), grams


def _single_head_norms(W: Tensor, B: Tensor, traces: Tensor, grams: Tensor, *, keep: bool) -> tuple[Norms, Pull]:
    # Numbers are Python's in here: on CPU a tensor of one of them is as much work as a small matrix.
    sizes, rounding = traces.tolist(), margin(*B.shape[1:])
    shares = [[1 / sizes[0], 0], [0, 1 / sizes[1]], [0.5 / sizes[0], 0.5 / sizes[1]]]
    G = (grams.new_tensor(shares) @ grams.flatten(1)).view(3, *grams.shape[1:])
    bounds, gradients = use_up(G, TOLERANCE, keep=keep)
    norms = [rounding * bound for bound in bounds.tolist()]
    size, product, norm_of_mean = math.sqrt(math.prod(sizes)), math.sqrt(norms[0] * norms[1]), norms[2]

    def pull(W: Tensor, B: Tensor, g_product: Tensor, g_mixed: Tensor) -> tuple[Tensor, Tensor]:
        r"""With A the gradients of the norms of Gram matrices G, for both factors X of Frobenius norm s

        .. math:: \nabla |W||B| = s' \sqrt{\lambda' / \lambda}\, A X / s, \qquad
            \nabla \tfrac12 |\ldots| = s' (A_+ + (\lambda_+ - \langle A_+, G \rangle) I) X / s,

        a prime meaning the other of the two, and + their mean.
        """
        A = gradients().flatten(1)
        along = (grams.flatten(1) @ A[2]).tolist()
        g, g_mean = g_product.item(), g_mixed.item()
        if product <= norm_of_mean:
            g, g_mean = g + g_mean, 0.0
        of_A, of_identity = [[0.0] * 3, [0.0] * 3], [[0.0], [0.0]]
        for k, trace in enumerate(sizes):
            of_A[k][k] = g * product / norms[k] * rounding * size / trace
            of_A[k][2] = g_mean * rounding * size / trace
            of_identity[k][0] = g_mean * (norm_of_mean - rounding * along[k] / trace) * size / trace
        step = (A.new_tensor(of_A) @ A).view_as(grams)
        step.diagonal(dim1=-2, dim2=-1).add_(A.new_tensor(of_identity))
        return torch.bmm(W, step[:1]), torch.bmm(step[1:], B)

    return (W.new_tensor([product * size]), W.new_tensor([min(product, norm_of_mean) * size])), pull
