r"""Attention as a map of measures: tokens with weights, and how far it stretches the Wasserstein distance.

A measure :math:`\mu = \sum_i a_i \delta_{x_i}` goes to :math:`F(\mu) = \sum_i a_i \delta_{f(\mu, x_i)}`. An attack on
it may move the tokens; it may also duplicate one, share its weight, and move the copies apart, which no attack on a
sequence of fixed length can do.

References:
    | How Smooth Is Attention? (Castin, Ablin, Peyre, 2024)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.lipschitz.heads import DotProductHeads


class TransportLipschitz(NamedTuple):
    """What a small attack on a measure can do: by moving tokens, and by splitting the best one to split."""

    moving: Float[Tensor, " batch"]
    splitting: Float[Tensor, " batch"]

    @property
    def ratio(self) -> Float[Tensor, " batch"]:
        """How much stronger the better split is than the best move."""
        return self.splitting / self.moving


def transport_lipschitz(
    heads: DotProductHeads,
    x: Float[Tensor, "batch tokens features"],
    weights: Float[Tensor, "batch tokens"] | None = None,
) -> TransportLipschitz:
    r"""The local Lipschitz constant of attention in the Wasserstein-2 distance, of both kinds of attack.

    .. math:: L_{\text{move}} = \bigl| \operatorname{diag}(\sqrt a)\, J\, \operatorname{diag}(1/\sqrt a) \bigr|, \qquad
        L_{\text{split}} = \max_i \Bigl| \sum_h V_h \text{Cov}^h_i A_h \Bigr|

    Together they give :math:`\max(L_{\text{move}}, L_{\text{split}})`, however many copies are made.

    Proof. Small moves of distinct tokens cost :math:`\sum_i a_i |dx_i|^2` and change outputs by the same sum of
    :math:`|df_i|^2`. Let copies of token i with shares :math:`s_k` move by :math:`\overline{dx}_i + e_{ik}`,
    :math:`\sum_k s_k e_{ik} = 0`. To first order the measure that others attend to changes by the means alone, and each
    copy's query by its own move, so its output changes by :math:`(J\, \overline{dx})_i + D_i e_{ik}` with
    :math:`D_i = \sum_h V_h \text{Cov}^h_i A_h`. Means and deviations are orthogonal before and after, so the norm is
    the larger of the two. Two copies of one token, moved in opposite directions, attain it.

    Differentiable, so that it can be ascended.
    """
    if heads.causal:
        raise ValueError("heads must not be causal: a measure has no order; got causal=True.")
    a = x.new_full(x.shape[:2], 1 / x.shape[1]) if weights is None else weights
    if not bool((a.detach() > 0).all()):
        raise ValueError(f"weights must be positive; got {a.min().item()}.")
    T, D = _derivatives(heads, x, a)
    diagonal = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)[:, None, :, None]
    jacobian = T + torch.where(diagonal, D.unsqueeze(3), 0)
    root = a.sqrt()
    scaled = jacobian * (root[:, :, None, None, None] / root[:, None, None, :, None])
    moving = torch.linalg.matrix_norm(scaled.flatten(3).flatten(1, 2), ord=2)
    return TransportLipschitz(moving, torch.linalg.matrix_norm(D, ord=2).amax(-1))


def _derivatives(heads: DotProductHeads, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """T [B, N, D_out, N, D] by keys and values, and D [B, N, D_out, D] by the token's own query."""
    P = heads.attend(x, a)
    k, v = (x.unsqueeze(1) @ matrix.mT for matrix in (heads.key, heads.value))
    sought = (x.unsqueeze(1) @ heads.query.mT + heads.query_bias.unsqueeze(-2)) @ heads.key
    centred = v.unsqueeze(-3) - (P @ v).unsqueeze(-2)
    change = heads.value[:, None, None] + centred.unsqueeze(-1) * sought[:, :, :, None, None]
    T = torch.einsum("bhij,hov,bhijvf->biojf", P, heads.out, change)
    cross = torch.einsum("bhij,bhijv,bhjk->bhivk", P, centred, k)
    return T, torch.einsum("hov,bhivk,hkf->biof", heads.out, cross, heads.query)


def split_token(
    x: Float[Tensor, "tokens features"], weights: Float[Tensor, " tokens"], token: int
) -> tuple[Float[Tensor, "more features"], Float[Tensor, " more"]]:
    """The same measure with one token written twice, at half its weight. The copy is the last one.

    Example:
        >>> split_token(torch.zeros(1, 2), torch.ones(1), 0)[1]
        tensor([0.5000, 0.5000])
    """
    share = torch.ones_like(weights)
    share[token] = 0.5
    weights = weights * share
    return torch.cat([x, x[token : token + 1]]), torch.cat([weights, weights[token : token + 1]])
