"""A nonlinear vector autoregression: sequences whose exact log-density is known by construction."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import check_positive, check_tokens
from flowattn.data.base import Batch, SequenceData, Sequences, generator

MEMORY, PUSH, GAIN = 0.2, 0.9, 1.5
NOISE, MODULATION = 0.5, 0.4


class NonlinearAutoregression(SequenceData):
    r"""Noisy oscillators that push each other round in a ring, with noise that depends on where they are.

    .. math::
        x_1 \sim N(0, I), \qquad x_t = m(x_{t-1}) + s(x_{t-1}) \odot \varepsilon_t, \quad \varepsilon_t \sim N(0, I)

        m(x) = 0.2\, x + 0.9 \tanh(1.5\, P x), \qquad s(x) = 0.5 \exp\bigl(0.4 \tanh(P^\top x)\bigr)

    P shifts the features by one, round the ring, and flips the sign of the one that goes round: a turn by 90 degrees
    for two features. The push saturates, and the noise is 0.34 to 0.75 strong, so that no Gaussian has this density,
    while the sequences stay within a few units of zero for ever.

    There is nothing to download and nothing to approximate: the density of a sequence is the product of the normal
    densities of its transitions.

    Args:
        length: the number of tokens.
        features: their width, 2 to 6.
        num_train: the number of sequences to train on.
        num_val: the same for validation.
        num_test: the same for the test.
        kwargs: those of `SequenceData`; the seed is that of the sequences, too.

    Example:
        >>> data = NonlinearAutoregression(length=8, num_train=100)
        >>> data.event_shape
        (8, 2)
        >>> data.log_density(data.split("train").batch(torch.arange(3))).shape
        torch.Size([3])
    """

    def __init__(
        self,
        length: int = 16,
        features: int = 2,
        num_train: int = 50_000,
        num_val: int = 5_000,
        num_test: int = 10_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_positive(length=length, features=features, num_train=num_train, num_val=num_val, num_test=num_test)
        if not 2 <= features <= 6:
            raise ValueError(f"features must be 2 to 6; got features={features}.")
        self.length, self.features = length, features
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}

    @property
    def event_shape(self) -> tuple[int, int]:
        return self.length, self.features

    def load(self) -> dict[str, Sequences]:
        """Generates the splits, each from a random stream of its own."""
        return {
            name: Sequences(self.generate(size, generator(self.seed, number)).float())
            for number, (name, size) in enumerate(self.sizes.items())
        }

    def generate(self, num_sequences: int, random: torch.Generator) -> Float[Tensor, "sequences length features"]:
        """Fresh sequences, in float64."""
        noise = torch.randn(num_sequences, self.length, self.features, dtype=torch.float64, generator=random)
        tokens = [noise[:, 0]]
        for now in noise[:, 1:].unbind(1):
            mean, deviation = transition(tokens[-1])
            tokens.append(mean + deviation * now)
        return torch.stack(tokens, 1)

    def log_density(self, batch: Batch) -> Float[Tensor, " batch"]:
        """The exact log-density of each sequence in nats, in float64."""
        check_tokens("inputs", batch.inputs, self.features)
        if batch.context is not None:
            raise ValueError("context must be None: these sequences have neither padding nor conditions; got a tensor.")
        x = batch.inputs.double()
        mean, deviation = transition(x[:, :-1])
        noise = torch.cat([x[:, :1], (x[:, 1:] - mean) / deviation], 1)
        return -0.5 * (noise.square() + math.log(2 * math.pi)).sum((1, 2)) - deviation.log().sum((1, 2))

    def entropy(self, num_sequences: int = 100_000) -> tuple[float, float]:
        r"""The entropy of a sequence in nats, and its standard error.

        .. math:: H = \tfrac{N D}{2} \log 2\pi e + \mathbb{E} \sum_{t<N} \sum_i \log s_i(x_t)

        The mean over as many fresh sequences; the entropy of the noise itself needs no sampling.
        """
        x = self.generate(num_sequences, generator(self.seed, len(self.sizes)))
        _, deviation = transition(x[:, :-1])
        each = deviation.log().sum((1, 2)) + 0.5 * self.length * self.features * math.log(2 * math.pi * math.e)
        return each.mean().item(), each.std().item() / num_sequences**0.5


def transition(x: Float[Tensor, "*batch features"]) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of the token that follows x.

    Example:
        >>> transition(torch.tensor([0.0, 10.0]))
        (tensor([0.9000, 2.0000]), tensor([0.3352, 0.5000]))
    """
    first, last = x[..., :1], x[..., -1:]
    forward = torch.cat([x[..., 1:], -first], -1)  # P x
    backward = torch.cat([-last, x[..., :-1]], -1)  # P^T x
    return MEMORY * x + PUSH * torch.tanh(GAIN * forward), NOISE * torch.exp(MODULATION * torch.tanh(backward))
