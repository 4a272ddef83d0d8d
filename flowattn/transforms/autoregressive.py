"""Autoregressive attention: every token is scaled and shifted by a function of those before it."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flowattn.checks import (
    check_choice,
    check_context,
    check_finite,
    check_positive,
    check_positive_number,
    check_tokens,
)
from flowattn.context import keep_padding, per_token, split_context, sum_over_tokens, zero_padding
from flowattn.contractions.base import full_precision
from flowattn.transforms.base import TwoWayTransform
from flowattn.transforms.parts import free_attention

MAX_MIXING = 2.0  # of an entry of L; without a limit, some weights would leave float32 no digits for the inverse


class AutoregressiveAttention(TwoWayTransform):
    r"""Maps every token by the affine function that attention over the tokens before it says.

    .. math:: y_t = L_t \bigl(e^{s_t} \odot x_t\bigr) + m_t, \qquad
        (L_t, s_t, m_t) = \theta(x_1, \dots, x_{t-1}), \qquad \log|\det J| = \sum_t \sum_k s_{t,k}

    L is lower triangular with ones on its diagonal, or the identity with ``kind="affine"``. Over a normal distribution,
    one triangular transform is the model in which each token is normal given those before it, with any mean and any
    covariance as functions of them. Forward, all tokens are mapped at once; the inverse goes token by token. Nothing
    needs a Lipschitz bound, and it starts as the identity.

    :math:`\theta` is a linear function of the last `window` tokens plus a network of them and of what causal attention
    finds further back. Where a mask leaves out tokens, those before are the real ones before.

    Args:
        features: width of a token.
        num_heads: number of heads of the attention, which must divide `hidden`.
        hidden: width of the attention and of the network after it.
        window: how many tokens before it a token is compared with directly.
        kind: "affine" or "triangular".
        attention: "l2" or "dot-product".
        position_bias: None, "alibi" or "learned" (needs `max_tokens`).
        max_tokens: longest sequence allowed.
        max_log_scale: the largest s.
        context_features: width of a context that the network takes as further inputs.

    References:
        | Masked Autoregressive Flow for Density Estimation (Papamakarios, Pavlakou, Murray, 2017)

    Cost: O(N^2 hidden + N hidden^2) forward, N times that for the inverse.

    Example:
        >>> transform = AutoregressiveAttention(features=3, num_heads=2, hidden=16)
        >>> outputs, logabsdet = transform(torch.randn(2, 7, 3))
        >>> outputs.shape, logabsdet.shape
        (torch.Size([2, 7, 3]), torch.Size([2]))
    """

    places: Tensor

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        hidden: int,
        window: int = 4,
        kind: Literal["affine", "triangular"] = "triangular",
        attention: Literal["l2", "dot-product"] = "l2",
        position_bias: Literal["alibi", "learned"] | None = "alibi",
        max_tokens: int | None = None,
        max_log_scale: float = 5.0,
        context_features: int | None = None,
    ) -> None:
        super().__init__()
        check_positive(features=features, num_heads=num_heads, hidden=hidden, window=window)
        check_choice("kind", kind, ("affine", "triangular"))
        if context_features is not None:
            check_positive(context_features=context_features)
        check_positive_number(max_log_scale=max_log_scale)
        self.features = features
        self.window = window
        self.kind = kind
        self.max_log_scale = float(max_log_scale)
        self.context_features = context_features
        width = window * (features + 1) + (context_features or 0)
        below = torch.ones(features, features).tril(-1).flatten().nonzero().squeeze(1)
        self.num_mixing = len(below) if kind == "triangular" else 0
        self.register_buffer("places", F.one_hot(below, features**2).to(torch.get_default_dtype()), persistent=False)
        self.lift = nn.Linear(width, hidden)
        self.attention = free_attention(
            attention, hidden, num_heads, causal=True, position_bias=position_bias, max_tokens=max_tokens
        )
        self.network = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden + width, 2 * features + self.num_mixing)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    # In bfloat16 the two directions would not see the same tokens.
    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tokens("inputs", inputs, self.features)
        features, mask = split_context(context, inputs)
        if self.context_features is None:
            features = None
        check_context(features, inputs, self.context_features)
        x = zero_padding(inputs, mask)
        check_finite("inputs", x)  # attention would spread one NaN over all tokens after it
        features = x[..., :0] if features is None else per_token(features, inputs)
        if mask is None:
            outputs, log_scale = self._run(x, features, None, inverse)
        else:
            # Real tokens move to the front: then causal attention never sees padding, wherever it was.
            order = (~mask).int().argsort(dim=1, stable=True).unsqueeze(-1)
            x, features = x.take_along_dim(order, 1), features.take_along_dim(order, 1)
            outputs, log_scale = self._run(x, features, mask.take_along_dim(order[..., 0], 1), inverse)
            back = order.argsort(dim=1)
            outputs = keep_padding(outputs.take_along_dim(back, 1), inputs, mask)
            log_scale = log_scale.take_along_dim(back, 1)
        return outputs, sum_over_tokens(-log_scale if inverse else log_scale, mask)

    def _run(self, x: Tensor, features: Tensor, mask: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        """The outputs, and the log-scales of the forward direction."""
        if not inverse:
            log_scale, shift, L = self._conditions(x, features)
            y = log_scale.exp() * x
            return (y if L is None else (L * y.unsqueeze(-2)).sum(-1)) + shift, log_scale
        known = x[:, :0]
        log_scales = []
        for t, y in enumerate(x.split(1, 1)):
            # What is asked for token t depends on no token from t on: a zero keeps its place.
            log_scale, shift, L = self._conditions(F.pad(known, (0, 0, 0, 1)), features[:, : t + 1])
            token = y - shift[:, -1:]
            if L is not None:
                token = token.unsqueeze(-1)
                token = torch.linalg.solve_triangular(L[:, -1:], token, upper=False, unitriangular=True).squeeze(-1)
            log_scales.append(log_scale[:, -1:])
            token = token * torch.exp(-log_scales[-1])
            known = torch.cat([known, zero_padding(token, None if mask is None else mask[:, t : t + 1])], 1)
        return known, torch.cat(log_scales, 1)

    def _conditions(self, x: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """s, m and L of every token, from those before it."""
        num_tokens = x.shape[1]
        present = F.pad(x, (0, 1), value=1.0)  # tells a token of zeros from none at all
        before = [F.pad(present, (0, 0, lag, 0))[:, :num_tokens] for lag in range(1, self.window + 1)]
        u = torch.cat([*before, features], -1)
        h = self.lift(u)
        h = self.network(h + self.attention(h))
        parameters = self.out(torch.cat([h, u], -1))
        log_scale, shift, mixing = parameters.split([self.features, self.features, self.num_mixing], -1)
        log_scale = self.max_log_scale * torch.tanh(log_scale / self.max_log_scale)
        if self.kind == "affine":
            return log_scale, shift, None
        mixing = MAX_MIXING * torch.tanh(mixing / MAX_MIXING)
        below = (mixing @ self.places).unflatten(-1, (self.features, -1))
        return log_scale, shift, below + torch.eye(self.features, dtype=x.dtype, device=x.device)

    def extra_repr(self) -> str:
        return f"features={self.features}, window={self.window}, kind={self.kind!r}"
