"""From the user's units to ones of mean 0 and variance 1, and back."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import check_finite, check_positive, check_tokens
from flowattn.context import keep_padding, split_context, sum_over_tokens, zero_padding
from flowattn.contractions.base import full_precision
from flowattn.transforms.base import TwoWayTransform


class Standardize(TwoWayTransform):
    r"""Subtracts a fixed mean from the features of every token, and divides by a fixed scale.

    .. math:: y_i = (x_i - \mu) / \sigma, \qquad \log|\det J| = -N \sum_k \log \sigma_k

    The mean and the scale are buffers: no optimiser changes them, and a checkpoint carries them, so that densities and
    samples of a loaded model are in the units of the data.

    Args:
        features: the width of a token.

    Example:
        >>> transform = Standardize(2)
        >>> transform.fix(torch.tensor([10.0, 0.0]), torch.tensor([2.0, 1.0]))
        >>> transform(torch.tensor([[[14.0, 3.0]]]))
        (tensor([[[2., 3.]]]), tensor([-0.6931]))
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        check_positive(features=features)
        self.features = features
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))

    @torch.no_grad()
    def fix(self, mean: Float[Tensor, " features"], scale: Float[Tensor, " features"]) -> None:
        """Sets both."""
        for name, value in (("mean", mean), ("scale", scale)):
            if value.shape != self.mean.shape:
                raise ValueError(f"{name} must have shape [{self.features}]; got {list(value.shape)}.")
            check_finite(name, value)
        if (scale <= 0).any():
            feature = int((scale <= 0).nonzero()[0])
            raise ValueError(f"scale must be positive; got {scale[feature].item()} for feature {feature}.")
        self.mean.copy_(mean)
        self.scale.copy_(scale)

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tokens("inputs", inputs, self.features)
        _, mask = split_context(context, inputs)
        x = zero_padding(inputs, mask)
        logabsdet = sum_over_tokens(self.scale.log().expand(x.shape), mask)
        if inverse:
            return keep_padding(x * self.scale + self.mean, inputs, mask), logabsdet
        return keep_padding((x - self.mean) / self.scale, inputs, mask), -logabsdet

    def extra_repr(self) -> str:
        return f"features={self.features}"
