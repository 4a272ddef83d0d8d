r"""log|det(I + J)| of attention between all pairs of tokens, in one recorded step.

.. math:: J_{ij} = \sum_h P_{ij} S + t_{ij} u_{ij}^T + [i = j] \sum_l t_{il} b_l^T, \qquad
    S = B^T W^T, \quad t_{ij} = P_{ij} B^T (z_j - m_i), \quad u_{ij} = b_i - b_j, \quad b_j = \tfrac2s W z_j

see `flowattn.attention.heads_jacobian`; with a ball S and b differ from token to token. The gradient of log|det(I + J)|
after J is :math:`G = (I + J)^{-T}`, which comes with the value. While it is in the cache it is reduced to gradients
after P, t, S and b, all far smaller; backward takes those to the tokens and weights. Recorded step by step the same
takes a third longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.attention import heads_jacobian
from flowattn.checks import can_look, in_forward_mode
from flowattn.determinants import invert, logabsdet_of_blocks
from flowattn.fused_l2 import centre_of
from flowattn.scratch import Scratch, shaped

Pull = Callable[[Tensor, Tensor], tuple[Tensor, ...]]

_scratch = Scratch()

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
    if not (is_recorded and can_look(*given)) or in_forward_mode():
        return _step_by_step(*given)
    found: Found = _AttentionLogAbsDet.apply(z, B, R, bias)
    return found


def _step_by_step(z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None = None) -> Found:
    value, J = heads_jacobian(z, B, R, bias)
    return value, logabsdet_of_blocks(J)


class _AttentionLogAbsDet(torch.autograd.Function):
    """Tokens come last in here, [batch, heads, width, tokens], and pairs of them, [batch, heads, width, i, j].

    All is computed of -J, so t and S have the other sign.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, B: Tensor, R: Tensor, bias: Tensor | None) -> Found:
        ctx.save_for_backward(z, B, R, bias)
        ctx.centre = centre_of(z, causal=False)
        z = z.mT.clone(memory_format=torch.contiguous_format).sub_(ctx.centre.mT)
        mean, logabsdet, ctx.pull = (_constant if R.ndim == 3 else _ball)(z, _weights(z, bias), B, R)
        return _value(mean, ctx.centre, B), logabsdet

    @staticmethod
    def backward(ctx: Any, g_value: Tensor, g: Tensor) -> Any:
        if torch.is_grad_enabled() or not can_look(g_value, g):
            return _differentiable(ctx.saved_tensors, g_value, g)
        dz, dB, dR, dlogits = ctx.pull(g_value, g.neg().view(-1, 1, 1, 1))
        dB += ctx.centre.squeeze(2).movedim(0, -1) @ g_value.sum(1)
        bias = ctx.saved_tensors[3]
        return dz.mT, dB, dR, dlogits.sum_to_size(bias.shape) if ctx.needs_input_grad[3] else None


