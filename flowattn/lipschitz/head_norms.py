"""The spectral norms that the bounds of attention are made of, recorded as one step each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode, without_autocast
from flowattn.lipschitz.gram import iterate, largest_entry
from flowattn.lipschitz.spectral import margin, spectral_norm_bound

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
        norms, ctx.of_heads = iterate(torch.cat([W.mT, B]), TOLERANCE)
        norm_of_all, ctx.of_all = iterate(B.reshape(1, -1, B.shape[-1]), TOLERANCE_OF_ALL)
        norm_W, norm_B = (norms * margin(*B.shape[1:])).chunk(2)
        return norm_W, norm_B, (norm_of_all * margin(B.shape[:2].numel(), B.shape[2])).view(())

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _differentiable(_head_norms, ctx.saved_tensors, g)
        W, B = ctx.saved_tensors
        heads, step = len(W), ctx.of_heads() * margin(*B.shape[1:])
        of_all = (ctx.of_all() * margin(B.shape[:2].numel(), B.shape[2])).view(B.shape)
        dW, dB = (part * factor[:, None, None] for part, factor in zip(step.split(heads), g[:2], strict=True))
        return dW.mT, dB + of_all * g[2]


# -- one head


def _single_head_norms(W: Tensor, B: Tensor) -> Norms:
    pair, size = _scaled_pair(W, B)
    grams = pair @ pair.mT
    norms = spectral_norm_bound(torch.cat([grams, grams.mean(0, keepdim=True)]), TOLERANCE)
    return _joined(norms, size)


def _scaled_pair(W: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """W^T and B of Frobenius norm 1, so that both have the same share in their sum, and those norms."""
    wider = B.shape[2] - W.shape[1]
    W_t = F.pad(W.mT, (0, wider)) if wider > 0 else W.mT
    pair = torch.cat([W_t, F.pad(B, (0, -wider)) if wider < 0 else B])
    tiny, largest = torch.finfo(W.dtype).tiny, largest_entry(pair)
    pair = pair / largest.clamp_min(tiny)
    size = torch.linalg.vector_norm(pair, dim=(-2, -1), keepdim=True).clamp_min(tiny)
    return pair / size, size * largest


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
        grams = torch.bmm(pair, pair.mT)
        norms, of_grams = iterate(torch.cat([grams, grams.mean(0, keepdim=True)]), TOLERANCE)
        norms = norms * margin(*grams.shape[1:])
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
        A, both = of_grams() * margin(pair.shape[1], pair.shape[1]), norms[2]
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
