r"""Attention branches of a character model: what is added to each character, from those up to it.

A branch maps tokens [B, N, D] to tokens of the same shape, and a token sees itself and those before it. Called on a
whole sequence it is fast; `extend` computes the rows of new tokens only, from what was kept of the earlier ones.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from flowattn.attention import dot_product_attention, l2_attention_last
from flowattn.checks import check_choice
from flowattn.contractions import L2SelfAttention
from flowattn.contractions.position import PositionBias
from flowattn.kernels.dot_products import softmax_weights
from flowattn.lipschitz import published_infinity_bound

Position = Literal["absolute", "relative", "both"]
PAIRS = ("dot_product", "l2_untied", "l2_tied", "l2_tied_A", "contractive_inf")


class PairAttention(nn.Module):
    r"""Attention in the weights of the published Transformers, one change after another.

    .. math:: f(X)_i = \sum_h W^{O,T}_h \sum_j P^h_{ij} v^h_j, \qquad P^h_{ij} \propto \exp(b^h_{ij} + a^h_{ij})

    =================  ==================================  ==============================================
    kind               :math:`a_{ij}`                      values
    =================  ==================================  ==============================================
    dot_product        :math:`q_i \cdot k_j / \sqrt d`     :math:`v_j = W_V^T x_j`
    l2_untied          :math:`-|q_i - k_j|^2 / \sqrt d`    the same
    l2_tied            :math:`-|q_i - q_j|^2 / \sqrt d`    the same
    l2_tied_A          :math:`-|q_i - q_j|^2 / \sqrt d`    :math:`v_j = W_V^T A^T x_j`, :math:`A = W_Q W_Q^T / \sqrt d`
    contractive_inf    :math:`-|q_i - q_j|^2 / \sqrt d`    the same, times c over the published bound
    =================  ==================================  ==============================================

    The bound is the one for `max_tokens` tokens, so that no row depends on how many there are. Queries start
    short, as told at `short_start`.

    References:
        | The Lipschitz Constant of Self-Attention (Kim, Papamakarios, Mnih, 2021)
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        kind: Literal["dot_product", "l2_untied", "l2_tied", "l2_tied_A", "contractive_inf"],
        max_tokens: int,
        position_bias: bool,
        coefficient: float = 0.97,
    ) -> None:
        super().__init__()
        check_choice("kind", kind, PAIRS)
        if not 0 < coefficient < 1:
            raise ValueError(f"coefficient must be between 0 and 1; got coefficient={coefficient}.")
        self.kind = kind
        self.num_heads = num_heads
        self.width = features // num_heads
        self.max_tokens = max_tokens
        self.coefficient = coefficient
        projections = 3 if kind in ("dot_product", "l2_untied") else 2
        self.in_projection = nn.Parameter(torch.randn(features, projections * features) / math.sqrt(features))
        self.out_projection = nn.Parameter(torch.randn(features, features) / math.sqrt(features))
        self.position_bias = PositionBias(num_heads, max_tokens=max_tokens, learned=True) if position_bias else None
        with torch.no_grad():
            if self._has_A:  # short queries are short values, too, twice; the other matrices make up for it
                short = 16 * short_start(self.width)
                self.in_projection[:, :features].mul_(short)
                self.in_projection[:, features:].div_(short)
                self.out_projection.div_(short)
            elif kind == "dot_product":  # products are of two of them
                self.in_projection[:, :-features].mul_(16 * short_start(self.width))
            else:
                self.in_projection[:, :-features].mul_(short_start(self.width))

    @property
    def _has_A(self) -> bool:
        return self.kind in ("l2_tied_A", "contractive_inf")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._heads(x)
        bias = None if self.position_bias is None else self.position_bias(x.shape[1])
        if self.kind != "dot_product":
            q, k = self._as_product(q, k, centre=k[..., :1, :].detach())
            v = nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1]))  # the fused kernel wants one width
        return self._join(dot_product_attention(q, k, v, bias, causal=True)[..., : self.width])

    def extend(self, x: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self._heads(x)
        if kept is not None:
            k, v = torch.cat([kept[0], k], -2), torch.cat([kept[1], v], -2)
        keys = k
        if self.kind != "dot_product":
            q, keys = self._as_product(q, k, centre=k[..., :1, :])
        bias = None if self.position_bias is None else self.position_bias(k.shape[-2])[..., -x.shape[1] :, :]
        return self._join(softmax_weights(q, keys, bias, causal=True) @ v), (k, v)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self._project(x)]
        q, v = parts[0], parts[-1]
        k = parts[1] if len(parts) == 3 else q
        if self.kind == "dot_product":
            q = q / math.sqrt(self.width)
        return q, k, v

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self._has_A:  # x A W_V = (x W_Q) (W_Q^T W_V / s): z is the value too
            return (x @ self.in_projection[:, : x.shape[-1]],) * 2
        return (x @ self.in_projection).split(x.shape[-1], -1)

    def _as_product(self, q: Tensor, k: Tensor, centre: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose products are the distances, up to what is the same for every key.

        A shift of all changes no distance, and squares lose their digits far from the origin.
        """
        s, spare = math.sqrt(self.width), -(self.width + 1) % 8
        q, k = q - centre, k - centre
        norms = k.square().sum(-1, keepdim=True)
        queries = torch.cat([q * (2 / s), torch.full_like(q[..., :1], -1 / s)], -1)
        return nn.functional.pad(queries, (0, spare)), nn.functional.pad(torch.cat([k, norms], -1), (0, spare))

    def _join(self, m: Tensor) -> Tensor:
        m = m.transpose(1, 2).flatten(2)
        if not self._has_A:
            return m @ self.out_projection
        heads = (self.num_heads, self.width)
        w_q, w_v = (w.unflatten(1, heads).movedim(1, 0) for w in self.in_projection.chunk(2, -1))
        w_o = self.out_projection.unflatten(0, heads)
        out = (w_q.mT @ w_v @ w_o).flatten(0, 1) / math.sqrt(self.width)
        if self.kind == "contractive_inf":
            out = out * (self.coefficient / published_infinity_bound(w_q, w_v, w_o, self.max_tokens))
        return m @ out

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}, num_heads={self.num_heads}"


class ContractiveAttention(nn.Module):
    r"""L2 attention with the token bound, a learned position bias and balls, contractive in a norm that is learned.

    .. math:: f(X) = g(X M)\, M^{-1}, \qquad M = \operatorname{diag}(e^a), \qquad
        \operatorname{Lip}(g) \le c \text{ in } \max_i |x_i|_2 \;\Rightarrow\;
        \operatorname{Lip}(f) \le c \text{ in } \max_i |x_i M|_2

    Proof: :math:`|(f(X) - f(Y)) M| = |g(XM) - g(YM)| \le c\, |XM - YM|`. So x + f(x) is as invertible as with M = 1.
    Where attention reads from some features and writes to others, M can make what is written count for little, and
    the bound then costs nothing: a coupling is the limit. Half of the features start with the weight `start`.
    """

    def __init__(self, attention: L2SelfAttention, *, start: float | None = None) -> None:
        super().__init__()
        self.attention = attention
        self.log_gain: nn.Parameter | None = None
        if start is not None:
            self.log_gain = nn.Parameter(split_gains(attention.features, start).log())

    def forward(self, x: Tensor) -> Tensor:
        if self.log_gain is None:
            return self.attention(x)
        gain = self.log_gain.exp()
        return self.attention(x * gain) / gain

    def extend(self, x: Tensor, kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if self.log_gain is None:
            return extend_contraction(self.attention, x, kept)
        gain = self.log_gain.exp()
        change, kept = extend_contraction(self.attention, x * gain, kept)
        return change / gain, kept


def extend_contraction(
    f: L2SelfAttention, x: Tensor, kept: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The rows of f for new tokens x, and what later rows need: the z of all tokens so far, and the scales of rows.

    Rows are scaled one by one and by their position alone, so that they are those of the whole sequence, whatever
    its length is going to be.
    """
    z = f._ball(f._heads(x, None, None))
    if kept is None:
        assert f.max_tokens is not None
        scale = f.scale(f.max_tokens).expand(f.max_tokens)
    else:
        z, scale = torch.cat([kept[0], z], -2), kept[1]
    length = z.shape[-2]
    m = l2_attention_last(z, x.shape[1], f._bias(length, None, z.dtype))
    return f._join(m) * scale[length - x.shape[1] : length].unsqueeze(-1), (z, scale)


def short_start(width: int) -> float:
    r"""The length that the z of L2 attention start with, over that of the tokens they come from.

    With z as long as usual, :math:`|z_i - z_j|^2 / \sqrt d` is about :math:`2 \sqrt d` for two tokens and 0 for a token
    and itself: every token sees itself only, and little is learned before that is unlearned. With short z the position
    bias decides, until distances have become worth something. Dot products gain by it too, if little.

    Example:
        >>> short_start(16)
        0.015625
    """
    return width**-0.25 / 32


def start_orthogonal(attention: L2SelfAttention) -> None:
    r"""Starts L2 attention where its bound is tight: with orthogonal matrices, short z, and balls that are small.

    Of all matrices of one Frobenius norm the orthogonal ones have the smallest spectral norm. A learned radius starts
    at :math:`0.3\, d^{1/4}`, where :math:`\rho = R^2 / \sqrt d = 0.09` and attention counts as stretching by 1.02: by
    2.47 it would for :math:`\rho = 1`, which long z need and short ones do not.
    """
    with torch.no_grad():
        short = short_start(attention.head_features)
        nn.init.orthogonal_(attention.W).mul_(short)
        nn.init.orthogonal_(attention.B).div_(short)
        if attention.log_radius is not None:
            attention.log_radius.fill_(math.log(0.3) + 0.25 * math.log(attention.head_features))


def split_gains(features: int, start: float) -> Tensor:
    """One for the first half of the features, `start` for the second."""
    gains = torch.ones(features)
    gains[features - features // 2 :] = start
    return gains
