"""The Jacobian of attention between all pairs of tokens, with a backward pass of few sweeps over it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def pair_blocks(
    P: Float[Tensor, "batch heads tokens tokens"],
    t: Float[Tensor, "batch heads out tokens tokens"],
    S: Float[Tensor, "heads out features"],
    b: Float[Tensor, "batch heads features tokens"],
) -> Float[Tensor, "batch out tokens features tokens"]:
    r"""All blocks of a Jacobian, summed over heads; features come before tokens, in rows and in columns.

    .. math:: J_{ij} = \sum_h P_{ij} S + t_{ij} (b_i - b_j)^T + [i = j] \sum_k t_{ik} b_k^T

    It is linear in the pair (P, t) and in the pair (S, b), so derivatives of every order are more of the same.

    Cost: O(N^2 D^2 H) time, O(N^2 D^2) memory.

    Example:
        >>> one = torch.ones(1, 1, 1, 1)
        >>> pair_blocks(one, one.unsqueeze(0), torch.ones(1, 1, 1), 2 * one).item()
        3.0
    """
    if torch.compiler.is_compiling():
        return _pair_blocks(P, t, S, b)
    J: Tensor = _PairBlocks.apply(P, t, S, b)
    return J


def _pair_blocks(P: Tensor, t: Tensor, S: Tensor, b: Tensor) -> Tensor:
    apart = _apart(b)
    J: Tensor | None = None  # [B, D_out, D, N, N]: both tokens last, since operations are fast along what is long
    for h in range(len(S)):
        straight = P[:, h, None, None] * S[h, :, :, None, None]
        J = torch.addcmul(straight if J is None else J + straight, t[:, h].unsqueeze(2), apart[:, h].unsqueeze(1))
    assert J is not None
    own = (t.flatten(2, 3) @ b.mT).sum(1).unflatten(1, t.shape[2:4])
    J.diagonal(dim1=3, dim2=4).add_(own.mT)
    return J.transpose(2, 3).contiguous()


def _apart(b: Tensor) -> Tensor:
    """The differences b_i - b_j, [B, H, D, N, N]."""
    return b.unsqueeze(-1) - b.unsqueeze(-2)


class _PairBlocks(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(P: Tensor, t: Tensor, S: Tensor, b: Tensor) -> Tensor:
        return _pair_blocks(P, t, S, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        P, t, S, b = ctx.saved_tensors
        apart = _apart(b)
        own = g.diagonal(dim1=2, dim2=4).mT.flatten(1, 2)
        g = g.transpose(2, 3).contiguous()
        grads = []
        for h in range(len(S)):
            turn = (g * t[:, h].unsqueeze(2)).sum(1)
            grads.append(
                (
                    (S[h].view(1, 1, -1) @ g.flatten(3).flatten(1, 2)).view_as(P[:, h]),
                    (g * apart[:, h].unsqueeze(1)).sum(2) + (own @ b[:, h]).view_as(t[:, h]),
                    (g.flatten(3).flatten(1, 2) @ P[:, h].flatten(1).unsqueeze(-1)).sum(0).view_as(S[h]),
                    turn.sum(-1) - turn.sum(-2) + own.mT @ t[:, h].flatten(1, 2),
                )
            )
        dP, dt, dS, db = zip(*grads, strict=True)
        return torch.stack(dP, 1), torch.stack(dt, 1), torch.stack(dS), torch.stack(db, 1)

    @staticmethod
    def jvp(ctx: Any, dP: Tensor, dt: Tensor, dS: Tensor, db: Tensor) -> Tensor:
        P, t, S, b = ctx.saved_tensors
        return _pair_blocks(dP, dt, S, b) + _pair_blocks(P, t, dS, db)
