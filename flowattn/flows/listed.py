"""A flow from a list of transforms, as a config writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nflows.flows import Flow
from nflows.transforms.base import Transform

from flowattn.checks import check_positive
from flowattn.distributions import SequenceNormal
from flowattn.flows.features import NoFeatures
from flowattn.transforms import Chain, Tokenwise
from flowattn.transforms.base import TwoWayTransform


class TransformFlow(Flow):
    """Transforms in a row, the whole list so many times, over a normal distribution.

    Each is made from the width of a token. Those of nflows are of vectors, and act on every token alike, by
    `Tokenwise`.

    Args:
        event_shape: the largest number of tokens, and their width.
        transforms: each makes a transform from the width of a token: a class of ours, or of nflows such as LULinear.
        depth: how many times the list is gone through, with weights of their own.

    Example:
        >>> from nflows.transforms import LULinear
        >>> from flowattn.transforms import TokenActNorm
        >>> flow = TransformFlow((5, 3), [TokenActNorm, LULinear], depth=2)
        >>> flow.sample(2).shape
        torch.Size([2, 5, 3])
    """

    def __init__(
        self, event_shape: Sequence[int], transforms: list[Callable[[int], Transform]], depth: int = 1
    ) -> None:
        check_positive(depth=depth)
        base = SequenceNormal(event_shape)
        if not transforms:
            raise ValueError("transforms must have at least one entry; got none.")
        made = [make(base.features) for _ in range(depth) for make in transforms]
        parts = [Tokenwise(part) if type(part).__module__.startswith("nflows.") else part for part in made]
        super().__init__(Chain(parts), base, None if any(map(_may_read_features, parts)) else NoFeatures())


def _may_read_features(part: Transform) -> bool:
    """Whether features in a context may have a reader; what is not ours cannot be asked."""
    return isinstance(part, Tokenwise) or not isinstance(part, TwoWayTransform) or part.context_features is not None
