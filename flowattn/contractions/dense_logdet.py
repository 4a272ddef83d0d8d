r"""log|det(I + J)| of attention between all pairs of tokens, in one recorded step.

.. math:: J_{ij} = \sum_h P_{ij} S + t_{ij} u_{ij}^T + [i = j] \sum_l t_{il} b_l^T, \qquad
    S = B^T W^T, \quad t_{ij} = P_{ij} B^T (z_j - m_i), \quad u_{ij} = b_i - b_j, \quad b_j = \tfrac2s W z_j

see `flowattn.attention.heads_jacobian`. The gradient of log|det(I + J)| after J is :math:`G = (I + J)^{-T}`, which comes
with the value. On the way forward it is reduced to gradients after P, t, S and b, all far smaller than J, and on the way
back to those of the tokens and weights. Recorded step by step the same takes a third longer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.attention import heads_jacobian
from flowattn.checks import can_look, in_forward_mode
from flowattn.determinants import invert, logabsdet_plus_identity

Found = tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]


def attention_logabsdet(
    z: Float[Tensor, "batch heads tokens width"],
    B: Float[Tensor, "heads width features"],
    R: Float[Tensor, "heads width features"] | Float[Tensor, "batch heads tokens width features"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
) -> Found:
    r"""The sum over heads :math:`f_i = \sum_h B_h^T m^h_i`, and log|det(I + J)| if :math:`dz_j = R_j\, dx_j`.

    Cost: O(N^3 D^3) time, O(N^2 D^2) memory.

    Example:
        >>> z, one = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 1)
        >>> attention_logabsdet(z, one, one)[1].exp()  # P is 1/3 everywhere
        tensor([2.0000])
    """
    given = (z, B, R) if bias is None else (z, B, R, bias)
    is_recorded = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not (is_recorded and R.ndim == 3 and can_look(*given)) or in_forward_mode():
        return _step_by_step(*given)
    found: Found = _AttentionLogAbsDet.apply(z, B, R, bias)
    return found


def _step_by_step(z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None = None) -> Found:
    value, J = heads_jacobian(z, B, R, bias)
    return value, logabsdet_plus_identity(J.permute(0, 2, 1, 4, 3).flatten(3).flatten(1, 2))


class _AttentionLogAbsDet(torch.autograd.Function):
    """Tokens come last in here, [batch, heads, width, tokens], and pairs of them, [batch, heads, width, i, j]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None) -> Found:
        ctx.save_for_backward(z, B, R, bias)
        _, width, features = B.shape
        centre = z.mean(-2, keepdim=True)
        z = (z - centre).mT.contiguous()
        P = _weights(z, bias)
        BR = torch.cat([B, R * (2 / math.sqrt(width))], -1)
        a, b = torch.einsum("hdo,bhdn->bhon", BR, z).split(features, 2)
        mean = a @ P.mT
        # -J rather than J, which is what is inverted: so are t and S
        t = (mean.unsqueeze(-1) - a.unsqueeze(-2)).mul_(P.unsqueeze(2))
        u = b.unsqueeze(-1) - b.unsqueeze(-2)
        S = (B.mT @ R).neg_()
        logabsdet, ctx.of_pairs = _determinant(P, t, S, u, b)
        ctx.known = centre, z, BR, P, a, t
        return (mean.mT + centre @ B).sum(1), logabsdet

    @staticmethod
    def backward(ctx: Any, g_value: Tensor, g: Tensor) -> Any:
        *given, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            given = [t for t in (*given, bias) if t is not None]
            pull = torch.func.vjp(_step_by_step, *given)[1]
            return *pull((g_value, g)), *[None] * (4 - len(given))
        _, B, R = given
        centre, z, BR, P, a, t = ctx.known
        features, steep = B.shape[-1], 2 / math.sqrt(B.shape[1])
        g = g.neg().view(-1, 1, 1, 1)
        dP, dt, dS, db = ctx.of_pairs
        dt = dt * g.unsqueeze(-1)
        turned = dt * P.unsqueeze(2)
        dmean = turned.sum(-1) + g_value.mT.unsqueeze(1)
        da = dmean @ P - turned.sum(-2)
        weighted = torch.addcmul((dt * t).sum(2), P, torch.addcmul(dmean.mT @ a, dP, g))
        dlogits = weighted - P * weighted.sum(-1, keepdim=True)
        pairs = dlogits + dlogits.mT
        pairs.diagonal(dim1=-2, dim2=-1).zero_()  # a token's distance to itself stays: all else there is rounding
        dab = torch.cat([da, db * g], 2)
        dz = torch.addcmul(z @ pairs, z, pairs.sum(-2, keepdim=True), value=-1).mul_(steep) + BR @ dab
        dBR = (z @ dab.mT).sum(0)
        dS = (dS * g).sum(0)
        dB = dBR[..., :features] + centre.squeeze(2).movedim(0, -1) @ g_value.sum(1) - R @ dS.mT
        dR = dBR[..., features:] * steep - B @ dS
        return dz.mT, dB, dR, dlogits.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None


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
    """log|det(I - A)| for the A of these parts, and its gradients after P, t, S and b, but for their sign."""
    batch, heads, out, tokens, _ = t.shape
    features, size = u.shape[2], out * tokens
    own = (b @ t.flatten(2, 3).mT).sum(1).unflatten(-1, (out, tokens))
    A = P[:, 0, None, None] * S[0, :, :, None, None]
    for h in range(heads):
        if h > 0:
            A.addcmul_(P[:, h, None, None], S[h, :, :, None, None])
        A.addcmul_(t[:, h].unsqueeze(2), u[:, h].unsqueeze(1))
    A.diagonal(dim1=3, dim2=4).add_(own.transpose(1, 2))
    # Matrices of a width that is a multiple of eight are multiplied in two thirds of the time.
    wide = size + -size % 8
    N = A.new_zeros(batch, wide, wide)
    _by_pairs(N, A).copy_(A)
    found, logabsdet = invert(N)
    G = A.copy_(_by_pairs(found, A))
    flat = G.view(batch, out * features, -1)
    dP = (S.view(heads, -1) @ flat).view_as(P)
    dS = torch.bmm(P.flatten(2), flat.mT).unflatten(2, (out, features))
    down = G.diagonal(dim1=3, dim2=4).mT.reshape(batch, size, features)
    dt, db, room = torch.empty_like(t), torch.empty_like(b), torch.empty_like(A)
    for h in range(heads):
        along = torch.mul(G, u[:, h].unsqueeze(1), out=room).sum(2)
        torch.baddbmm(along.flatten(1, 2), down, b[:, h], out=dt[:, h].flatten(1, 2))
        du = torch.mul(G, t[:, h].unsqueeze(2), out=room).sum(1)
        torch.baddbmm(du.sum(-1) - du.sum(-2), down.mT, t[:, h].flatten(1, 2), out=db[:, h])
    return logabsdet, [dP, dt, dS, db]


def _by_pairs(matrices: Tensor, like: Tensor) -> Tensor:
    """A view of matrices of all tokens as blocks of all pairs, [batch, out, features, i, j]."""
    out, features, tokens = like.shape[1:4]
    rows, columns = matrices[:, : out * tokens].unflatten(1, (out, tokens)), features * tokens
    return rows[..., :columns].unflatten(-1, (features, tokens)).transpose(2, 3)
