"""The Jacobian of attention between all pairs of tokens, with a backward pass of few sweeps over it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def pair_blocks(
    P: Float[Tensor, "batch heads tokens tokens"],
    t: Float[Tensor, "batch heads out tokens tokens"],
    S: Float[Tensor, "#batch heads out features #tokens"],
    u: Float[Tensor, "batch heads features tokens tokens"],
    own: Float[Tensor, "batch out features tokens"],
) -> Float[Tensor, "batch out tokens features tokens"]:
    r"""All blocks of a Jacobian, summed over heads; features come before tokens, in rows and in columns.

    .. math:: J_{ij} = \sum_h \bigl( P_{ij} S_j + t_{ij} u_{ij}^T \bigr) + [i = j]\, \text{own}_i

    It is linear in P and t, in S and u, and in own, so derivatives of every order are more of the same.

    Cost: O(N^2 D^2 H) time, O(N^2 D^2) memory.

    Example:
        >>> one = torch.ones(1, 1, 1, 1, 1)
        >>> pair_blocks(one[0], one, one, 2 * one, 3 * one[0]).item()
        6.0
    """
    if torch.compiler.is_compiling():
        return _pair_blocks(P, t, S, u, own)
    J: Tensor = _PairBlocks.apply(P, t, S, u, own)
    return J


def _pair_blocks(P: Tensor, t: Tensor, S: Tensor, u: Tensor, own: Tensor | None = None) -> Tensor:
    J: Tensor | None = None  # [B, D_out, D, N, N]: both tokens last, since operations are fast along what is long
    for h in range(P.shape[1]):
        straight = P[:, h, None, None] * S[:, h].unsqueeze(-2)
        J = torch.addcmul(straight if J is None else J + straight, t[:, h].unsqueeze(2), u[:, h].unsqueeze(1))
    assert J is not None
    if own is not None:
        J.diagonal(dim1=3, dim2=4).add_(own)
    return J.transpose(2, 3).contiguous()


class _PairBlocks(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(P: Tensor, t: Tensor, S: Tensor, u: Tensor, own: Tensor) -> Tensor:
        return _pair_blocks(P, t, S, u, own)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.save_for_forward(*inputs[:4])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        P, t, S, u = ctx.saved_tensors
        g = g.transpose(2, 3).contiguous()
        grads = [
            (
                (g * S[:, h].unsqueeze(-2)).sum((1, 2)),
                (g * u[:, h].unsqueeze(1)).sum(2),
                (g * P[:, h, None, None]).sum(3),
                (g * t[:, h].unsqueeze(2)).sum(1),
            )
            for h in range(P.shape[1])
        ]
        dP, dt, dS, du = (torch.stack(parts, 1) for parts in zip(*grads, strict=True))
        return dP, dt, dS.sum_to_size(S.shape), du, g.diagonal(dim1=3, dim2=4)

    @staticmethod
    def jvp(ctx: Any, dP: Tensor, dt: Tensor, dS: Tensor, du: Tensor, down: Tensor) -> Tensor:
        P, t, S, u = ctx.saved_tensors
        change = _pair_blocks(dP, dt, S, u) + _pair_blocks(P, t, dS, du)
        return change + torch.diag_embed(down, dim1=2, dim2=4)
