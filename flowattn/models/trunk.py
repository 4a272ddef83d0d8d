"""Trunks of a character model: layers of attention and feed-forward, free ones and invertible ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from nflows.transforms import LULinear
from nflows.transforms.base import Transform
from torch import Tensor, nn

from flowattn.checks import check_choice
from flowattn.contractions import L2SelfAttention
from flowattn.inverse import Solver
from flowattn.models.attention import extend_contraction, split_gains
from flowattn.transforms import (
    Chain,
    FeedForwardCoupling,
    InvertibleFeedForward,
    ResidualTransform,
    TokenActNorm,
    Tokenwise,
)
from flowattn.transforms.networks import FeedForwardNetwork

#: What attention keeps of the tokens so far, layer by layer; None before the first token.
Kept = list[Any]


class ResidualTrunk(nn.Module):
    r"""Layers :math:`x \leftarrow x + f(n(x)),\; x \leftarrow x + g(n(x))`, with n a LayerNorm or nothing.

    Args:
        features: width of a token.
        hidden: width inside the feed-forward branches g.
        branches: the attention branches f, one per layer.
        layer_norm: whether branches see normalised tokens.
    """

    def __init__(self, features: int, hidden: int, branches: Sequence[nn.Module], *, layer_norm: bool) -> None:
        super().__init__()
        self.attention = nn.ModuleList(branches)
        self.feed_forward = nn.ModuleList(
            FeedForwardNetwork(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)) for _ in branches
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(features) if layer_norm else nn.Identity() for _ in range(2 * len(branches) + 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm, rest in self._layers():
            x = rest(x + attention(norm(x)))
        return self.norms[-1](x)

    def extend(self, x: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        following = []
        for (attention, norm, rest), before in zip(self._layers(), kept or [None] * len(self.attention), strict=True):
            change, now = attention.extend(norm(x), before)  # type: ignore[operator]
            following.append(now)
            x = rest(x + change)
        return self.norms[-1](x), following

    def _layers(self) -> list[tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]]:
        norms = list(self.norms)[:-1]
        triples = zip(self.attention, norms[::2], norms[1::2], self.feed_forward, strict=True)
        return [(f, one, lambda x, two=two, g=g: x + g(two(x))) for f, one, two, g in triples]  # type: ignore[misc]


class SlowLULinear(LULinear):
    r"""A matrix whose triangular factors are a tenth of the way from the identity to what is learned.

    .. math:: M = \bigl(I + s (L - I)\bigr) \bigl(I + s (U - I)\bigr), \qquad s = 0.1

    Adam moves every number by about the learning rate, and all numbers of a row at once: at a rate that suits the
    other weights L and U change by as much as I within some ten steps, and two of them surround every attention. Here
    M changes s times as fast. Its pivots stay above 1 - s, so that it is far from singular, too.
    """

    s = 0.1

    @property
    def upper_diag(self) -> Tensor:
        return 1 + self.s * (super().upper_diag - 1)

    def _create_lower_upper(self) -> tuple[Tensor, Tensor]:
        lower, upper = super()._create_lower_upper()
        lower, upper = self.s * lower.tril(-1), self.s * upper.triu(1)
        return lower + torch.eye(self.features).to(lower), upper + torch.diag(self.upper_diag)


class InvertibleTrunk(Chain):
    r"""Layers of invertible transforms, for tokens that each see themselves and those before them.

    A layer is a linear map, contractive attention, a linear map again, and the feed-forward part. The two maps
    choose the norm that attention is a contraction in: with M the first and its inverse the second,

    .. math:: x \mapsto \bigl(xM + g(xM)\bigr) M^{-1} = x + g(xM) M^{-1},

    whose Lipschitz bound holds in the norm :math:`|xM|`, as told in `flowattn.models.attention`. They start so, with
    M diagonal, and are free afterwards: each is a scale and a shift of every feature, and a matrix if asked for.

    Args:
        features: width of a token.
        hidden: width inside the feed-forward parts.
        attention: the contractions, one per layer.
        feed_forward: "coupling" over the two halves of the features, which needs no bound, or "contractive".
        between: "actnorm" (scales and shifts), "linear" (a matrix, too), or "none".
        start: the weight of the second half of the features in the norm of attention, at the start.
        coefficient: Lipschitz constant of contractive feed-forward parts.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        attention: Sequence[L2SelfAttention],
        *,
        feed_forward: Literal["coupling", "contractive"],
        between: Literal["linear", "actnorm", "none"],
        start: float,
        coefficient: float,
    ) -> None:
        check_choice("feed_forward", feed_forward, ("coupling", "contractive"))
        check_choice("between", between, ("linear", "actnorm", "none"))
        gains = split_gains(features, start)
        transforms: list[Transform] = []
        for f in attention:
            transforms += _around(between, gains)
            transforms.append(ResidualTransform(f))
            transforms += reversed(_around(between, 1 / gains))
            if feed_forward == "coupling":
                transforms.append(_coupling(features, hidden))
            else:
                transforms.append(InvertibleFeedForward(features, hidden, coefficient=coefficient))
        super().__init__(transforms)

    def map(self, x: Tensor) -> Tensor:
        """The outputs alone: a language model has no use for log-determinants."""
        for part in self._parts():
            x = _map(part, x)
        return x

    def extend(self, x: Tensor, kept: Kept) -> tuple[Tensor, Kept]:
        """`map` of new tokens, given what was kept of those before."""
        before, following = iter(kept), []
        for part in self._parts():
            if _is_attention(part[0]):
                change, now = extend_contraction(part[0].contraction, x, next(before, None))
                following.append(now)
                x = x + change
            else:
                x = _map(part, x)
        return x, following

    def _parts(self) -> list[list[Transform]]:
        """The transforms in order, with a matrix and the scales next to it together."""
        parts: list[list[Transform]] = []
        for transform in self._transforms:
            affine = isinstance(transform, Tokenwise | TokenActNorm)
            if affine and parts and isinstance(parts[-1][-1], Tokenwise | TokenActNorm):
                parts[-1].append(transform)
            else:
                parts.append([transform])
        return parts

    @torch.no_grad()
    def unmap(self, y: Tensor, solver: Solver) -> tuple[Tensor, Tensor]:
        """The inputs of `map`, and the largest certified error of any block's inverse, for each sequence."""
        worst = y.new_zeros(len(y))
        for transform in reversed(self._transforms):
            if isinstance(transform, ResidualTransform):
                y, error, _ = solver.solve(transform.contraction, y)
                worst = torch.maximum(worst, error)
            elif isinstance(transform, Tokenwise):
                weight, bias = transform.transform.weight(), transform.transform.bias
                y = torch.linalg.solve(weight, (y - bias).mT).mT
            else:
                y = transform.inverse(y)[0]
        return y, worst


