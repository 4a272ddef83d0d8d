"""Self-attention of tokens: the contractive L2 kind, and dot products for comparison."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowattn.attention import (
    HIDDEN,
    attention_weights,
    centred,
    diagonal_blocks,
    dot_product_attention,
    heads_jacobian,
    into_ball,
    into_ball_jacobian,
    into_ball_jvp,
    l2_attention,
    l2_attention_linearize,
)
from flowattn.checks import check_choice, check_finite, check_positive
from flowattn.contractions.base import Contraction, Push
from flowattn.contractions.blocks import HeadBlocks, TokenBlocks
from flowattn.contractions.dense_logdet import attention_logabsdet
from flowattn.contractions.position import PositionBias
from flowattn.lipschitz.bounds import (
    attention_stretch,
    ball_stretch,
    counted_stretch,
    counted_stretches,
    infinity_bound,
    token_bound,
    visible_weight,
)
from flowattn.lipschitz.head_norms import head_norms, single_head_norms
from flowattn.lipschitz.memory import Remembered
from flowattn.lipschitz.norms import Norm, check_norm, token_norm


class _SelfAttention(Contraction):
    """What the two kinds of attention share: heads, position bias, and who sees whom."""

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        head_features: int | None,
        causal: bool,
        position_bias: Literal["alibi", "learned"] | None,
        max_tokens: int | None,
        coefficient: float | None,
        context_features: int | None,
    ) -> None:
        super().__init__(features, coefficient=coefficient, context_features=context_features)
        check_positive(features=features, num_heads=num_heads)
        if head_features is None:
            if features % num_heads:
                raise ValueError(
                    f"num_heads must divide features unless head_features is given; "
                    f"got num_heads={num_heads}, features={features}."
                )
            head_features = features // num_heads
        check_positive(head_features=head_features)
        if max_tokens is not None:
            check_positive(max_tokens=max_tokens)
        check_choice("position_bias", position_bias, (None, "alibi", "learned"))
        self.num_heads = num_heads
        self.head_features = head_features
        self.causal = causal
        self.max_tokens = max_tokens
        self.structure = "causal" if causal else "dense"
        self.position_bias = position_bias and PositionBias(
            num_heads, max_tokens=max_tokens, learned=position_bias == "learned"
        )
        self.U = None
        if context_features is not None:
            check_positive(context_features=context_features)
            self.U = nn.Parameter(
                torch.randn(context_features, num_heads * head_features) / math.sqrt(context_features)
            )

    def _split(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _bias(self, num_tokens: int, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        bias: Tensor | None = None if self.position_bias is None else self.position_bias(num_tokens).to(dtype)
        if mask is None:
            return bias
        padding = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, HIDDEN)
        padding = padding[:, None, None]
        return padding if bias is None else bias + padding

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_heads={self.num_heads}, head_features={self.head_features}"


def _join(m: Tensor, B: Tensor) -> Tensor:
    """What the heads found, side by side, times B [H d, D]."""
    return m.transpose(1, 2).flatten(2) @ B


class L2SelfAttention(_SelfAttention):
    r"""L2 multi-head self-attention with a proven Lipschitz bound.

    .. math:: f(X)_i = c_i \sum_h B_h^T \sum_j P^h_{ij} z^h_j, \qquad
        z^h_j = \text{ball}_R(W_h^T x_j), \qquad
        P^h_{ij} = \operatorname{softmax}_j\bigl(b^h_{ij} - \|z^h_i - z^h_j\|^2 / \sqrt d\bigr)

    One projection is query, key and value. With radius None this is the L2 attention of Kim et al., whose values
    are projected once more by the queries' matrix: :math:`B_h = W_h^T W^{V,h} W^{O,h} / \sqrt d`. Row i is scaled by
    its own bound, so under a causal mask no row depends on later tokens or on the length.

    Args:
        features: width D of a token.
        num_heads: number of heads H.
        head_features: width d of a head, features / num_heads unless given; any width will do.
        causal: whether a token sees only itself and those before it.
        position_bias: None, "alibi" (fixed slopes) or "learned" (a table; needs `max_tokens`).
        radius: None, a number, or "learned" (one per head, starting at R^2 = sqrt(d)): the tokens of a head are
            mapped into a ball, and the bound stops growing with their number.
        coefficient: the Lipschitz constant c < 1 that is never exceeded; None leaves the map as it is.
        norm: the norm it is never exceeded in. "token" has by far the tightest bound.
        max_tokens: longest sequence allowed; needed by learned biases and by norm="2" with a causal mask.
        context_features: width of a context that is added to the projected tokens.

    References:
        | The Lipschitz Constant of Self-Attention (Kim, Papamakarios, Mnih, 2021)

    Example:
        >>> attention = L2SelfAttention(features=8, num_heads=2, coefficient=0.9)
        >>> attention(torch.randn(3, 5, 8)).shape
        torch.Size([3, 5, 8])
        >>> attention.lipschitz_bound(num_tokens=5).item() <= 0.9
        True
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        head_features: int | None = None,
        causal: bool = False,
        position_bias: Literal["alibi", "learned"] | None = None,
        radius: float | Literal["learned"] | None = None,
        coefficient: float | None = 0.97,
        norm: Norm = "token",
        max_tokens: int | None = None,
        context_features: int | None = None,
    ) -> None:
        super().__init__(
            features,
            num_heads,
            head_features=head_features,
            causal=causal,
            position_bias=position_bias,
            max_tokens=max_tokens,
            coefficient=coefficient,
            context_features=context_features,
        )
        check_norm(norm)
        if norm == "2" and causal and max_tokens is None:
            raise ValueError("norm='2' with causal=True needs max_tokens: its bound grows with the longest length.")
        self.norm = norm
        self._norms = Remembered(single_head_norms if num_heads == 1 else head_norms)
        inner = num_heads * self.head_features
        self.W = nn.Parameter(torch.randn(features, inner) / math.sqrt(features))
        self.B = nn.Parameter(torch.randn(inner, features) / math.sqrt(inner))
        self.log_radius: nn.Parameter | None = None
        self.fixed_radius: float | None = None
        if radius == "learned":
            self.log_radius = nn.Parameter(torch.full((num_heads,), 0.25 * math.log(self.head_features)))
        elif radius is not None:
            if isinstance(radius, str | bool) or not 0 < radius < math.inf:
                raise ValueError(f"radius must be None, a positive number or 'learned'; got radius={radius!r}.")
            self.fixed_radius = float(radius)

    @classmethod
    def from_paper_weights(
        cls, w_q: Tensor, w_v: Tensor, w_o: Tensor, *, coefficient: float | None = None, **options: Any
    ) -> L2SelfAttention:
        r"""The attention of the paper's weights: w_q and w_v [H, D, d], w_o [H, d, D].

        .. math:: f(X) = \sum_h P^h X A_h W^{V,h} W^{O,h}, \qquad A_h = W^{Q,h} W^{Q,h,T} / \sqrt d

        By default it is left as it is; `options` and `coefficient` are those of the class.
        """
        if w_q.ndim != 3 or w_v.ndim != 3 or w_v.shape[:2] != w_q.shape[:2]:
            raise ValueError(
                f"w_q and w_v must have shape [heads, features, width]; got {list(w_q.shape)} and {list(w_v.shape)}."
            )
        heads, features, width = w_q.shape
        if w_o.shape != (heads, w_v.shape[-1], features):
            raise ValueError(
                f"w_o must have shape [heads, width, features] = {[heads, w_v.shape[-1], features]}; "
                f"got {list(w_o.shape)}."
            )
        for name, weight in (("w_q", w_q), ("w_v", w_v), ("w_o", w_o)):
            check_finite(name, weight)
        self = cls(features, heads, head_features=width, coefficient=coefficient, **options)
        self.to(w_q)
        with torch.no_grad():
            self.W.copy_(w_q.movedim(0, 1).flatten(1))
            self.B.copy_((w_q.mT @ w_v @ w_o / math.sqrt(width)).flatten(0, 1))
        return self

    @property
    def radius(self) -> Tensor | None:
        """The radius R of each head, [H, 1, 1], or None."""
        if self.log_radius is not None:
            return self.log_radius.clamp(-30, 30).exp()[:, None, None]
        if self.fixed_radius is not None:
            return self.W.new_full((self.num_heads, 1, 1), self.fixed_radius)
        return None

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        return self._join(self._average(x, mask, context))

    def scaled(self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor) -> Tensor:
        m = self._average(x, mask, context)
        if scale.numel() == 1:  # there are fewer weights than tokens
            return _join(m, self.B * scale)
        return self._join(m) * scale.unsqueeze(-1)

    def free_linearize(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Push]:
        y = self._heads(x, mask, context)
        bias = self._bias(x.shape[1], mask, x.dtype)
        m, attention_push = l2_attention_linearize(self._ball(y), bias, causal=self.causal)

        def push(v: Tensor) -> Tensor:
            dy = self._split(v @ self.W)
            dz = dy if self.radius is None else into_ball_jvp(y, dy, self.radius)
            return self._join(attention_push(dz))

        return self._join(m), push

    def free_diagonal(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, TokenBlocks]:
        return self.diagonal_with(self.W, self.B, x, mask, context)

    def free_jacobian(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.jacobian_with(self.W, self.B, x, mask, context)

    def scaled_jacobian(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        if scale.numel() == 1:  # there are fewer weights than entries
            return self.jacobian_with(self.W, self.B * scale, x, mask, context)
        return super().scaled_jacobian(x, mask, context, scale)

    def scaled_logabsdet(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        if scale.numel() == 1 and not self.causal:
            return self.logabsdet_with(self.W, self.B * scale, x, mask, context)
        return super().scaled_logabsdet(x, mask, context, scale)

    # Between linear maps, x = V w before it and U f(x) after it, attention has the derivatives of one with other
    # matrices, W^T V for W^T and B U^T for B. These are for whoever knows such matrices; the weights P are those of x.

    def diagonal_with(
        self, W: Tensor, B: Tensor, x: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, TokenBlocks]:
        """The averages times B, and the diagonal blocks of the Jacobian with W and B in place of this module's."""
        y = self._heads(x, mask, context)
        m, C = diagonal_blocks(self._ball(y), self._bias(x.shape[1], mask, x.dtype), causal=self.causal)
        if self.radius is not None:
            C = C @ into_ball_jacobian(y, self.radius)
        return _join(m, B), HeadBlocks(C, W, B, x.new_ones(1))

    def jacobian_with(
        self, W: Tensor, B: Tensor, x: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same with the whole Jacobian."""
        return heads_jacobian(*self._factors(W, B, x, mask, context), causal=self.causal)

    def logabsdet_with(
        self, W: Tensor, B: Tensor, x: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same with log|det(I + J)| of that, without a causal mask."""
        if self.radius is not None:
            return attention_logabsdet(*self._factors(W, B, x, mask, context))
        y, bias = self._projected(x, mask, context), self._bias(x.shape[1], mask, x.dtype)
        return attention_logabsdet(y, B, W, bias, num_heads=self.num_heads)

    def _factors(
        self, W: Tensor, B: Tensor, x: Tensor, mask: Tensor | None, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the Jacobian is made of: the tokens z of each head, B, dz / dx, and the bias."""
        y = self._heads(x, mask, context)
        heads = (self.num_heads, self.head_features)
        R = W.mT.unflatten(0, heads)
        if self.radius is not None:
            R = into_ball_jacobian(y, self.radius) @ R.unsqueeze(1)
        return self._ball(y), B.unflatten(0, heads), R, self._bias(x.shape[1], mask, x.dtype)

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        stretch = self._stretch(num_tokens, mask)
        W = self.W.unflatten(1, (self.num_heads, -1)).movedim(1, 0)
        B = self.B.unflatten(0, (self.num_heads, -1))
        R = self.radius
        ball = None if R is None else ball_stretch(R[..., 0].square() / math.sqrt(self.head_features))
        if norm == "inf":
            return infinity_bound(W, B, stretch, ball=ball)
        # An input of length 1 has tokens of length at most 1: in norm "2" its rows move no further than in this one.
        return token_bound(W, B, stretch, ball=ball, norms=self._norms)

    def whole_bound(self, rows: Tensor, norm: Norm) -> Tensor:
        return torch.linalg.vector_norm(rows, dim=-1) if norm == "2" else rows.amax(-1)

    def spread(self, num_tokens: int, mask: Tensor | None) -> Tensor | float:
        if self.norm != "2":
            return 1.0
        if self.causal and self.max_tokens is not None:  # no row may know how many there are
            return math.sqrt(self.max_tokens)
        return math.sqrt(num_tokens) if mask is None else mask.sum(-1, keepdim=True).clamp_min(1).to(self.W).sqrt()

    def rounding(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor, *, sharp: bool = False
    ) -> Tensor:
        r"""Logits lose digits by the squares of the tokens.

        With r the distance of the tokens from their centre these are :math:`r^2 / s`, and the mean changes by no more
        than that times :math:`\sum_j P_{ij} |z_j - m_i| \le \min(2 r, \sqrt{s W_0(S_i / e)})`, see `attention_stretch`.
        """
        near, _ = centred(self._ball(self._heads(x, mask, context)), self.causal)
        r = token_norm(near).unsqueeze(-1)
        s = math.sqrt(self.head_features)
        apart = torch.minimum(2 * r, (s / 4 * (self._stretch(x.shape[1], mask) - 1)).sqrt())
        if sharp:
            P = attention_weights(near, self._bias(x.shape[1], mask, x.dtype), causal=self.causal)
            deviation = (P * torch.cdist(P @ near, near).square()).sum(-1).sqrt()
            is_known = torch.finfo(x.dtype).eps * r.square() < s / 16  # to within a factor of two
            apart = torch.where(is_known, torch.minimum(apart, 2 * deviation), apart)
        B = torch.linalg.vector_norm(self.B.unflatten(0, (self.num_heads, -1)), dim=(1, 2)).unsqueeze(-1)
        return self.whole_bound((B * r.square() / s * apart).sum(1) * scale, self.norm)

    def _heads(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        return self._split(self._projected(x, mask, context))

    def _projected(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        """The tokens of all heads, side by side."""
        y = x @ self.W
        if context is not None and self.U is not None:
            y = y + context @ self.U
        if mask is not None:  # padding is hidden, but must not lie far off, where it would cost the others digits
            first = mask.int().argmax(-1)[:, None, None]
            y = torch.where(mask.unsqueeze(-1), y, y.take_along_dim(first, 1))
        return y

    def _ball(self, y: Tensor) -> Tensor:
        return y if self.radius is None else into_ball(y, self.radius)

    def _average(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        z = self._ball(self._heads(x, mask, context))
        return l2_attention(z, self._bias(x.shape[1], mask, x.dtype), causal=self.causal)

    def _join(self, m: Tensor) -> Tensor:
        return _join(m, self.B)

    def _stretch(self, num_tokens: int, mask: Tensor | None) -> Tensor:
        if self.position_bias is not None:
            bias = self.position_bias(num_tokens).to(self.W.dtype)
            return attention_stretch(visible_weight(bias, causal=self.causal, mask=mask))
        if mask is not None:
            seen = mask.cumsum(-1) if self.causal else mask.sum(-1, keepdim=True).expand(mask.shape)
            return attention_stretch((seen - 1).clamp_min(0).to(self.W.dtype).log()).unsqueeze(1)
        if torch.compiler.is_compiling():  # which knows lengths by name only
            start = 0 if self.causal else num_tokens - 1
            others = torch.arange(start, num_tokens, dtype=self.W.dtype, device=self.W.device)
            return attention_stretch(others.log()).unsqueeze(0)
        if self.causal:
            return self.W.new_tensor([counted_stretches(num_tokens)])
        return self.W.new_full((1, 1), counted_stretch(num_tokens - 1))


class DotProductSelfAttention(_SelfAttention):
    r"""Multi-head self-attention by dot products, as in Transformers: the baseline. It has no Lipschitz bound.

    .. math:: f(X)_i = \sum_h \sum_j \operatorname{softmax}_j(b^h_{ij} + q_i^h \cdot k_j^h / \sqrt d)\, W_h^{O,T} v_j^h
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        head_features: int | None = None,
        causal: bool = False,
        position_bias: Literal["alibi", "learned"] | None = None,
        max_tokens: int | None = None,
        context_features: int | None = None,
    ) -> None:
        super().__init__(
            features,
            num_heads,
            head_features=head_features,
            causal=causal,
            position_bias=position_bias,
            max_tokens=max_tokens,
            coefficient=None,
            context_features=context_features,
        )
        inner = num_heads * self.head_features
        self.in_projection = nn.Parameter(torch.randn(features, 3 * inner) / math.sqrt(features))
        self.out_projection = nn.Parameter(torch.randn(inner, features) / math.sqrt(inner))

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        q, k, v = (x @ self.in_projection).chunk(3, -1)
        if context is not None and self.U is not None:
            q = q + context @ self.U
        bias = self._bias(x.shape[1], mask, x.dtype)
        q, k, v = map(self._split, (q / math.sqrt(self.head_features), k, v))
        m = dot_product_attention(q, k, v, bias, causal=self.causal)
        return _join(m, self.out_projection)

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        raise ValueError(
            "dot-product attention has no Lipschitz bound: its Jacobian grows with the variance of the tokens, "
            "which nothing limits. Use L2SelfAttention."
        )
