r"""log|det(I + J)| of attention between all pairs of tokens, in one recorded step.

.. math:: J_{ij} = \sum_h P_{ij} S + t_{ij} u_{ij}^T + [i = j] \sum_l t_{il} b_l^T, \qquad
    S = B^T W^T, \quad t_{ij} = P_{ij} B^T (z_j - m_i), \quad u_{ij} = b_i - b_j, \quad b_j = \tfrac2s W z_j

see `flowattn.attention.heads_jacobian`; with a ball S and b differ from token to token. The gradient of log|det(I + J)|
after J is :math:`G = (I + J)^{-T}`, which comes with the value. While it is in the cache it is reduced to gradients
after P, t, S and b, all far smaller; backward takes those to the tokens and weights. Recorded step by step the same
takes up to twice as long.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowattn.attention import centred, heads_jacobian
from flowattn.checks import can_look, in_forward_mode
from flowattn.determinants import invert, logabsdet_of_blocks

Found = tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]


def attention_logabsdet(
    x: Float[Tensor, "batch tokens features"],
    W: Float[Tensor, "features inner"],
    B: Float[Tensor, "inner features"],
    c: Float[Tensor, " one"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    num_heads: int,
) -> Found:
    r"""Attention :math:`f_i = c \sum_h B_h^T m^h_i` of the tokens :math:`z^h_j = W_h^T x_j`, and its log|det(I + J)|.

    Cost: O(N^3 D^3) time, O(N^2 D^2) memory.

    Example:
        >>> x, one = torch.zeros(1, 3, 1), torch.ones(1, 1)
        >>> attention_logabsdet(x, one, one, torch.ones(1), num_heads=1)[1].exp()  # P is 1/3 everywhere
        tensor([2.0000])
    """
    given = (x, W, B, c) if bias is None else (x, W, B, c, bias)
    if not _one_step(given):
        return _step_by_step(num_heads, *given)
    found: Found = _AttentionLogAbsDet.apply(x, W, B, c, bias, num_heads)
    return found


def heads_logabsdet(
    z: Float[Tensor, "batch heads tokens width"],
    B: Float[Tensor, "heads width features"],
    R: Float[Tensor, "batch heads tokens width features"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
) -> Found:
    r"""The sum over heads :math:`f_i = \sum_h B_h^T m^h_i`, and log|det(I + J)| if :math:`dz_j = R_j\, dx_j`.

    Cost: O(N^3 D^3) time, O(N^2 D^2) memory.

    Example:
        >>> z, one = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 1)
        >>> heads_logabsdet(z, one, one.expand(1, 1, 3, 1, 1))[1].exp()
        tensor([2.0000])
    """
    given = (z, B, R) if bias is None else (z, B, R, bias)
    if not _one_step(given):
        return _heads_step_by_step(*given)
    found: Found = _HeadsLogAbsDet.apply(z, B, R, bias)
    return found


def _one_step(given: tuple[Tensor, ...]) -> bool:
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return is_recorded and can_look(*given) and not in_forward_mode()


def _step_by_step(num_heads: int, x: Tensor, W: Tensor, B: Tensor, c: Tensor, bias: Tensor | None = None) -> Found:
    z = (x @ W).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    R, B = (t.unflatten(0, (num_heads, -1)) for t in (W.mT, B * c))
    return _heads_step_by_step(z, B, R, bias)


def _heads_step_by_step(z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None = None) -> Found:
    value, J = heads_jacobian(z, B, R, bias)
    return value, logabsdet_of_blocks(J)


# In the two steps tokens come last, [batch, heads, width, tokens], and pairs of them, [batch, heads, width, i, j]. All
# is computed of -J, so t and S have the other sign.


class _AttentionLogAbsDet(torch.autograd.Function):
    r"""Of each token it takes z, a = B^T z and b = (2/s) W z, all of them linear, at once.

    About the centre of the tokens, by the matrices W and :math:`M_h = W_h (B_h, \tfrac2s W_h^T)`. The first part of M
    is :math:`S_h^T`, too, and what the value makes of the centre.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, B: Tensor, c: Tensor, bias: Tensor | None, num_heads: int) -> Found:
        ctx.save_for_backward(x, W, B, c, bias)
        batch, tokens, features = x.shape
        width = len(B) // num_heads
        W_h, B_h = W.reshape(features, num_heads, width).transpose(0, 1), B.reshape(num_heads, width, features) * c
        right = torch.cat([B_h, W_h.mT * (2 / math.sqrt(width))], -1)
        M = torch.bmm(W_h, right)
        W_M = torch.cat([W_h, M], -1).transpose(0, 1).reshape(features, -1)
        centre = x.mean(1, keepdim=True)
        near = (x - centre).view(-1, features)
        zab = (near @ W_M).view(batch, tokens, num_heads, width + 2 * features).permute(0, 2, 3, 1).contiguous()
        z, ab = zab.split([width, 2 * features], 2)
        a, b = ab.split(features, 2)
        P = _weights(z, bias)
        mean = a @ P.mT
        t = (mean.unsqueeze(-1) - a.unsqueeze(-2)).mul_(P.unsqueeze(2))
        u = b.unsqueeze(-1) - b.unsqueeze(-2)
        S = M[:, :, :features]
        logabsdet, of_parts = _determinant(P, t, S.mT.neg(), u, b)
        ctx.num_heads, ctx.tape = num_heads, (centre, near, W_h, right, W_M, z, a, P, of_parts)
        return mean.sum(1).mT + centre @ S.sum(0), logabsdet

    @staticmethod
    def backward(ctx: Any, g_value: Tensor, g: Tensor) -> Any:
        if torch.is_grad_enabled() or not can_look(g_value, g):
            return *_differentiable(
                functools.partial(_step_by_step, ctx.num_heads), ctx.saved_tensors, g_value, g
            ), None
        x, _, B, c, bias = ctx.saved_tensors
        centre, near, W_h, right, W_M, z, a, P, (of_logits, of_rows, of_columns, of_S, of_b) = ctx.tape
        (width, features), minus = right.shape[1:], g.neg().view(-1, 1, 1, 1)
        features //= 2
        dmean = torch.addcmul(g_value.mT.unsqueeze(1), of_rows, minus)
        da = torch.addcmul(dmean @ P, of_columns, minus, value=-1)
        dlogits, moved = _through_logits(torch.addcmul(of_logits * minus, P, dmean.mT @ a), P, z)
        dzab = torch.cat([moved.mul_(2 / math.sqrt(width)), da, of_b * minus], 2)
        dzab = dzab.permute(0, 3, 1, 2).reshape(len(near), W_M.shape[1])
        dW, dM = (near.mT @ dzab).view(features, len(W_h), -1).transpose(0, 1).split([width, 2 * features], -1)
        dS = centre.squeeze(1).mT @ g_value.sum(1) - (minus.view(1, -1) @ of_S.flatten(1)).view(of_S.shape[1:]).mT
        dM = dM + F.pad(dS, (0, features))
        dright = torch.bmm(W_h.mT, dM)
        dW = dW + torch.bmm(dM, right.mT) + dright[..., features:].mT * (2 / math.sqrt(width))
        dB = dright[..., :features].reshape(B.shape)
        dbias = dlogits.sum_to_size(bias.shape) if ctx.needs_input_grad[4] else None
        dx = (dzab @ W_M.mT).view(x.shape)
        return dx, dW.transpose(0, 1).reshape(features, -1), dB * c, (dB * B).sum().view(1), dbias, None


