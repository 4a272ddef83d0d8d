r"""Proven upper bounds of the Jacobian of dot-product attention at given tokens. The letters are `dot_product`'s."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.lipschitz.dot_product import _check_norm, join_heads, product_norm
from flowattn.lipschitz.heads import DotProductHeads
from flowattn.lipschitz.norms import Norm
from flowattn.lipschitz.spectral import spectral_norm_bound


@torch.no_grad()
def local_bound(
    heads: DotProductHeads, x: Float[Tensor, "batch tokens features"], norm: Norm = "2"
) -> Float[Tensor, " batch"]:
    r"""An upper bound of the operator norm of the Jacobian at each sequence.

    .. math:: c_i^2 = \bigl| W^v W^{v,T} + |a_i|^2 \text{Cov}^{vv}_i \bigr|, \qquad D_i = | \text{Cov}^{vk}_i W^q |,

    covariances of values and of values with keys under :math:`P_i`, give for one head

    .. math:: \max_i (c_i + D_i) \text{ for norm="token"}, \qquad
        \min\Bigl( \sqrt{\max_j \textstyle\sum_i P_{ij} c_i^2},\;
        \bigl| \bigl(P_{ij} (|W^v| + |v_j - m_i| |a_i|)\bigr)_{ij} \bigr| \Bigr) + \max_i D_i \text{ for norm="2"}

    by the key inequality of `flowattn.lipschitz.dot_product`, the covariances being those after the projections; the
    second entry of the minimum is the norm of the matrix of norms of blocks. Heads are joined with the norms of O.

    Cost: O(N^2 d^2 H) time, O(N^2 H + N d^2 H) memory.
    """
    _check_norm(norm)
    P = heads.attend(x)
    q, k, v = (x.unsqueeze(1) @ matrix.mT for matrix in (heads.query, heads.key, heads.value))
    q = q + heads.query_bias.unsqueeze(-2)
    lengths = torch.linalg.vector_norm(q @ heads.key, dim=-1)
    means = P @ v
    cov_v = _covariance(P, v, v)
    cov_k = _covariance(P, v, k)
    gram = (heads.value @ heads.value.mT).unsqueeze(-3)
    c = spectral_norm_bound(gram + lengths.square()[..., None, None] * cov_v).sqrt()
    D = spectral_norm_bound(cov_k @ torch.linalg.qr(heads.query.mT).R.mT.unsqueeze(-3))
    each, whole = spectral_norm_bound(heads.out), spectral_norm_bound(heads.out.movedim(0, 1).flatten(1))
    if norm == "token":
        rows = (c + D).mT
        return torch.minimum((rows * each).sum(-1), whole * torch.linalg.vector_norm(rows, dim=-1)).amax(-1)
    schur = (c.square().unsqueeze(-2) @ P).squeeze(-2).amax(-1).sqrt()
    blocks = spectral_norm_bound(heads.value)[:, None, None] + torch.cdist(means, v) * lengths.unsqueeze(-1)
    constants = torch.minimum(schur, spectral_norm_bound(P * blocks)) + D.amax(-1)
    return torch.minimum((constants * each).sum(-1), whole * torch.linalg.vector_norm(constants, dim=-1))


@torch.no_grad()
def attention_matrix_bound(
    heads: DotProductHeads, x: Float[Tensor, "batch tokens features"]
) -> Float[Tensor, " batch"]:
    r"""Theorem of Yudin et al. for the Euclidean norm: the Jacobian by the two largest weights of each token.

    .. math:: |V| \bigl( |P| + 2 |X|^2 |A| \max_i g(P_i) \bigr), \qquad g(p) = p_{(1)} (1 - p_{(1)} + p_{(2)})

    Proof. With :math:`S_i` the Jacobian of softmax, the derivative of :math:`P X` is P dX plus rows
    :math:`X^T S_i (X A dx_i + dX a_i)`, whose sums of squares are at most :math:`(|X|^2 |S_i| |A|)^2 |dX|^2` and
    :math:`(|X| |S_i| |[a_1, ..., a_n]|)^2 |dX|^2`; see `softmax_bound` for :math:`|S_i| \le g(P_i)`. With a bias of the
    queries the two differ, and it is their sum that is returned.
    """
    P = heads.attend(x)
    seeking = (x.unsqueeze(1) @ heads.query.mT + heads.query_bias.unsqueeze(-2)) @ heads.key
    tokens = spectral_norm_bound(x).unsqueeze(-1)
    A = product_norm(heads.key.mT, heads.query)
    constants = spectral_norm_bound(P) + softmax_bound(P).amax(-1) * tokens * (
        tokens * A + spectral_norm_bound(seeking)
    )
    return join_heads(heads, constants)


def softmax_bound(p: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch"]:
    r"""The spectral norm of the Jacobian of softmax, :math:`S = \operatorname{diag}(p) - p p^T`, is at most this.

    .. math:: g(p) = p_{(1)} (1 - p_{(1)} + p_{(2)}), \qquad p_{(1)} \ge p_{(2)} \text{ the largest entries}

    Proof. Write :math:`p_1 > p_2`. The largest eigenvalue is the root in :math:`[p_2, p_1]` of
    :math:`p_1^2 / (p_1 - \lambda) = 1 + \sum_{k > 1} p_k^2 / (\lambda - p_k)`, whose left side grows and whose right
    side falls. At g the left side is :math:`p_1 / (p_1 - p_2)`. The right side is at most
    :math:`1 + (1 - p_1) p_2 / (g - p_2)`, and :math:`g - p_2 = (p_1 - p_2)(1 - p_1)` makes it the same. Hence the root
    is not above g. For :math:`p_1 = p_2` it is :math:`p_1 = g`.

    Example:
        >>> softmax_bound(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
        tensor([0.5000, 0.0000])
    """
    if p.shape[-1] == 1:
        return torch.zeros_like(p[..., 0])
    first, second = p.topk(2).values.unbind(-1)
    return first * (1 - first + second)


def _covariance(P: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Under each row of P: [..., tokens, width, width]."""
    left, right = (
        left - left.mean(-2, keepdim=True),
        right - right.mean(-2, keepdim=True),
    )  # a large offset costs digits
    products = (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)
    second = (P @ products).unflatten(-1, (left.shape[-1], right.shape[-1]))
    return second - (P @ left).unsqueeze(-1) * (P @ right).unsqueeze(-2)
