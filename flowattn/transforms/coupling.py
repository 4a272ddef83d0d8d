"""Couplings: half of the features is transformed by any function of the other half, without a Lipschitz bound."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
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
from flowattn.transforms.monotone import affine, spline
from flowattn.transforms.networks import FeedForwardNetwork
from flowattn.transforms.parts import free_attention


class _Coupling(TwoWayTransform):
    """What couplings share: they read the context, leave padding as it is, and start as the identity.

    Features are passed on if `context_features` says how many; otherwise they are meant for other transforms.
    """

    def __init__(self, features: int, context_features: int | None, max_log_scale: float) -> None:
        super().__init__()
        check_positive(features=features)
        if features < 2:
            raise ValueError(f"features must be at least 2, one to transform and one to go by; got {features}.")
        if context_features is not None:
            check_positive(context_features=context_features)
        check_positive_number(max_log_scale=max_log_scale)
        self.features = features
        self.context_features = context_features
        self.max_log_scale = max_log_scale

    # In bfloat16 the two directions would not see the same halves, and the inverse would be off in the third digit.
    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tokens("inputs", inputs, self.features)
        features, mask = split_context(context, inputs)
        if self.context_features is None:
            features = None
        check_context(features, inputs, self.context_features)
        if features is not None:
            features = per_token(features, inputs)
        outputs, log_slopes = self._couple(zero_padding(inputs, mask), features, mask, inverse)
        return keep_padding(outputs, inputs, mask), sum_over_tokens(log_slopes, mask)

    def _couple(self, x: Tensor, features: Tensor | None, mask: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        """The outputs, and the logarithms of the diagonal of the triangular Jacobian."""
        raise NotImplementedError


class FeedForwardCoupling(_Coupling):
    r"""A feed-forward layer that is invertible whatever its weights, on the two halves of each token.

    .. math:: y_1 = x_1 + g(x_2), \qquad y_2 = x_2 + h(y_1), \qquad \log|\det J| = 0

    With ``kind="affine"`` a half is also scaled, :math:`y_1 = e^{s(x_2)} x_1 + g(x_2)` with
    :math:`|s| < s_{max}`, and the log-determinant is the sum of all s. It starts as the identity.

    Args:
        features: width of a token, at least 2; of an odd number the first half is the larger one.
        hidden: width of the layers of g and h.
        kind: "additive" or "affine".
        num_layers: number of matrices in g and in h.
        activation: makes the activation between them.
        max_log_scale: the largest s of the affine kind.
        context_features: width of a context that g and h take as further inputs.

    References:
        | NICE: Non-linear Independent Components Estimation (Dinh, Krueger, Bengio, 2015)
        | Density Estimation Using Real NVP (Dinh, Sohl-Dickstein, Bengio, 2017)

    Example:
        >>> outputs, logabsdet = FeedForwardCoupling(features=5, hidden=16)(torch.randn(2, 7, 5))
        >>> outputs.shape, logabsdet
        (torch.Size([2, 7, 5]), tensor([0., 0.]))
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        kind: Literal["additive", "affine"] = "additive",
        num_layers: int = 2,
        activation: Callable[[], nn.Module] = nn.SiLU,
        max_log_scale: float = 2.0,
        context_features: int | None = None,
    ) -> None:
        super().__init__(features, context_features, max_log_scale)
        check_positive(hidden=hidden, num_layers=num_layers)
        check_choice("kind", kind, ("additive", "affine"))
        self.kind = kind
        self.widths = [features - features // 2, features // 2]
        per_feature = 1 if kind == "additive" else 2
        one, two = self.widths
        between = [hidden] * (num_layers - 1)
        self.of_second = _mlp([two + (context_features or 0), *between, one * per_feature], activation)
        self.of_first = _mlp([one + (context_features or 0), *between, two * per_feature], activation)

    def _couple(self, x: Tensor, features: Tensor | None, mask: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        one, two = x.split(self.widths, -1)
        if inverse:
            two, slopes_two = self._update(two, self.of_first(_join(one, features)), inverse)
            one, slopes_one = self._update(one, self.of_second(_join(two, features)), inverse)
        else:
            one, slopes_one = self._update(one, self.of_second(_join(two, features)), inverse)
            two, slopes_two = self._update(two, self.of_first(_join(one, features)), inverse)
        return torch.cat([one, two], -1), torch.cat([slopes_one, slopes_two], -1)

    def _update(self, x: Tensor, parameters: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        if self.kind == "additive":
            return (x - parameters if inverse else x + parameters), torch.zeros_like(x)
        return affine(x, parameters.unflatten(-1, (-1, 2)), max_log_scale=self.max_log_scale, inverse=inverse)

    def extra_repr(self) -> str:
        return f"features={self.features}, kind={self.kind!r}"


class AttentionCoupling(_Coupling):
    r"""Transforms some features of every token, as attention over the other features of all tokens says.

    .. math:: y_{i,k} = \begin{cases} x_{i,k} & k \notin M \\
        \tau\bigl(x_{i,k};\, \theta_{i,k}(X_{\bar M})\bigr) & k \in M \end{cases}, \qquad
        \log|\det J| = \sum_i \sum_{k \in M} \log \tau'

    The features outside M are known in both directions, so attention may see all tokens, needs no bound, and both
    directions cost one pass. :math:`\tau` is affine, or a monotonic rational-quadratic spline on
    [-tail_bound, tail_bound] and the identity beyond. It starts as the identity.

    Args:
        features: width of a token, at least 2.
        num_heads: number of heads of the attention, which must divide `hidden`.
        mask: one bool per feature, True in M; every second feature unless given. Give its complement to the next one.
        attention: "l2" or "dot-product".
        kind: "affine" or "rational-quadratic".
        hidden: width of the attention and of the network after it.
        num_bins: number of bins of a spline.
        tail_bound: where a spline ends.
        causal: whether a token goes only by itself and those before it.
        position_bias: None, "alibi" or "learned" (needs `max_tokens`).
        max_tokens: longest sequence allowed.
        max_log_scale: the largest log-scale of the affine kind.
        context_features: width of a context that the attention takes as further features.

    References:
        | Neural Spline Flows (Durkan, Bekasov, Murray, Papamakarios, 2019)

    Example:
        >>> coupling = AttentionCoupling(features=4, num_heads=2, hidden=16, kind="rational-quadratic")
        >>> outputs, logabsdet = coupling(torch.randn(3, 7, 4))
        >>> outputs.shape, logabsdet.shape
        (torch.Size([3, 7, 4]), torch.Size([3]))
    """

    order: Tensor

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        hidden: int,
        mask: Sequence[bool] | Tensor | None = None,
        attention: Literal["l2", "dot-product"] = "l2",
        kind: Literal["affine", "rational-quadratic"] = "affine",
        num_bins: int = 8,
        tail_bound: float = 5.0,
        causal: bool = False,
        position_bias: Literal["alibi", "learned"] | None = None,
        max_tokens: int | None = None,
        max_log_scale: float = 2.0,
        context_features: int | None = None,
    ) -> None:
        super().__init__(features, context_features, max_log_scale)
        check_positive(num_heads=num_heads, hidden=hidden, num_bins=num_bins)
        check_choice("kind", kind, ("affine", "rational-quadratic"))
        check_positive_number(tail_bound=tail_bound)
        moved = _feature_mask(mask, features)
        self.kind = kind
        self.tail_bound = float(tail_bound)
        self.widths = [int((~moved).sum()), int(moved.sum())]
        # Part of the state: a mask that was drawn at random must come back with the weights that belong to it.
        self.register_buffer("order", moved.int().argsort(stable=True))
        self.lift = nn.Linear(self.widths[0] + (context_features or 0), hidden)
        self.attention = free_attention(
            attention, hidden, num_heads, causal=causal, position_bias=position_bias, max_tokens=max_tokens
        )
        per_feature = 2 if kind == "affine" else 3 * num_bins - 1
        self.network = _mlp([hidden, hidden, self.widths[1] * per_feature], nn.SiLU)

    def _couple(self, x: Tensor, features: Tensor | None, mask: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_finite("inputs", x)  # attention would spread one NaN over the whole sequence
        given, moved = x.index_select(-1, self.order).split(self.widths, -1)
        h = self.lift(_join(given, features))
        h = h + self.attention(h, mask)
        parameters = self.network(h).unflatten(-1, (self.widths[1], -1))
        if self.kind == "affine":
            moved, log_slopes = affine(moved, parameters, max_log_scale=self.max_log_scale, inverse=inverse)
        else:
            moved, log_slopes = spline(moved, parameters, tail_bound=self.tail_bound, inverse=inverse)
        return torch.cat([given, moved], -1).index_select(-1, self.order.argsort()), log_slopes

    def extra_repr(self) -> str:
        return f"features={self.features}, kind={self.kind!r}, order={self.order.tolist()}"


def _mlp(widths: list[int], activation: Callable[[], nn.Module]) -> FeedForwardNetwork:
    """A network that gives zeros until it is trained."""
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), activation()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return FeedForwardNetwork(*layers[:-1])


def _join(x: Tensor, features: Tensor | None) -> Tensor:
    return x if features is None else torch.cat([x, features], -1)


def _feature_mask(mask: Sequence[bool] | Tensor | None, features: int) -> Tensor:
    if mask is None:
        return torch.arange(features) % 2 == 1
    mask = torch.as_tensor(mask)
    if mask.dtype != torch.bool or mask.shape != (features,):
        raise ValueError(
            f"mask must hold one bool for each of features={features}; got {mask.dtype} of shape {list(mask.shape)}."
        )
    if mask.all() or not mask.any():
        raise ValueError(f"mask must be True at some features and False at others; got {mask.tolist()}.")
    return mask.cpu()