class _HeadsLogAbsDet(torch.autograd.Function):
    r"""The same if R differs from token to token, as a ball makes it: now :math:`S_j = B^T R_j`, and b has two tokens.

    .. math:: b_{ij} = \tfrac2s R_j^T z_i, \qquad u_{ij} = b_{ij} - b_{jj}, \qquad
        \text{own}_i = \sum_l t_{il} b_{li}^T = \tfrac2s \tau_i R_i, \quad \tau_i = \sum_l t_{il} z_l^T
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None) -> Found:
        ctx.save_for_backward(z, B, R, bias)
        z, centre = centred(z, causal=False)
        z = z.mT.contiguous()
        P = _weights(z, bias)
        a = B.mT @ z
        mean = a @ P.mT
        t = (mean.unsqueeze(-1) - a.unsqueeze(-2)).mul_(P.unsqueeze(2))
        logabsdet, of_parts = _heads_determinant(P, t, z, B, R * (2 / math.sqrt(B.shape[1])))
        ctx.tape = centre, z, a, P, of_parts
        return mean.sum(1).mT + (centre.flatten(1) @ B.flatten(0, 1)).unsqueeze(1), logabsdet

    @staticmethod
    def backward(ctx: Any, g_value: Tensor, g: Tensor) -> Any:
        if torch.is_grad_enabled() or not can_look(g_value, g):
            return _differentiable(_heads_step_by_step, ctx.saved_tensors, g_value, g)
        _, B, _, bias = ctx.saved_tensors
        centre, z, a, P, (of_logits, of_rows, of_columns, of_z, of_B, of_R) = ctx.tape
        minus = g.neg().view(-1, 1, 1, 1)
        dmean = torch.addcmul(g_value.mT.unsqueeze(1), of_rows, minus)
        da = torch.addcmul(dmean @ P, of_columns, minus, value=-1)
        dlogits, moved = _through_logits(torch.addcmul(of_logits * minus, P, dmean.mT @ a), P, z)
        dz = torch.addcmul(torch.add(B @ da, moved, alpha=2 / math.sqrt(B.shape[1])), of_z, minus)
        dB = (z @ da.mT).sum(0) + (minus.view(1, -1) @ of_B.flatten(1)).view_as(B)
        dB += centre.squeeze(2).movedim(0, -1) @ g_value.sum(1)
        dbias = dlogits.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None
        return dz.mT, dB, of_R * minus.unsqueeze(-1), dbias


def _differentiable(
    step_by_step: Callable[..., Found], given: tuple[Tensor | None, ...], g_value: Tensor, g: Tensor
) -> Any:
    """The gradients of all that is given, recorded."""
    tensors = [t for t in given if t is not None]
    pull = torch.func.vjp(step_by_step, *tensors)[1]
    return *pull((g_value, g)), *[None] * (len(given) - len(tensors))


def _through_logits(weighted: Tensor, P: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients after the logits and, but for a factor of 2 / s, the tokens, from P times that after P."""
    dlogits = weighted - P * weighted.sum(-1, keepdim=True)
    # Rows add up to zero. Where a token sees little but itself, its own entry would be nothing but rounding.
    dlogits.diagonal(dim1=-2, dim2=-1).sub_(dlogits.sum(-1))
    pairs = dlogits + dlogits.mT
    return dlogits, torch.addcmul(z @ pairs, z, pairs.sum(-2, keepdim=True), value=-1)


