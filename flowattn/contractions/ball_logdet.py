r"""The dense log-determinant of attention whose tokens are mapped into a ball, so that R is another one for each.

.. math:: S_j = B^T R_j, \qquad b_{ij} = \tfrac2s R_j^T z_i, \qquad u_{ij} = b_{ij} - b_{jj}, \qquad
    \text{own}_i = \sum_l t_{il} b_{li}^T = \tfrac2s \tau_i R_i, \quad \tau_i = \sum_l t_{il} z_l^T

in place of what `dense_logdet` has, which says the rest. There is no K: S is another one for each token, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowattn.contractions.pair_desk import (
    Desk,
    Pull,
    average,
    invert_all,
    multiply_out,
    sums,
    take_off_weighted,
    through_means,
    through_weights,
)


def ball_logabsdet(z: Tensor, P: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Pull]:
    """The means times B, log|det(I + J)|, and what takes gradients after both to those of z, B, R and the logits."""
    steep, desk = 2 / math.sqrt(B.shape[1]), Desk.of(z, B.shape[2])
    a = B.mT @ z
    mean = average(a, P, desk)
    logabsdet, (of_logits, of_mean, of_a, of_z, of_B, of_R) = _determinant(P, z, B, R * steep, desk)

    def pull(g_value: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        da, moved, dlogits = through_means(g_value, g, of_mean, of_a, of_logits, a, P, z)
        dz = (B @ da).add_(moved, alpha=steep).addcmul_(of_z, g)
        own = (g.view(1, -1) @ of_B.flatten(1)).view_as(B)
        return dz, (z @ da.mT).sum(0) + own, of_R * g.unsqueeze(-1), dlogits

    return mean, logabsdet, pull


def _determinant(P: Tensor, z: Tensor, B: Tensor, R: Tensor, desk: Desk) -> tuple[Tensor, tuple[Tensor, ...]]:
    """log|det(I - A)|, and what backward needs of its gradient, but for the sign, for 2 / s times the R of each token.

    That is P dP and the sums of P dt, as without balls; dz and dB, but for what P and a do; and dR.
    """
    t = desk.t
    heads, features, tokens = t.shape[1:4]
    s = math.sqrt(z.shape[2])
    columns = R.permute(0, 1, 4, 3, 2).contiguous()  # [B, H, D, d, N]
    b = z.mT.unsqueeze(2) @ columns
    torch.sub(b, b.diagonal(dim1=-2, dim2=-1).unsqueeze(-2), out=desk.u)
    S = (B.mT.unsqueeze(1) @ columns).mul_(s / 2).transpose(2, 3)
    tau = (t.flatten(2, 3) @ z.mT).unflatten(2, (features, tokens)).transpose(2, 3)  # [B, H, N, D, d]
    multiply_out(desk)
    take_off_weighted(P, S, desk)
    desk.own.add_((tau @ R).sum(1).permute(0, 2, 3, 1))
    logabsdet = invert_all(desk)
    G, room = desk.A.copy_(desk.inverses_by_pairs), desk.room
    down = desk.own.permute(0, 3, 1, 2).unsqueeze(1)  # [B, 1, N, D, D]
    dtau = (down @ R.mT).transpose(2, 3).flatten(2, 3)  # [B, H, D N, d]
    dSs, dbs = [], []
    for h in range(heads):
        torch.sum(torch.mul(G, desk.columns[h], out=room), 2, out=desk.dt[h])
        desk.dt[h].flatten(1, 2).baddbmm_(dtau[:, h], z[:, h])
        torch.sum(torch.mul(G, S[:, h].unsqueeze(-2), out=room), (1, 2), out=desk.dP[:, h])
        dSs.append(torch.mul(G, P[:, h, None, None], out=room).sum(3))
        dbs.append(torch.mul(G, desk.rows[h], out=room).sum(1))
    dS, db = _by_samples(dSs), _by_samples(dbs)
    db.diagonal(dim1=-2, dim2=-1).sub_(db.sum(-2))
    dz = (columns @ db.mT).sum(2) + (dtau.mT @ t.flatten(2, 3))
    # By features first, [B, H, D, d, N], as the columns are.
    dR = z.unsqueeze(2) @ db - (B.unsqueeze(1) @ dS.transpose(2, 3)) * (s / 2)
    dR = dR.permute(0, 1, 4, 3, 2) + tau.mT @ down
    dB = (columns.transpose(2, 3).flatten(3) @ dS.movedim(2, -1).flatten(2, 3)) * (-s / 2)
    return logabsdet, (through_weights(P, desk), *sums(desk.dt, desk), dz, dB, dR * (2 / s))


def _by_samples(heads: list[Tensor]) -> Tensor:
    """What there is of each head as [batch, heads, ...]."""
    return heads[0].unsqueeze(1) if len(heads) == 1 else torch.stack(heads, 1)
