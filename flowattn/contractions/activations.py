"""Smooth activations that stretch nothing, with their slopes in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(nn.Module):
    """A 1-Lipschitz map of each token, entry by entry. `expansion` outputs per input, one block after another."""

    expansion = 1

    def slopes(self, x: Tensor) -> Tensor:
        """The derivative of each output after the one input it depends on."""
        raise NotImplementedError


class LipSwish(Activation):
    r"""Swish over its largest slope, with a learned sharpness.

    .. math:: \phi(x) = x\, \sigma(\beta x) / 1.1, \qquad |\phi'| \le 1.09984 / 1.1

    References:
        | Residual Flows for Invertible Generative Modeling (Chen et al., 2019)
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(F.softplus(self.sharpness) * x) / 1.1

    def slopes(self, x: Tensor) -> Tensor:
        u = F.softplus(self.sharpness) * x
        gate = torch.sigmoid(u)
        return gate * (1 + u * (1 - gate)) / 1.1


class CLipSwish(LipSwish):
    r"""LipSwish of x and of -x, side by side: twice as wide, and its slopes never vanish together.

    .. math:: \phi(x) = [x\, \sigma(\beta x),\; -x\, \sigma(-\beta x)] / 1.1044

    The two slopes a and 1 - a of the swishes have :math:`a^2 + (1-a)^2 \le 1.09984^2 + 0.09984^2 < 1.1044^2`.

    References:
        | Invertible DenseNets with Concatenated LipSwish (Perugachi-Diaz, Tomczak, Bhulai, 2021)
    """

    expansion = 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), super().forward(-x)], -1) * (1.1 / 1.1044)

    def slopes(self, x: Tensor) -> Tensor:
        return torch.cat([super().slopes(x), -super().slopes(-x)], -1) * (1.1 / 1.1044)


class Tanh(Activation):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def slopes(self, x: Tensor) -> Tensor:
        return 1 - torch.tanh(x).square()


class Sine(Activation):
    """The sine: slopes that never die out, and a map that stays bounded."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)

    def slopes(self, x: Tensor) -> Tensor:
        return torch.cos(x)


ACTIVATIONS: dict[str, type[Activation]] = {
    "lipswish": LipSwish,
    "clipswish": CLipSwish,
    "tanh": Tanh,
    "sin": Sine,
}
