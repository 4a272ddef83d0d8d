"""A ready-made flow of sequences and sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nflows.flows import Flow
from nflows.transforms import LULinear

from flowattn.checks import check_choice, check_positive
from flowattn.distributions import BatchedSampling, SequenceNormal
from flowattn.flows.features import NoFeatures
from flowattn.logdet import LogDet
from flowattn.transforms import (
    Chain,
    FeedForwardCoupling,
    InvertibleAttention,
    InvertibleFeedForward,
    TokenActNorm,
    Tokenwise,
)

__all__ = ["AttentionFlow"]


class AttentionFlow(BatchedSampling, Flow):
    """A density of sequences or sets of tokens: blocks of invertible attention over a normal distribution.

    A block is `TokenActNorm`, a linear map of each token (LU), `InvertibleAttention`, and a feed-forward part. Without
    causal mask and position bias the density does not depend on the order of the tokens. Sequences may be shorter than
    N, by the tensors given or by a mask in the context; see `flowattn.context`.

    Args:
        event_shape: largest number N of tokens, and their width D.
        depth: number of blocks.
        num_heads: heads of each attention. Unless given 4, or as many below as divide the width of a token, or of a
            lifted one, where head_features does not say how wide they are.
        hidden: width inside the feed-forward parts.
        lift: width that narrow tokens are lifted to inside attention, or None.
        head_features: width of a head; that of a token, or of a lifted one, over num_heads unless given.
        feed_forward: "contractive" (`InvertibleFeedForward`), "coupling" (`FeedForwardCoupling`), or "both". Unless
            given both, but for tokens of one feature, which no coupling can split.
        causal: whether a token sees only itself and those before it; the log-determinant is then exact at any length.
        position_bias: None, "alibi" or "learned".
        radius: None, a number or "learned": the ball that heads map tokens into.
        coefficient: Lipschitz constant of every contraction.
        context_features: width of the context that the flow is conditioned on, or None.
        logdet: how attention's log-determinants are computed, "auto" or a `flowattn.logdet.LogDet`.

    Example:
        >>> import torch
        >>> flow = AttentionFlow(event_shape=(5, 2), depth=2, num_heads=2, hidden=16)
        >>> flow.log_prob(torch.randn(3, 5, 2)).shape
        torch.Size([3])
        >>> flow.sample(4).shape
        torch.Size([4, 5, 2])
    """

    def __init__(
        self,
        event_shape: Sequence[int],
        *,
        depth: int = 4,
        num_heads: int | None = None,
        hidden: int = 64,
        lift: int | None = None,
        head_features: int | None = None,
        feed_forward: Literal["contractive", "coupling", "both"] | None = None,
        causal: bool = False,
        position_bias: Literal["alibi", "learned"] | None = None,
        radius: float | Literal["learned"] | None = "learned",
        coefficient: float = 0.97,
        context_features: int | None = None,
        logdet: LogDet | Literal["auto"] = "auto",
    ) -> None:
        base = SequenceNormal(event_shape)
        tokens, features = base.max_tokens, base.features
        if num_heads is None:
            num_heads = 4 if head_features is not None else _divisor(features if lift is None else lift, most=4)
        if feed_forward is None:
            feed_forward = "both" if features > 1 else "contractive"
        check_positive(depth=depth, num_heads=num_heads, hidden=hidden)
        check_choice("feed_forward", feed_forward, ("contractive", "coupling", "both"))
        if feed_forward != "contractive" and features == 1:
            raise ValueError(
                f"feed_forward must be 'contractive' for tokens of one feature, which no coupling can split; "
                f"got feed_forward={feed_forward!r}."
            )
        blocks = []
        for _ in range(depth):
            blocks += [
                TokenActNorm(features),
                Tokenwise(LULinear(features), use_context=False),
                InvertibleAttention(
                    features,
                    num_heads,
                    lift=lift,
                    head_features=head_features,
                    causal=causal,
                    position_bias=position_bias,
                    radius=radius,
                    coefficient=coefficient,
                    max_tokens=tokens,
                    context_features=context_features,
                    logdet=logdet,
                ),
            ]
            if feed_forward in ("coupling", "both"):
                blocks.append(FeedForwardCoupling(features, hidden, kind="affine", context_features=context_features))
            if feed_forward in ("contractive", "both"):
                blocks.append(
                    InvertibleFeedForward(features, hidden, coefficient=coefficient, context_features=context_features)
                )
        super().__init__(Chain(blocks), base, NoFeatures() if context_features is None else None)


def _divisor(width: int, most: int) -> int:
    """The largest divisor of the width that is at most so large."""
    return next(number for number in range(most, 0, -1) if width % number == 0)