def _constant(z: Tensor, P: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Pull]:
    """The means times B, log|det(I + J)|, and what takes gradients after both to those of z, B, R and the logits."""
    _, width, features = B.shape
    steep = 2 / math.sqrt(width)
    BR = torch.cat([B, R * steep], -1)
    a, b = (BR.mT @ z).split(features, 2)
    mean = a @ P.mT
    desk = _Desk.of(P, features)
    torch.sub(mean.unsqueeze(-1), a.unsqueeze(-2), out=desk.t).mul_(P.unsqueeze(2))
    torch.sub(b.unsqueeze(-1), b.unsqueeze(-2), out=desk.u)
    logabsdet, (of_logits, of_rows, of_columns, of_S, of_b) = _determinant(P, (B.mT @ R).neg_(), desk)

    def pull(g_value: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        dmean = torch.addcmul(g_value.mT.unsqueeze(1), of_rows, g)
        da = (dmean @ P).addcmul_(of_columns, g, value=-1)
        dlogits, moved = _through_logits((dmean.mT @ a).mul_(P).addcmul_(of_logits, g), P, z)
        dab = torch.cat([da, of_b * g], 2)
        dz = (BR @ dab).add_(moved, alpha=steep)
        dBR = (z @ dab.mT).sum(0)
        dS = (g.view(1, -1) @ of_S.flatten(1)).view(of_S.shape[1:])
        return dz, dBR[..., :features] - R @ dS.mT, dBR[..., features:] * steep - B @ dS, dlogits

    return mean, logabsdet, pull


def _ball(z: Tensor, P: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Pull]:
    r"""The same for an R of each token, as a ball makes it: now :math:`S_j = B^T R_j`, and b has the two tokens.

    .. math:: b_{ij} = \tfrac2s R_j^T z_i, \qquad u_{ij} = b_{ij} - b_{jj}, \qquad
        \text{own}_i = \sum_l t_{il} b_{li}^T = \tfrac2s \tau_i R_i, \quad \tau_i = \sum_l t_{il} z_l^T
    """
    steep = 2 / math.sqrt(B.shape[1])
    a = B.mT @ z
    mean = a @ P.mT
    desk = _Desk.of(P, B.shape[2])
    torch.sub(mean.unsqueeze(-1), a.unsqueeze(-2), out=desk.t).mul_(P.unsqueeze(2))
    logabsdet, (of_logits, rows, columns, of_z, of_B, of_R) = _ball_determinant(P, z, B, R * steep, desk)

    def pull(g_value: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        dmean = torch.addcmul(g_value.mT.unsqueeze(1), rows, g)
        da = (dmean @ P).addcmul_(columns, g, value=-1)
        dlogits, moved = _through_logits((dmean.mT @ a).mul_(P).addcmul_(of_logits, g), P, z)
        dz = (B @ da).add_(moved, alpha=steep).addcmul_(of_z, g)
        own = (g.view(1, -1) @ of_B.flatten(1)).view_as(B)
        return dz, (z @ da.mT).sum(0) + own, of_R * g.unsqueeze(-1), dlogits

    return mean, logabsdet, pull


def _value(mean: Tensor, centre: Tensor, B: Tensor) -> Tensor:
    """The map from the means of centred tokens, times B already, and their centre."""
    return mean.sum(1).mT + (centre.flatten(1) @ B.flatten(0, 1)).unsqueeze(1)


def _differentiable(given: tuple[Tensor | None, ...], g_value: Tensor, g: Tensor) -> Any:
    """The gradients of all that is given, recorded."""
    tensors = [t for t in given if t is not None]
    pull = torch.func.vjp(_step_by_step, *tensors)[1]
    return *pull((g_value, g)), *[None] * (len(given) - len(tensors))


def _through_logits(weighted: Tensor, P: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients after the logits and, but for a factor of 2 / s, the tokens, from P times that after P.

    It changes `weighted`.
    """
    dlogits = weighted.addcmul_(P, weighted.sum(-1, keepdim=True), value=-1)
    # Rows add up to zero. Where a token sees little but itself, its own entry would be nothing but rounding.
    dlogits.diagonal(dim1=-2, dim2=-1).sub_(dlogits.sum(-1))
    pairs = dlogits + dlogits.mT
    return dlogits, (z @ pairs).addcmul_(z, pairs.sum(-2, keepdim=True), value=-1)


def _weights(z: Tensor, bias: Tensor | None) -> Tensor:
    """The attention P of centred tokens."""
    logits = (z.mT @ z).mul_(2 / math.sqrt(z.shape[-2]))
    half = logits.diagonal(dim1=-2, dim2=-1) * 0.5
    logits.sub_(half.unsqueeze(-1)).sub_(half.unsqueeze(-2))
    if bias is not None:
        return (logits + bias).softmax(-1)
    # None is above that of a token itself, which is 0: a softmax of short rows takes three times as long.
    P = logits.clamp_max_(0).exp_()
    return P.div_(P.sum(-1, keepdim=True))


class _Desk(NamedTuple):
    """Room for what there is of each pair of tokens. The next call has it in the same memory."""

    dP: Tensor  # [B, H, N, N]
    t: Tensor  # [B, H, D, N, N], as u
    u: Tensor
    dt: Tensor  # heads first
    du: Tensor  # of one head
    A: Tensor  # [B, D, D, N, N]
    matrices: Tensor  # [B, D N, D N], with rows and columns of zeros up to a multiple of eight

    @property
    def room(self) -> Tensor:
        """The memory of the matrices for another A."""
        return shaped(self.matrices, self.A.shape)

    @classmethod
    def of(cls, P: Tensor, features: int) -> _Desk:
        batch, heads, tokens, _ = P.shape
        pairs = features, tokens, tokens
        # Such matrices are multiplied in two thirds of the time.
        wide = 8 * math.ceil(features * tokens / 8)
        factors, gradients = [(batch, heads, *pairs)] * 2, [(heads, batch, *pairs), (batch, *pairs)]
        return cls(*_scratch(P, P.shape, *factors, *gradients, (batch, features, *pairs), (batch, wide, wide)))


def _determinant(P: Tensor, S: Tensor, desk: _Desk) -> tuple[Tensor, list[Tensor]]:
    """log|det(I - A)| for the A of these parts, and what backward needs of its gradient, but for the sign.

    With d for the gradient after what follows, these are P dP, t being a product with P, but for a multiple of each row
    of P, which is nothing to the logits; dS; the sums of P dt over keys and over queries, which are for the means and
    for a; and db.
    """
    t, u = desk.t, desk.u
    heads, features = t.shape[1:3]
    logabsdet, inverse = _invert(P, S[None, ..., None], None, desk)
    # A token's own block being minus the sum of its t u^T, these have the difference of their gradient and its own.
    diagonal = inverse.diagonal(dim1=3, dim2=4)
    of_own = diagonal.sum(-1)
    G, room = torch.sub(inverse, diagonal.unsqueeze(-1), out=desk.A), desk.room
    flat = G.flatten(1, 2).flatten(2)
    torch.matmul(S.flatten(1), flat, out=desk.dP.flatten(2))
    dS = torch.bmm(P.flatten(2), flat.mT).unflatten(2, (features, features)).add_(of_own.unsqueeze(1))
    dbs = []
    for h in range(heads):
        torch.sum(torch.mul(G, u[:, h].unsqueeze(1), out=room), 2, out=desk.dt[h])
        du = torch.sum(torch.mul(G, t[:, h].unsqueeze(2), out=room), 1, out=desk.du)
        dbs.append(du.sum(-1).sub_(du.sum(-2)))
    return logabsdet, [*_through_weights(P, desk), dS, _stack(dbs)]


def _ball_determinant(P: Tensor, z: Tensor, B: Tensor, R: Tensor, desk: _Desk) -> tuple[Tensor, list[Tensor]]:
    """The same for 2 / s times the R of each token; the last three are dz and dB, but for what P and a do, and dR."""
    t, u = desk.t, desk.u
    heads, features, tokens = t.shape[1:4]
    s = math.sqrt(z.shape[2])
    columns = R.permute(0, 1, 4, 3, 2).contiguous()  # [B, H, D, d, N]
    b = z.mT.unsqueeze(2) @ columns
    torch.sub(b, b.diagonal(dim1=-2, dim2=-1).unsqueeze(-2), out=u)
    S = (B.mT.unsqueeze(1) @ columns).mul_(-s / 2).transpose(2, 3)
    tau = (t.flatten(2, 3) @ z.mT).unflatten(2, (features, tokens)).transpose(2, 3)  # [B, H, N, D, d]
    own = (tau @ R).sum(1).permute(0, 2, 3, 1)
    logabsdet, inverse = _invert(P, S, own, desk)
    G, room = desk.A.copy_(inverse), desk.room
    down = G.diagonal(dim1=3, dim2=4).permute(0, 3, 1, 2).unsqueeze(1)  # [B, 1, N, D, D]
    dtau = (down @ R.mT).transpose(2, 3).flatten(2, 3)  # [B, H, D N, d]
    dSs, dbs = [], []
    for h in range(heads):
        torch.sum(torch.mul(G, u[:, h].unsqueeze(1), out=room), 2, out=desk.dt[h])
        desk.dt[h].flatten(1, 2).baddbmm_(dtau[:, h], z[:, h])
        torch.sum(torch.mul(G, S[:, h].unsqueeze(-2), out=room), (1, 2), out=desk.dP[:, h])
        dSs.append(torch.mul(G, P[:, h, None, None], out=room).sum(3))
        dbs.append(torch.mul(G, t[:, h].unsqueeze(2), out=room).sum(1))
    dS, db = _stack(dSs), _stack(dbs)
    db.diagonal(dim1=-2, dim2=-1).sub_(db.sum(-2))
    dz = (columns @ db.mT).sum(2) + (dtau.mT @ t.flatten(2, 3))
    # By features first, [B, H, D, d, N], as the columns are.
    dR = z.unsqueeze(2) @ db - (B.unsqueeze(1) @ dS.transpose(2, 3)) * (s / 2)
    dR = dR.permute(0, 1, 4, 3, 2) + tau.mT @ down
    dB = (columns.transpose(2, 3).flatten(3) @ dS.movedim(2, -1).flatten(2, 3)) * (-s / 2)
    return logabsdet, [*_through_weights(P, desk), dz, dB, dR * (2 / s)]


def _invert(P: Tensor, S: Tensor, own: Tensor | None, desk: _Desk) -> tuple[Tensor, Tensor]:
    """log|det(I - A)| for the A of these parts, and (I - A)^{-T} by pairs, a view of the matrices of the desk.

    None is what a token has of its own with one R for all: minus the sum of its t u^T, since rows of t add up to zero.
    """
    t, u, A = desk.t, desk.u, desk.A
    torch.mul(t[:, 0].unsqueeze(2), u[:, 0].unsqueeze(1), out=A)
    for h in range(1, P.shape[1]):
        A.addcmul_(t[:, h].unsqueeze(2), u[:, h].unsqueeze(1))
    own = A.sum(-1).neg_() if own is None else own
    for h in range(P.shape[1]):
        A.addcmul_(P[:, h, None, None], S[:, h].unsqueeze(-2))
    A.diagonal(dim1=3, dim2=4).add_(own)
    features, tokens = u.shape[2:4]
    n, size = features * tokens, (features, tokens)
    by_pairs = desk.matrices.zero_()[:, :n, :n].unflatten(2, size).unflatten(1, size).transpose(2, 3)
    by_pairs.copy_(A)  # quicker than to compute it there, where rows are short
    return invert(desk.matrices)[1], by_pairs


def _through_weights(P: Tensor, desk: _Desk) -> tuple[Tensor, Tensor, Tensor]:
    """P dP, t being a product with P, and the sums of P dt over keys and over queries. It changes t and dt."""
    t, dt = desk.t, desk.dt.transpose(0, 1)
    of_logits = t.mul_(dt).sum(2).addcmul_(P, desk.dP)
    dt.mul_(P.unsqueeze(2))
    return of_logits, dt.sum(-1), dt.sum(-2)


def _stack(heads: list[Tensor]) -> Tensor:
    return heads[0].unsqueeze(1) if len(heads) == 1 else torch.stack(heads, 1)
