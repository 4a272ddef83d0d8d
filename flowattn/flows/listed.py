"""A flow from a list of transforms, as a config writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nflows.flows import Flow
from nflows.transforms.base import CompositeTransform, InverseTransform, Transform

from flowattn.checks import check_positive
from flowattn.distributions import BatchedSampling, SequenceNormal
from flowattn.flows.features import NoFeatures
from flowattn.transforms import Chain, Tokenwise
from flowattn.transforms.base import TwoWayTransform


class TransformFlow(BatchedSampling, Flow):
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
        parts = [Tokenwise(part) if _is_of_vectors(part) else part for part in made]
        super().__init__(Chain(parts), base, None if any(map(_may_read_features, parts)) else NoFeatures())


def _is_of_vectors(part: Transform) -> bool:
    """Whether this is a transform of nflows, or derived from one, or made of such."""
    if isinstance(part, InverseTransform):
        return _is_of_vectors(part._transform)
    if isinstance(part, CompositeTransform):
        kinds = {_is_of_vectors(inner) for inner in part._transforms}
        if len(kinds) > 1:
            raise ValueError("transforms of vectors and of sequences must not be in one CompositeTransform: list them.")
        return kinds == {True}
    modules = [kind.__module__ for kind in type(part).__mro__ if kind is not Transform]
    return any(module.startswith("nflows.") for module in modules)


def _may_read_features(part: Transform) -> bool:
    """Whether features in a context may have a reader; what is not ours cannot be asked."""
    return isinstance(part, Tokenwise) or not isinstance(part, TwoWayTransform) or part.context_features is not None
