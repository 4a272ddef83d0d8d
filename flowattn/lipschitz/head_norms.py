"""The spectral norms that the bounds of attention are made of, recorded as one step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode, without_autocast
from flowattn.lipschitz.gram import eigenvalue, iterate, scaled, singular_value, upper_bound
from flowattn.lipschitz.spectral import at_least_single, margin, spectral_norm_bound

#: The large matrix of all heads is not worth as many squarings as each of them.
TOLERANCE, TOLERANCE_OF_ALL = 0.01, 0.085

Norms = tuple[Tensor, ...]


def head_norms(W: Tensor, B: Tensor) -> Norms:
    """Upper bounds of the norms of W [H, D, d] and B [H, d, D] of each head, [H], and of the stack of all B, []."""
    return _recorded(_HeadNorms, _head_norms, W, B)


def single_head_norms(W: Tensor, B: Tensor) -> Norms:
    r"""Upper bounds of :math:`|W||B|` and :math:`\tfrac12 |\alpha B B^T + \alpha^{-1} W^T W|` of one head, [1]."""
    return _recorded(_SingleHeadNorms, _single_head_norms, W, B)


def _recorded(function: Any, plain: Callable[..., Norms], W: Tensor, B: Tensor) -> Norms:
    is_usual = W.shape[1] == B.shape[2] and W.dtype == B.dtype in (torch.float32, torch.float64)
    if not (is_usual and torch.is_grad_enabled() and can_look(W, B)) or in_forward_mode():
        return plain(W, B)
    with without_autocast(W):
        norms: Norms = function.apply(W, B)
        return norms


# -- many heads


def _head_norms(W: Tensor, B: Tensor) -> Norms:
    if W.shape[1] == B.shape[2]:
        norm_W, norm_B = spectral_norm_bound(torch.cat([W.mT, B]), TOLERANCE).chunk(2)
    else:
        norm_W, norm_B = spectral_norm_bound(W, TOLERANCE), spectral_norm_bound(B, TOLERANCE)
    return norm_W, norm_B, spectral_norm_bound(B.flatten(0, 1), TOLERANCE_OF_ALL)


class _HeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, W: Tensor, B: Tensor) -> Norms:
        ctx.save_for_backward(W, B)
        heads, all_heads = torch.cat([W.mT, B]), B.reshape(1, -1, B.shape[-1])
        norms, ctx.of_heads = iterate(heads, singular_value(heads, TOLERANCE))
        norm_of_all, ctx.of_all = iterate(all_heads, singular_value(all_heads, TOLERANCE_OF_ALL))
        norm_W, norm_B = (norms * margin(*B.shape[1:])).chunk(2)
        return norm_W, norm_B, (norm_of_all * margin(*all_heads.shape[1:])).view(())

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _differentiable(_head_norms, ctx.saved_tensors, g)
        _, B = ctx.saved_tensors
        weights = torch.cat(g[:2]) * margin(*B.shape[1:])
        dW, dB = (ctx.of_heads() * weights[:, None, None]).chunk(2)
        of_all = ctx.of_all().view(B.shape) * (g[2] * margin(B.shape[:2].numel(), B.shape[2]))
        return dW.mT, dB + of_all


# -- one head


def _single_head_norms(W: Tensor, B: Tensor) -> Norms:
    with without_autocast(W):
        pair, size = _scaled_pair(at_least_single(W), at_least_single(B))
        grams = _with_mean(torch.bmm(pair, pair.mT))
        norms = upper_bound(grams, eigenvalue(grams, TOLERANCE))
        return _joined(norms * margin(*pair.shape[1:]), size)


def _scaled_pair(W: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """W^T and B of Frobenius norm 1, so that both have the same share in their sum, and those norms."""
    wider = B.shape[2] - W.shape[1]
    W_t = F.pad(W.mT, (0, wider)) if wider > 0 else W.mT
    pair = torch.cat([W_t, F.pad(B, (0, -wider)) if wider < 0 else B])
    pair, largest = scaled(pair)
    size = torch.linalg.vector_norm(pair, dim=(-2, -1), keepdim=True).clamp_min(0.5)  # for a zero matrix
    return pair / size, size * largest


def _with_mean(grams: Tensor) -> Tensor:
    return torch.cat([grams, grams.mean(0, keepdim=True)])


def _joined(norms: Tensor, size: Tensor) -> Norms:
    norm_W, norm_B, norm_of_both = norms.unbind()
    product = (norm_W * norm_B).clamp_min(torch.finfo(norms.dtype).tiny).sqrt()
    size = size.prod(0).view(1)
    return product * size, torch.minimum(product, norm_of_both) * size


class _SingleHeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, W: Tensor, B: Tensor) -> Norms:
        ctx.save_for_backward(W, B)
        pair, size = _scaled_pair(W, B)
        grams = _with_mean(torch.bmm(pair, pair.mT))
        norms, of_grams = iterate(grams, eigenvalue(grams, TOLERANCE))
        norms = norms * margin(*pair.shape[1:])
        ctx.tape = pair, size, norms, of_grams
        return _joined(norms, size)

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        r"""With G the scaled Gram matrices and A the gradients of their norms, for both factors X of Frobenius norm s

        .. math:: \nabla |W||B| = s' \sqrt{\lambda' / \lambda}\, A X / s, \qquad
            \nabla \tfrac12 |\ldots| = s' (A_+ + (\lambda_+ - \langle A_+, G \rangle) I) X / s,

        a prime meaning the other of the two, and + their mean.
        """
        if torch.is_grad_enabled():
            return _differentiable(_single_head_norms, ctx.saved_tensors, g)
        pair, size, norms, of_grams = ctx.tape
        A, both = of_grams() * margin(*pair.shape[1:]), norms[2]
        others, scale = size.flip(0), norms[:2, None, None]
        is_product = norms[:2].prod() <= both.square()
        g_product = g[0] + torch.where(is_product, g[1], 0)
        g_both = torch.where(is_product, 0, g[1])
        turned = A[2] @ pair
        own = both - (turned * pair).sum((-2, -1), keepdim=True)
        step = g_product * others * (scale.flip(0) / scale.clamp_min(1e-12)).sqrt() * torch.bmm(A[:2], pair)
        dW, dB = (step + g_both * others * (turned + own * pair)).split(1)
        return dW.mT, dB


def _differentiable(plain: Callable[..., Norms], given: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> Any:
    """The gradients, recorded, of what has one."""
    norms, weights = zip(*((n, w) for n, w in zip(plain(*given), g, strict=True) if n.requires_grad), strict=True)
    wanted = [t for t in given if t.requires_grad]
    gradients = iter(torch.autograd.grad(norms, wanted, weights, create_graph=True))
    return tuple(next(gradients) if t.requires_grad else None for t in given)