def _weights(z: Tensor, bias: Tensor | None) -> Tensor:
    """The attention P of centred tokens."""
    logits = (z.mT * (2 / math.sqrt(z.shape[-2]))) @ z
    half = logits.diagonal(dim1=-2, dim2=-1) * 0.5
    logits.sub_(half.unsqueeze(-1)).sub_(half.unsqueeze(-2))
    if bias is not None:
        return (logits + bias).softmax(-1)
    # None is above that of a token itself, which is 0: a softmax of short rows takes three times as long.
    P = logits.clamp_max_(0).exp_()
    return P.div_(P.sum(-1, keepdim=True))


def _determinant(P: Tensor, t: Tensor, S: Tensor, u: Tensor, b: Tensor) -> tuple[Tensor, list[Tensor]]:
    """log|det(I - A)| for the A of these parts, and what backward needs of its gradient, but for the sign.

    With d for the gradient after what follows, these are P dP, t being a product with P; dS; the sums of P dt over keys
    and over queries, which are for the means and for a; and db.
    """
    batch, heads, out, tokens, _ = t.shape
    features = u.shape[2]
    own = (b @ t.flatten(2, 3).mT).sum(1).unflatten(-1, (out, tokens)).transpose(1, 2)
    logabsdet, G, room = _invert(P, t, S[None, ..., None], u, own)
    flat = G.flatten(1, 2).flatten(2)
    dP = (S.flatten(1) @ flat).view_as(P)
    dS = torch.bmm(P.flatten(2), flat.mT).unflatten(2, (out, features))
    down = G.diagonal(dim1=3, dim2=4).mT.reshape(batch, out * tokens, features)
    dts, dbs = [], []
    for h in range(heads):
        along = torch.mul(G, u[:, h].unsqueeze(1), out=room).sum(2)
        dts.append(along.flatten(1, 2).baddbmm_(down, b[:, h]).view_as(along))
        du = torch.mul(G, t[:, h].unsqueeze(2), out=room).sum(1)
        dbs.append((du.sum(-1) - du.sum(-2)).baddbmm_(down.mT, t[:, h].flatten(1, 2)))
    return logabsdet, [*_through_weights(_stack(dts), t, P, dP), dS, _stack(dbs)]


