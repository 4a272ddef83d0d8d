"""Normalises the features of tokens, with a start that is read off the data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowattn.checks import can_look, check_finite, check_positive, check_tokens
from flowattn.context import keep_padding, split_context, sum_over_tokens, zero_padding
from flowattn.contractions.base import full_precision
from flowattn.transforms.base import TwoWayTransform


class TokenActNorm(TwoWayTransform):
    r"""Scales and shifts each feature of every token.

    .. math:: y_i = e^a \odot x_i + b, \qquad \log|\det J| = N \sum_k a_k

    The first forward pass in training mode sets a and b such that every feature of its real tokens has mean 0 and
    variance 1. A feature that does not vary there keeps scale 1. Under torch.distributed the statistics are those of
    all ranks, which therefore must all take part in that pass, and all end with the same bits. `initialized` is part
    of the state, so a loaded model is not initialised again. While torch.compile or torch.func traces, nothing is
    initialised: run one batch before.

    References:
        | Glow: Generative Flow with Invertible 1x1 Convolutions (Kingma, Dhariwal, 2018)

    Example:
        >>> norm = TokenActNorm(2)
        >>> y, logabsdet = norm(torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]))
        >>> y.detach()
        tensor([[[-1.,  0.],
                 [ 1.,  0.]]])
    """

    initialized: Tensor
    learns_from_first_batch = True

    def __init__(self, features: int) -> None:
        super().__init__()
        check_positive(features=features)
        self.features = features
        self.log_scale = nn.Parameter(torch.zeros(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.register_buffer("initialized", torch.tensor(False))

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tokens("inputs", inputs, self.features)
        _, mask = split_context(context, inputs)
        if self.training and not inverse and can_look() and not self.initialized:
            self._initialize(inputs.flatten(0, 1) if mask is None else inputs[mask])
        x = zero_padding(inputs, mask)
        logabsdet = sum_over_tokens(self.log_scale.expand(x.shape), mask)
        if inverse:
            return keep_padding((x - self.shift) * torch.exp(-self.log_scale), inputs, mask), -logabsdet
        return keep_padding(torch.exp(self.log_scale) * x + self.shift, inputs, mask), logabsdet

    @torch.no_grad()
    def _initialize(self, tokens: Tensor) -> None:
        check_finite("inputs", tokens)
        exact = torch.float32 if tokens.device.type == "mps" else torch.float64
        tokens = tokens.to(exact)
        count = _sum_over_ranks(tokens.new_tensor([len(tokens)]))
        if count == 0:
            return
        # Two passes: the mean of squares minus the square of the mean has no digits left far from the origin.
        mean = _sum_over_ranks(tokens.sum(0)) / count
        deviation = (_sum_over_ranks((tokens - mean).square().sum(0)) / count).sqrt()
        rounding = 64 * torch.finfo(exact).eps * mean.abs()
        varies = deviation > rounding.clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(varies, deviation, 1).reciprocal()
        self.log_scale.copy_(_from_first_rank(scale.log()))
        self.shift.copy_(_from_first_rank(-mean * scale))
        self.initialized.fill_(True)

    def extra_repr(self) -> str:
        return f"features={self.features}"


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _sum_over_ranks(x: Tensor) -> Tensor:
    if _is_distributed():
        dist.all_reduce(x)
    return x


def _from_first_rank(x: Tensor) -> Tensor:
    """Sums are the same on all ranks only up to rounding, unless the backend promises more."""
    if _is_distributed():
        dist.broadcast(x, src=0)
    return x
