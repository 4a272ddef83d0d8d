"""Lifts transforms of vectors to sequences of them."""

from __future__ import annotations

import torch
from nflows.transforms.base import Transform
from torch import Tensor

from flowattn.checks import can_look
from flowattn.context import keep_padding, per_token, split_context, sum_over_tokens
from flowattn.contractions.base import full_precision
from flowattn.transforms.base import TwoWayTransform


class Tokenwise(TwoWayTransform):
    r"""Applies a transform of vectors [B, D] to every token of [B, N, D].

    .. math:: y_i = T(x_i; c_i), \qquad \log|\det J| = \sum_i \log|\det J_T(x_i; c_i)|

    For any transform of nflows: linear maps, splines, couplings, autoregressive ones, permutations of features.
    (Some of them take [B, N, D] as it is, and count their log-determinant once in place of N times.) Only real
    tokens reach the transform, so what it learns from its first batch is not disturbed by padding; while torch.compile
    or torch.func traces, padding is replaced by a real token instead, so let such a transform see a batch before.

    Args:
        transform: the transform T of vectors.
        use_context: whether T is given the features of the context, one row per token. Several transforms of nflows
            fail on a context that they were not built for.

    Example:
        >>> from nflows.transforms import LULinear
        >>> outputs, logabsdet = Tokenwise(LULinear(3))(torch.randn(5, 7, 3))
        >>> outputs.shape, logabsdet.shape
        (torch.Size([5, 7, 3]), torch.Size([5]))
    """

    learns_from_first_batch = True

    def __init__(self, transform: Transform, *, use_context: bool = True) -> None:
        super().__init__()
        if not isinstance(transform, Transform):
            raise TypeError(f"transform must be an nflows Transform; got {type(transform).__name__}.")
        self.transform = transform
        self.use_context = use_context

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        features, mask = split_context(context, inputs)
        if features is not None:
            features = per_token(features, inputs) if self.use_context else None
        if mask is not None and can_look():
            if not mask.any():
                return inputs, sum_over_tokens(inputs, mask)
            tokens, logabsdet = self._map_tokens(inputs[mask], None if features is None else features[mask], inverse)
            outputs = inputs.to(tokens.dtype).index_put((mask,), tokens)
            return outputs, sum_over_tokens(logabsdet.new_zeros(mask.shape).index_put((mask,), logabsdet), None)
        tokens = (inputs if mask is None else _fill_padding(inputs, mask)).flatten(0, 1)
        tokens, logabsdet = self._map_tokens(tokens, None if features is None else features.flatten(0, 1), inverse)
        outputs = keep_padding(tokens.unflatten(0, inputs.shape[:2]), inputs, mask)
        return outputs, sum_over_tokens(logabsdet.unflatten(0, inputs.shape[:2]), mask)

    def _map_tokens(self, tokens: Tensor, features: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        outputs, logabsdet = (self.transform.inverse if inverse else self.transform)(tokens, features)
        if outputs.shape != tokens.shape or logabsdet.shape != tokens.shape[:1]:
            raise ValueError(
                f"transform must map vectors {list(tokens.shape)} to vectors of the same shape, with one logabsdet "
                f"each; got outputs {list(outputs.shape)} and logabsdet {list(logabsdet.shape)}."
            )
        return outputs, logabsdet


def _fill_padding(inputs: Tensor, mask: Tensor) -> Tensor:
    """Puts the first real token of the batch wherever there is padding, without a look: T may not take zeros."""
    first = mask.flatten().int().argmax().reshape(1)
    token = inputs.detach().flatten(0, 1).index_select(0, first)
    token = torch.where(mask.any(), token, 0)
    return torch.where(mask.unsqueeze(-1), inputs, token)