def _is_attention(transform: Transform) -> bool:
    return isinstance(transform, ResidualTransform) and isinstance(transform.contraction, L2SelfAttention)


def _map(part: list[Transform], x: Tensor) -> Tensor:
    first = part[0]
    if isinstance(first, ResidualTransform):
        return x + first.contraction(x)
    if not isinstance(first, Tokenwise | TokenActNorm):
        return first(x)[0]
    if len(part) == 1 and isinstance(first, TokenActNorm):
        return torch.addcmul(first.shift, x, first.log_scale.exp())
    # One product with the tokens, which are many, in place of one with each factor.
    weight, bias = _affine(first)
    for transform in part[1:]:
        following, shift = _affine(transform)
        weight, bias = following @ weight, following @ bias + shift
    return nn.functional.linear(x, weight, bias)


def _affine(transform: Transform) -> tuple[Tensor, Tensor]:
    """The matrix and the shift of a linear map of tokens."""
    if isinstance(transform, TokenActNorm):
        return torch.diag(transform.log_scale.exp()), transform.shift
    return transform.transform.weight(), transform.transform.bias


def _coupling(features: int, hidden: int) -> FeedForwardCoupling:
    """A coupling that does something from the start, as feed-forward branches do: a text needs no identity."""
    coupling = FeedForwardCoupling(features, hidden, activation=nn.GELU)
    for network in (coupling.of_first, coupling.of_second):
        nn.init.normal_(network[-1].weight, std=0.5 / hidden**0.5)  # type: ignore[arg-type]
    return coupling


def _around(between: str, gains: Tensor) -> list[Transform]:
    """What comes before attention, or after it in reverse.

    The gains have a layer of their own, next to attention: on the diagonal of a triangular matrix, small ones would
    soon be small beside what is learned off the diagonal, and the matrix close to singular.
    """
    if between == "none":
        return []
    norm = TokenActNorm(len(gains))
    with torch.no_grad():
        norm.log_scale.copy_(gains.log())
        norm.initialized.fill_(True)
    return [norm] if between == "actnorm" else [Tokenwise(SlowLULinear(len(gains)), use_context=False), norm]
