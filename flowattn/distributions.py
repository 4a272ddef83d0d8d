"""Where flows start: a normal distribution of sequences of any length."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from jaxtyping import Float
from nflows.distributions.base import Distribution
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.context import split_context, sum_over_tokens, zero_padding


class BatchedSampling(Distribution):
    """Samples in batches as at once: nflows joins the batches of a context along the wrong dimension."""

    def sample(
        self, num_samples: int, context: Tensor | None = None, batch_size: int | None = None
    ) -> Float[Tensor, "*batch samples tokens features"]:
        """Samples [num_samples, N, D], or [batch, num_samples, N, D] with a context; `batch_size` at a time."""
        num_samples = operator.index(num_samples)
        batch_size = num_samples if batch_size is None else operator.index(batch_size)
        check_positive(num_samples=num_samples, batch_size=batch_size)
        context = None if context is None else torch.as_tensor(context)
        sizes = [min(batch_size, num_samples - start) for start in range(0, num_samples, batch_size)]
        return torch.cat([self._sample(size, context) for size in sizes], 0 if context is None else 1)


class SequenceNormal(BatchedSampling):
    r"""A standard normal distribution of every feature of every real token.

    .. math:: \log p(X) = -\tfrac12 \sum_{i \text{ real}} \bigl(\|x_i\|^2 + D \log 2\pi\bigr)

    Sequences may be shorter than announced, by the tensors given or by a mask in the context (`flowattn.context`);
    features in the context are not used. Samples are as long as the mask or the features of tokens, zero at padding,
    and of the type and on the device that this module was moved to. Log-probabilities are added up in at least
    float32.

    Args:
        event_shape: the largest number N of tokens, and their width D.

    Example:
        >>> base = SequenceNormal((5, 2))
        >>> base.sample(3).shape
        torch.Size([3, 5, 2])
        >>> base.log_prob(torch.zeros(1, 4, 2), torch.tensor([[True, False, False, False]]))
        tensor([-1.8379])
    """

    _like: Tensor

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__()
        if len(event_shape) != 2:
            raise ValueError(f"event_shape must be (tokens, features); got {tuple(event_shape)}.")
        check_positive(**{f"event_shape[{k}]": size for k, size in enumerate(event_shape)})
        self.max_tokens, self.features = map(operator.index, event_shape)
        self.register_buffer("_like", torch.zeros(()), persistent=False)

    def _sample(self, num_samples: int, context: Tensor | None) -> Tensor:
        if context is None:
            return self._noise(num_samples, self.max_tokens)
        blank = self._blank(context)
        _, mask = split_context(context, blank)
        samples = self._noise(len(blank) * num_samples, blank.shape[1])
        if mask is not None:
            mask = mask.repeat_interleave(num_samples, 0)
        return zero_padding(samples, mask).unflatten(0, (len(blank), num_samples))

    def _log_prob(self, inputs: Tensor, context: Tensor | None) -> Tensor:
        self._check(inputs.shape)
        _, mask = split_context(context, inputs)
        tokens = zero_padding(inputs, mask)  # first: the square of NaN would have a gradient of NaN
        energy = tokens.to(torch.promote_types(inputs.dtype, torch.float32)).square() + math.log(2 * math.pi)
        return -0.5 * sum_over_tokens(energy, mask)

    def _mean(self, context: Tensor | None) -> Tensor:
        return self._like.new_zeros(self.max_tokens, self.features) if context is None else self._blank(context)

    def _noise(self, num_samples: int, num_tokens: int) -> Tensor:
        like = self._like
        return torch.randn(num_samples, num_tokens, self.features, dtype=like.dtype, device=like.device)

    def _blank(self, context: Tensor) -> Tensor:
        """Zeros in the shape that samples of this context have."""
        has_tokens = context.dtype == torch.bool or context.ndim == 3
        num_tokens = context.shape[1] if has_tokens and context.ndim > 1 else self.max_tokens
        blank = self._like.new_zeros(context.shape[0], num_tokens, self.features)
        self._check(blank.shape)
        return blank

    def _check(self, shape: torch.Size) -> None:
        if len(shape) != 3 or shape[2] != self.features or not 1 <= shape[1] <= self.max_tokens:
            raise ValueError(
                f"sequences must have shape [batch, tokens, {self.features}] with 1 to {self.max_tokens} tokens; "
                f"got {list(shape)}."
            )

    def extra_repr(self) -> str:
        return f"event_shape=({self.max_tokens}, {self.features})"
