"""Torch's fused attention, with derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, nothing_is_recorded

#: The bias that hides a key. Finite, so that a row without any visible key is no NaN.
HIDDEN = -1e30


def dot_product_attention(
    q: Float[Tensor, "*batch tokens width"],
    k: Float[Tensor, "*batch tokens width"],
    v: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
    scale: float = 1.0,
) -> Float[Tensor, "*batch tokens width"]:
    r"""Averages the values, :math:`\operatorname{softmax}_j(b_{ij} + \text{scale}\; q_i \cdot k_j)\, v_j`.

    The fused kernel has one backward pass, and neither a second nor a forward-mode derivative. Here the first
    backward pass is the kernel's, and everything else goes through closed forms, at O(N^2) memory. So does the first
    where logits have lost half their digits: the kernel computes its weights once more on the way back, and would find
    others there. (Compiled, it is on its own.)

    Example:
        >>> q = torch.zeros(3, 1)
        >>> dot_product_attention(q, q, torch.tensor([[0.0], [3.0], [6.0]]))[0]
        tensor([3.])
    """
    bias, causal = one_bias(bias, causal, q)
    if torch.compiler.is_compiling() or nothing_is_recorded():  # the compiler differentiates by itself, once
        return fused(q, k, v, bias, causal, scale)
    m: Tensor = _Attention.apply(q, k, v, bias, causal, scale, [] if torch.is_grad_enabled() else None)
    return m


def causal_bias(
    bias: Float[Tensor, "*batch tokens tokens"],
) -> Float[Tensor, "*batch tokens tokens"]:
    """Hides the keys after each query."""
    return bias.masked_fill(torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1), HIDDEN)


def one_bias(bias: Tensor | None, causal: bool, q: Tensor) -> tuple[Tensor | None, bool]:
    """A bias of as many dimensions as the queries, if any, with the causal mask in it: kernels take but one of them."""
    if bias is not None:
        bias = bias.reshape((1,) * (q.ndim - bias.ndim) + bias.shape)
        if causal:
            bias, causal = causal_bias(bias.expand(*bias.shape[:-2], q.shape[-2], -1)), False
    return bias, causal


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Torch's kernel as it is, for any number of dimensions."""
    if q.ndim != 4:  # the fused kernels exist for [batch, heads, tokens, width] only
        if bias is not None:
            bias = bias.expand(*q.shape[:-2], *bias.shape[-2:]).reshape(-1, 1, *bias.shape[-2:])
        q, k, folded = (t.reshape(-1, 1, *t.shape[-2:]) for t in (q, k, v))
        return fused(q, k, folded, bias, causal, scale).reshape(v.shape)
    if bias is not None:
        bias = bias.expand(-1, -1, q.shape[-2], -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)


def has_digits(q: Tensor, scale: float) -> bool:
    """Whether logits of queries, and of keys of their size, keep half their digits.

    Half precision has none to spare, and is left to the kernel; so is what has no values to look at.
    """
    if q.dtype not in (torch.float32, torch.float64) or not can_look(q):
        return True
    longest = torch.linalg.vector_norm(q, dim=-1)  # in one pass
    return bool((longest <= (scale * torch.finfo(q.dtype).eps ** 0.5) ** -0.5).all())


def attention_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, g: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and the bias given that of the averages, in closed form."""
    P = softmax_weights(q * scale, k, bias, causal)
    dlogits = P * (g @ v.mT - (g * (P @ v)).sum(-1, keepdim=True))
    # Rows add up to zero. Where a token sees little but one, the entry of that would be nothing but rounding.
    dlogits = dlogits - P * dlogits.sum(-1, keepdim=True)
    pair = scale * dlogits
    return pair @ k, pair.mT @ q, P.mT @ g, None if bias is None else dlogits.sum_to_size(bias.shape)


def softmax_weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """The weights of the last queries, as many as there are, on all keys."""
    if causal:  # as a bias: a fill would be one more sweep to differentiate
        queries, keys = q.shape[-2], k.shape[-2]
        hidden = q.new_full((queries, keys), HIDDEN).triu(keys - queries + 1)
        bias = hidden if bias is None else bias + hidden
    logits = q @ k.mT
    return (logits if bias is None else logits + bias).softmax(-1)


def _changes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    causal: bool,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dbias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """How the averages and the weights change along a direction, None being none."""
    P = softmax_weights(q, k, bias, causal)
    change = torch.zeros_like(P)
    if dq is not None:
        change = change + dq @ k.mT
    if dk is not None:
        change = change + q @ dk.mT
    if dbias is not None:
        change = change + dbias
    dP = P * change
    dP = dP - P * dP.sum(-1, keepdim=True)
    return dP @ v if dv is None else dP @ v + P @ dv, dP


class _Attention(torch.autograd.Function):
    """`fused`, whose own autograd graph travels in `graph` from forward to backward.

    There it serves, unless the gradient is itself to be differentiated. With None nothing is kept.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, graph: list[Any] | None
    ) -> Tensor:
        inputs = (q, k, v, bias)
        if graph is None or not any(t is not None and t.requires_grad for t in inputs):
            return fused(q, k, v, bias, causal, scale)
        with torch.enable_grad():
            inner = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
            m = fused(*inner, causal, scale)  # type: ignore[call-arg, arg-type]
        graph[:] = [m, inner]
        return m.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.causal, ctx.scale, ctx.graph = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, bias = ctx.saved_tensors
        if ctx.graph and not torch.is_grad_enabled() and has_digits(q, ctx.scale):
            m, inner = ctx.graph
            leaves = [t for t in inner if t is not None and t.requires_grad]
            grads = iter(torch.autograd.grad(m, leaves, g, retain_graph=True))
            return *(next(grads) if t is not None and t.requires_grad else None for t in inner), None, None, None
        dq, dk, dv, dbias = attention_gradients(q, k, v, bias, ctx.causal, ctx.scale, g)
        return dq, dk, dv, dbias, None, None, None

    @staticmethod
    def jvp(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, *_: None
    ) -> Tensor:
        q, k, v, bias = ctx.saved_tensors
        dq = None if dq is None else dq * ctx.scale
        return _changes(q * ctx.scale, k, v, bias, ctx.causal, dq, dk, dv, dbias)[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        def front(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            return t.unsqueeze(0) if dim is None else t.movedim(dim, 0)

        q, k, v, bias = (front(t, dim) for t, dim in zip(args[:4], in_dims[:4], strict=True))
        q, k, v = (t.expand(info.batch_size, *t.shape[1:]) for t in (q, k, v) if t is not None)
        return _Attention.apply(q, k, v, bias, *args[4:]), 0
