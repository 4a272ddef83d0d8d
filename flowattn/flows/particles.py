"""A ready-made flow of systems of particles, exact on the mean-free space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from nflows.flows import Flow
from nflows.transforms.base import Transform
from torch import Tensor

from flowattn.checks import can_look, check_positive, check_positive_number
from flowattn.context import refuse_mask, split_context
from flowattn.contractions.centred import Centred, centre
from flowattn.contractions.radial import CentralForces, PairForces
from flowattn.distributions import BatchedSampling, SequenceNormal
from flowattn.flows.features import NoFeatures
from flowattn.logdet import LogDet
from flowattn.transforms import CentredAttention, CentredFeedForward, CentredLinear, Chain, ResidualTransform


class MeanFreeNormal(SequenceNormal):
    r"""The standard normal distribution of the mean-free space, in which the tokens of a sequence add up to zero.

    .. math:: \log p(X) = -\tfrac12 \bigl( \|X\|^2 + (N - 1) D \log 2\pi \bigr)

    It is a density with respect to volume in the mean-free space. Sequences outside have none, and are refused, as are
    masks: all sequences have N tokens.

    Args:
        event_shape: the number N of tokens, at least 2, and their width D.

    Example:
        >>> import torch
        >>> base = MeanFreeNormal((4, 2))
        >>> base.sample(3).sum(1).abs().max().item() < 1e-5
        True
        >>> base.log_prob(torch.zeros(1, 4, 2))
        tensor([-5.5136])
    """

    def __init__(self, event_shape: Sequence[int]) -> None:
        super().__init__(event_shape)
        if self.max_tokens < 2:
            raise ValueError(f"event_shape must have at least 2 tokens; got {tuple(event_shape)}.")

    def _log_prob(self, inputs: Tensor, context: Tensor | None) -> Tensor:
        logarithm = super()._log_prob(inputs, context)
        refuse_mask(split_context(context, inputs)[1], context)
        if can_look():
            _check_mean_free(inputs.detach())
        return logarithm + 0.5 * self.features * math.log(2 * math.pi)

    def _sample(self, num_samples: int, context: Tensor | None) -> Tensor:
        if context is not None:
            refuse_mask(split_context(context, self._blank(context))[1], context)
        return super()._sample(num_samples, context)

    def _noise(self, num_samples: int, num_tokens: int) -> Tensor:
        return centre(super()._noise(num_samples, num_tokens))

    def _check(self, shape: torch.Size) -> None:
        if len(shape) != 3 or shape[1:] != (self.max_tokens, self.features):
            raise ValueError(f"systems must have shape [batch, {self.max_tokens}, {self.features}]; got {list(shape)}.")


def _check_mean_free(inputs: Tensor) -> None:
    """Raises at a sequence whose mean is further from zero than rounding takes it, beside its own largest entry."""
    rounding = max(1e-3, 4 * torch.finfo(inputs.dtype).eps)
    offset = inputs.to(torch.promote_types(inputs.dtype, torch.float32)).mean(1).abs().amax(1)
    bad = ~(offset <= rounding * (1 + inputs.abs().amax((1, 2))))
    if bad.any():
        index = int(bad.nonzero()[0])
        raise ValueError(
            f"the tokens of each sequence must add up to zero; got a mean that is {offset[index].item():.2g} away from "
            f"it in sequence {index}. Subtract it."
        )


class ParticleFlow(BatchedSampling, Flow):
    """A density of systems of particles whose centre is at the origin, the same for any order of the particles.

    A block is a linear map of each particle (`CentredLinear`), the residual blocks of `PairForces` and of
    `CentralForces`, and, if wanted, `CentredAttention` and `CentredFeedForward`. Every part maps the mean-free space to
    itself, so the density is exact there, with respect to its (N - 1) D dimensions. Without attention and feed-forward
    parts it is the same for all rotations and mirror images of a system too.

    Args:
        event_shape: number N of particles, and of dimensions D.
        depth: number of blocks.
        num_knots: knots of the profiles of the forces.
        reach: distance of the last knot, in units of `scale`.
        scale: a typical coordinate of a particle; the flow starts by dividing by it.
        num_heads: heads of the attention in each block; None for no attention.
        hidden: width inside the feed-forward part of each block; None for none.
        coefficient: Lipschitz constant of every contraction.
        logdet: how log-determinants are computed, "auto" or a `flowattn.logdet.LogDet`.

    Example:
        >>> flow = ParticleFlow(event_shape=(4, 2), depth=2)
        >>> x = flow.sample(3)
        >>> x.sum(1).abs().max().item() < 1e-4, flow.log_prob(x).shape
        (True, torch.Size([3]))
    """

    def __init__(
        self,
        event_shape: Sequence[int],
        *,
        depth: int = 16,
        num_knots: int = 32,
        reach: float = 6.0,
        scale: float = 1.0,
        num_heads: int | None = None,
        hidden: int | None = None,
        coefficient: float = 0.97,
        logdet: LogDet | Literal["auto"] = "auto",
    ) -> None:
        base = MeanFreeNormal(event_shape)
        features = base.features
        check_positive(depth=depth)
        check_positive_number(scale=scale)
        turns = num_heads is None and hidden is None
        profile = {"num_knots": num_knots, "reach": reach}
        blocks: list[Transform] = []
        for k in range(depth):
            pairs = PairForces(features, coefficient=coefficient, **profile)  # type: ignore[arg-type]
            central = Centred(CentralForces(features, **profile), coefficient=coefficient)  # type: ignore[arg-type]
            blocks += [
                CentredLinear(features, isotropic=turns, scale=1 / scale if k == 0 else 1.0),
                ResidualTransform(pairs, logdet),
                ResidualTransform(central, logdet),
            ]
            if num_heads is not None:
                blocks.append(
                    CentredAttention(
                        features, num_heads, head_features=features, coefficient=coefficient, logdet=logdet
                    )
                )
            if hidden is not None:
                blocks.append(CentredFeedForward(features, hidden, coefficient=coefficient, logdet=logdet))
        blocks.append(CentredLinear(features, isotropic=turns))
        super().__init__(Chain(blocks), base, NoFeatures())