def _heads_determinant(P: Tensor, t: Tensor, z: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same for 2 / s times the R of each token; the last three are dz and dB, but for what P and a do, and dR."""
    heads, out, tokens = t.shape[1:4]
    s = math.sqrt(z.shape[2])
    columns = R.permute(0, 1, 4, 3, 2).contiguous()  # [B, H, D, d, N]
    b = z.mT.unsqueeze(2) @ columns
    u = b - b.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    S = (B.mT.unsqueeze(1) @ columns).mul_(-s / 2).transpose(2, 3)
    tau = (t.flatten(2, 3) @ z.mT).unflatten(2, (out, tokens)).transpose(2, 3)  # [B, H, N, o, d]
    own = (tau @ R).sum(1).permute(0, 2, 3, 1)
    logabsdet, G, room = _invert(P, t, S, u, own)
    down = G.diagonal(dim1=3, dim2=4).permute(0, 3, 1, 2).unsqueeze(1)  # [B, 1, N, o, D]
    dtau = (down @ R.mT).transpose(2, 3).flatten(2, 3)  # [B, H, o N, d]
    dts, dPs, dSs, dbs = [], [], [], []
    for h in range(heads):
        along = torch.mul(G, u[:, h].unsqueeze(1), out=room).sum(2)
        dts.append(along.flatten(1, 2).baddbmm_(dtau[:, h], z[:, h]).view_as(along))
        dPs.append(torch.mul(G, S[:, h].unsqueeze(-2), out=room).sum((1, 2)))
        dSs.append(torch.mul(G, P[:, h, None, None], out=room).sum(3))
        dbs.append(torch.mul(G, t[:, h].unsqueeze(2), out=room).sum(1))
    dP, dS, db = map(_stack, (dPs, dSs, dbs))
    db.diagonal(dim1=-2, dim2=-1).sub_(db.sum(-2))
    dz = (columns @ db.mT).sum(2) + (dtau.mT @ t.flatten(2, 3))
    # By features first, [B, H, D, d, N], as the columns are.
    dR = z.unsqueeze(2) @ db - (B.unsqueeze(1) @ dS.transpose(2, 3)) * (s / 2)
    dR = dR.permute(0, 1, 4, 3, 2) + tau.mT @ down
    dB = (columns.transpose(2, 3).flatten(3) @ dS.movedim(2, -1).flatten(2, 3)) * (-s / 2)
    return logabsdet, [*_through_weights(_stack(dts), t, P, dP), dz, dB, dR * (2 / s)]


def _invert(P: Tensor, t: Tensor, S: Tensor, u: Tensor, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log|det(I - A)| for the A of these parts, (I - A)^{-T} by pairs, and room for as many numbers."""
    A = P[:, 0, None, None] * S[:, 0].unsqueeze(-2)
    for h in range(P.shape[1]):
        if h > 0:
            A.addcmul_(P[:, h, None, None], S[:, h].unsqueeze(-2))
        A.addcmul_(t[:, h].unsqueeze(2), u[:, h].unsqueeze(1))
    A.diagonal(dim1=3, dim2=4).add_(own)
    # Matrices of a width that is a multiple of eight are multiplied in two thirds of the time.
    size = A.shape[1] * A.shape[3]
    wide = size + -size % 8
    N = A.new_zeros(len(A), wide, wide)
    _by_pairs(N, A).copy_(A)
    found, logabsdet = invert(N)
    return logabsdet, A.copy_(_by_pairs(found, A)), N.flatten()[: A.numel()].view_as(A)


def _through_weights(dt: Tensor, t: Tensor, P: Tensor, dP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P dP, t being a product with P, and the sums of P dt over keys and over queries. It changes dt."""
    of_logits = torch.addcmul((dt * t).sum(2), P, dP)
    dt.mul_(P.unsqueeze(2))
    return of_logits, dt.sum(-1), dt.sum(-2)


def _stack(heads: list[Tensor]) -> Tensor:
    return heads[0].unsqueeze(1) if len(heads) == 1 else torch.stack(heads, 1)


def _by_pairs(matrices: Tensor, like: Tensor) -> Tensor:
    """A view of matrices of all tokens as blocks of all pairs, [batch, out, features, i, j]."""
    out, features, tokens = like.shape[1:4]
    rows, columns = matrices[:, : out * tokens].unflatten(1, (out, tokens)), features * tokens
    return rows[..., :columns].unflatten(-1, (features, tokens)).transpose(2, 3)
