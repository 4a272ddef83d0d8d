"""L2 attention through torch's fused kernel, with a backward pass of few sweeps over the tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.kernels.dot_products import attention_gradients, dot_product_attention, fused, has_digits, one_bias


def fused_l2_attention(
    z: Float[Tensor, "*batch tokens width"], bias: Float[Tensor, "*_ #tokens tokens"] | None, *, causal: bool
) -> Float[Tensor, "*batch tokens width"]:
    r"""Averages the tokens, :math:`\operatorname{softmax}_j(b_{ij} - \|z_i - z_j\|^2 / \sqrt d)\, z_j`.

    Cost: O(N^2 d) time, O(N d) memory as long as the bias has one row. Derivatives beyond the first backward pass are
    those of `dot_product_attention`.

    Example:
        >>> fused_l2_attention(torch.tensor([[0.0], [2.0], [99.0]]), None, causal=True)[0]
        tensor([0.])
    """
    needed = z.requires_grad or (bias is not None and bias.requires_grad)
    if needed and torch.is_grad_enabled() and can_look(z) and not in_forward_mode():
        m: Tensor = _FusedL2.apply(z, bias, causal)
        return m
    return _recorded(z, bias, causal)


def centre_of(z: Tensor, causal: bool) -> Tensor:
    """A place near the tokens, about which squares keep their digits.

    Under a causal mask the first token is the reference: the mean would let later tokens in by rounding.
    """
    return (z[..., :1, :] if causal else z.mean(-2, keepdim=True)).detach()


def queries_and_keys(
    z: Float[Tensor, "*batch tokens width"],
) -> tuple[Float[Tensor, "*batch tokens wider"], Float[Tensor, "*batch tokens wider"]]:
    """Whose inner products are the logits of tokens near the origin."""
    s = math.sqrt(z.shape[-1])
    squares = z.square().sum(-1, keepdim=True) / -s
    # |z_i|^2 is the same for every key, so the softmax does not need it. The gradient does: what rounding leaves of
    # the sum of a row would else move its token.
    one = torch.ones_like(squares)
    return torch.cat([z * (2 / s), one, squares], -1), torch.cat([z, squares, one], -1)


def _recorded(z: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """The attention step by step, for derivatives of every order."""
    queries, keys, bias, centre = _padded(z, bias, causal)
    scale = 2 / math.sqrt(z.shape[-1])
    m = dot_product_attention(queries, keys, queries, bias, causal=causal, scale=scale)[..., : z.shape[-1]]
    return m + centre.to(m.dtype)


def _padded(z: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Queries, which are the values too, keys, what they do not hold of the bias, and the centre of the tokens.

    A mask that needs a gradient pushes torch off its fast kernel, and a mask next to `is_causal` is refused. So the
    squares of the keys ride in one more column, padded to a width the kernel likes, and a bias of one row with them.
    """
    width, s = z.shape[-1], math.sqrt(z.shape[-1])
    more = _wide_enough(z) - width
    padded, extra = F.pad(z, (0, more)), F.pad(z.new_ones(1), (width, more - 1))
    centre = centre_of(padded, causal)
    queries = padded - (centre - (s / 2) * extra)
    squares = queries.square().sum(-1, keepdim=True) - s**2 / 4
    keys = torch.addcmul(queries, squares * (-1 / s) - s / 2, extra)
    if bias is not None and bias.shape[-2] == 1:
        keys, bias = torch.addcmul(keys, bias.mT, extra), None
    return queries, keys, bias, centre[..., :width]


def _wide_enough(z: Tensor) -> int:
    """A width with room for one more column that torch's kernels are fast at: aligned, and not too narrow on CPU."""
    more, narrow = z.shape[-1] + 1, 12 if z.dtype == torch.float64 else 16
    return narrow if more <= narrow and z.device.type == "cpu" else more + -more % 8


class _FusedL2(torch.autograd.Function):
    """`_recorded`, the steps around the kernel taken back in one go."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        queries, keys, rest, centre = _padded(z, bias, causal)
        rest, is_causal = one_bias(rest, causal, queries)
        scale = 2 / math.sqrt(z.shape[-1])
        with torch.enable_grad():
            q, k, v = leaves = [t.detach().requires_grad_() for t in (queries, keys, queries)]
            if rest is not None and bias is not None and bias.requires_grad:
                rest = rest.detach().requires_grad_()
                leaves.append(rest)
            m = fused(q, k, v, rest, is_causal, scale)
        ctx.save_for_backward(z, bias)
        ctx.causal, ctx.scale, ctx.graph = causal, scale, (m, leaves)
        m = m.detach()[..., : z.shape[-1]]
        return m + centre.to(m.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        z, bias = ctx.saved_tensors
        m, leaves = ctx.graph
        width, queries = z.shape[-1], leaves[0].detach()
        g = F.pad(g.to(m.dtype), (0, m.shape[-1] - width))
        if torch.is_grad_enabled() or not has_digits(queries, ctx.scale):
            queries, keys, rest, _ = _padded(z, bias, ctx.causal)
            rest, is_causal = one_bias(rest, ctx.causal, queries)
            dq, dk, dv, drest = attention_gradients(queries, keys, queries, rest, is_causal, ctx.scale, g)
        else:
            dq, dk, dv, drest = [*torch.autograd.grad(m, leaves, g, retain_graph=True), None][:4]
        column = dk[..., width : width + 1]
        # The column of a key is minus its square over s, and what the bias adds.
        dz = torch.addcmul((dq + dk + dv)[..., :width], queries[..., :width], column, value=-ctx.scale)
        dbias = None
        if bias is not None and ctx.needs_input_grad[1]:
            dbias = (column.mT if drest is None else drest).sum_to_size(bias.shape)
        return dz, dbias, None
