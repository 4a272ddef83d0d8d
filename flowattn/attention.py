r"""L2 self-attention as pure functions of the projected tokens z of each head.

.. math:: m_i = \sum_j P_{ij} z_j, \qquad
    P_{ij} = \operatorname{softmax}_j\bigl(b_{ij} - \|z_i - z_j\|^2 / s\bigr), \qquad s = \sqrt d

Every function takes the same three arguments: the tokens `z` [..., N, d], an additive `bias` that broadcasts
to [..., N, N] (position bias and padding; ``HIDDEN`` hides a key), and `causal`, which hides the keys after
the query. A token always sees itself. Derivatives are closed forms, so they need no autograd, run under
inference mode, and can be differentiated again.

References:
    | The Lipschitz Constant of Self-Attention (Kim, Papamakarios, Mnih, 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import nothing_is_recorded
from flowattn.kernels.diagonal import mean_and_blocks
from flowattn.kernels.dot_products import HIDDEN, dot_product_attention, softmax_weights
from flowattn.kernels.fused_l2 import centre_of, fused_l2_attention, queries_and_keys
from flowattn.kernels.pair_blocks import pair_blocks
from flowattn.kernels.pairs import is_worth_it, pair_attention

__all__ = [
    "HIDDEN",
    "attention_weights",
    "centred",
    "diagonal_blocks",
    "dot_product_attention",
    "heads_jacobian",
    "into_ball",
    "into_ball_jacobian",
    "into_ball_jvp",
    "jacobian_blocks",
    "l2_attention",
    "l2_attention_jvp",
    "l2_attention_last",
    "l2_attention_linearize",
]


def into_ball(
    y: Float[Tensor, "*batch tokens width"], radius: Float[Tensor, "*#batch #tokens #width"] | float
) -> Float[Tensor, "*batch tokens width"]:
    r"""Maps all of space into the ball of radius R, stretching nothing.

    .. math:: z = y / \sqrt{1 + \|y\|^2 / R^2}

    Example:
        >>> into_ball(torch.tensor([[9.0, 12.0]]), radius=20.0)
        tensor([[7.2000, 9.6000]])
    """
    return y * torch.rsqrt(1 + (y / radius).square().sum(-1, keepdim=True))


def into_ball_jacobian(
    y: Float[Tensor, "*batch tokens width"], radius: Float[Tensor, "*#batch #tokens #width"] | float
) -> Float[Tensor, "*batch tokens width width"]:
    r"""The Jacobian of `into_ball` at y.

    .. math:: G = g\, (I - z z^T / R^2), \qquad g = 1 / \sqrt{1 + \|y\|^2 / R^2} = \sqrt{1 - \|z\|^2 / R^2}

    The factor g comes from y: far outside the ball z is on its surface, by rounding.
    """
    shrink = torch.rsqrt(1 + (y / radius).square().sum(-1, keepdim=True))
    unit = y / radius * shrink
    identity = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    return shrink.unsqueeze(-1) * (identity - unit.unsqueeze(-1) * unit.unsqueeze(-2))


def into_ball_jvp(
    y: Float[Tensor, "*batch tokens width"],
    dy: Float[Tensor, "*batch tokens width"],
    radius: Float[Tensor, "*#batch #tokens #width"] | float,
) -> Float[Tensor, "*batch tokens width"]:
    """The derivative of `into_ball` at y along dy."""
    shrink = torch.rsqrt(1 + (y / radius).square().sum(-1, keepdim=True))
    unit = y / radius * shrink
    return shrink * (dy - unit * (unit * dy).sum(-1, keepdim=True))


def attention_weights(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "*batch tokens tokens"]:
    r"""The weights P: how much token i takes from token j.

    Cost: O(N^2 d) time, O(N^2) memory.

    Example:
        >>> attention_weights(torch.tensor([[0.0], [0.0], [99.0]]))[0]
        tensor([0.5000, 0.5000, 0.0000])
    """
    return _weights(centred(z, causal)[0], bias, causal)


def l2_attention(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> Float[Tensor, "*batch tokens width"]:
    r"""Averages the tokens, each weighted by its distance.

    .. math:: m_i = \sum_j P_{ij} z_j

    On CPU many pairs of tokens without bias and mask go to `pair_attention`, others to torch's fused kernel. The first
    backward pass is the kernel's own; later ones and forward mode go through closed forms. (Forward mode over forward
    mode is the one combination that torch's functions with rules of their own do not have.)

    Cost: O(N^2 d) time, O(N d) memory as long as the bias has one row.

    Example:
        >>> l2_attention(torch.tensor([[0.0], [2.0], [99.0]]), torch.tensor([0.0, 4.0, 0.0]).expand(3, 3))[0]
        tensor([1.])
    """
    if bias is None and not causal and is_worth_it(z):
        return pair_attention(z)
    if (bias is not None and bias.shape[-2] > 1) or causal or z.requires_grad:
        return fused_l2_attention(z, bias, causal=causal)
    s = math.sqrt(z.shape[-1])
    near = z - centre_of(z, causal)
    squares = torch.linalg.vector_norm(near, dim=-1).square().unsqueeze(-2)  # in one pass
    key_term = squares * (-1 / s) if bias is None else torch.add(bias, squares, alpha=-1 / s)
    return dot_product_attention(near, near, z, key_term, scale=2 / s)


def l2_attention_last(
    z: Float[Tensor, "*batch tokens width"],
    count: int,
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
) -> Float[Tensor, "*batch count width"]:
    """The last rows of `l2_attention` with a causal mask, for tokens that are added to others one by one.

    Cost: O(N d) time and memory for each of them.

    Example:
        >>> l2_attention_last(torch.tensor([[0.0], [2.0], [2.0]]), 2)[-1] > 1.9
        tensor([True])
    """
    queries, keys = queries_and_keys(centred(z, causal=True)[0])
    bias = bias if bias is None or bias.shape[-2] == 1 else bias[..., -count:, :]
    return softmax_weights(queries[..., -count:, :], keys, bias, causal=True) @ z


def l2_attention_linearize(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "*batch tokens width"], Callable[[Tensor], Tensor]]:
    r"""The output m, and its derivative as a function that takes a direction dz to dm.

    .. math:: dm_i = \sum_j P_{ij} dz_j + \sum_j P_{ij}\, dL_{ij} (z_j - m_i), \qquad
        dL_{ij} = -\tfrac2s (z_i - z_j)^T (dz_i - dz_j)

    The weights are computed once, for any number of directions.

    Cost: O(N^2 d) time per direction, O(N^2) memory.
    """
    z, centre = centred(z, causal)
    P = _weights(z, bias, causal)
    m = P @ z
    steep, width = 2 / math.sqrt(z.shape[-1]), z.shape[-1]
    queries, counted = steep * F.pad(z, (0, 1), value=-1.0), F.pad(z, (0, 1), value=1.0)

    def push(dz: Tensor) -> Tensor:
        own = (z * dz).sum(-1, keepdim=True)
        dL = torch.cat([steep * dz, -steep * own, queries], -1) @ torch.cat([counted, dz, own], -1).mT
        weighted = dL.mul_(P) if nothing_is_recorded() else dL * P
        # What a token does to itself is nothing, or rounding, which would be multiplied by the size of the tokens.
        weighted.diagonal(dim1=-2, dim2=-1).zero_()
        # Products of few rows are quicker than those of few columns.
        moved, total = (counted.mT @ weighted.mT).mT.split([width, 1], -1)
        return (dz.mT @ P.mT).mT + torch.addcmul(moved, total, m, value=-1)

    return m + centre, push


def l2_attention_jvp(
    z: Float[Tensor, "*batch tokens width"],
    dz: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch tokens width"]]:
    """The output m and its derivative along the one direction dz."""
    m, push = l2_attention_linearize(z, bias, causal=causal)
    return m, push(dz)


def diagonal_blocks(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch tokens width width"]]:
    r"""The output m and the diagonal blocks of its Jacobian.

    .. math:: \partial m_i / \partial z_i = P_{ii} I + \tfrac2s \operatorname{Cov}_i, \qquad
        \operatorname{Cov}_i = \sum_k P_{ik} (z_k - m_i)(z_k - m_i)^T

    Cost: O(N^2 d^2) time, O(N^2 + N d^2) memory.
    """
    z, centre = centred(z, causal)
    m, blocks = mean_and_blocks(z, bias, causal=causal)
    return m + centre, blocks


def jacobian_blocks(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch tokens tokens width width"]]:
    r"""The output m and all blocks of its Jacobian, block [i, j] being that of row i after token j.

    .. math:: \partial m_i / \partial z_j = P_{ij}\bigl(I + \tfrac2s (z_j - m_i)(z_i - z_j)^T\bigr)
        + [i = j]\, \tfrac2s \operatorname{Cov}_i

    Cost: O(N^2 d^2) time and memory.
    """
    z, centre = centred(z, causal)
    P = _weights(z, bias, causal)
    m = P @ z
    to_key = z.unsqueeze(-3) - m.unsqueeze(-2)
    apart = (z.unsqueeze(-2) - z.unsqueeze(-3)) * (2 / math.sqrt(z.shape[-1]))
    turning = (P.unsqueeze(-1) * to_key).unsqueeze(-1) * apart.unsqueeze(-2)
    identity = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device)
    tokens = torch.eye(z.shape[-2], dtype=z.dtype, device=z.device)[..., None, None]
    # A row of it sums to minus the covariance, because the keys lie about their mean.
    return m + centre, P[..., None, None] * identity + turning - tokens * turning.sum(-3, keepdim=True)


def heads_jacobian(
    z: Float[Tensor, "batch heads tokens width"],
    B: Float[Tensor, "heads width out_features"],
    R: Float[Tensor, "heads width features"] | Float[Tensor, "batch heads tokens width features"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> tuple[Float[Tensor, "batch tokens out_features"], Float[Tensor, "batch tokens out_features tokens features"]]:
    r"""The sum over heads :math:`\sum_h B_h^T m^h_i`, and its Jacobian if :math:`dz_j = R_j\, dx_j`.

    .. math:: J_{ij} = \sum_h B_h^T (\partial m^h_i / \partial z^h_j) R^h_j

    The blocks of `jacobian_blocks`, multiplied before they are built.

    Cost: O(N^2 D^2) memory and, for H heads, O(N^2 D^2 H) time.
    """
    z, centre = centred(z, causal)
    P = _weights(z, bias, causal)
    a = B.mT @ z.mT
    mean = a @ P.mT
    # Keys come last, [B, H, D, N, N]: features are few, and operations along the last dimension fast if it is long.
    to_key = P.unsqueeze(-3) * (a.unsqueeze(-2) - mean.unsqueeze(-1))
    steep = z * (2 / math.sqrt(z.shape[-1]))
    if R.ndim == 3:
        straight = (B.mT @ R)[None, ..., None]
        b = R.mT @ steep.mT
        apart = b.unsqueeze(-1) - b.unsqueeze(-2)
        own = (to_key.flatten(2, 3) @ b.mT).sum(1).unflatten(1, to_key.shape[2:4]).mT
    else:
        flat = R.movedim(2, -1).flatten(3)
        straight, b = ((left @ flat).unflatten(-1, (R.shape[-1], -1)) for left in (B.mT, steep))
        b = b.transpose(2, 3).contiguous()
        apart = b - b.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        own = torch.einsum("bhoid,bhidk->boki", (to_key.flatten(2, 3) @ steep).unflatten(2, to_key.shape[2:4]), R)
    J = pair_blocks(P, to_key, straight, apart, own)
    return (mean.mT + centre @ B).sum(1), J.permute(0, 2, 1, 4, 3)


def centred(
    z: Float[Tensor, "*batch tokens width"], causal: bool
) -> tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch 1 width"]]:
    """Moves the tokens near the origin, and says from where.

    The weights do not change when all tokens move together, but |z|^2 loses its digits far from the origin.
    Under a causal mask the first token is the reference: the mean would let later tokens in by rounding.
    """
    centre = centre_of(z, causal)
    return z - centre, centre


def _weights(z: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    return softmax_weights(*queries_and_keys(z), bias, causal)
