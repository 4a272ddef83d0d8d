"""Maps of each token by itself: feed-forward networks and plain matrices."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from flowattn.checks import check_choice, check_positive
from flowattn.contractions.activations import ACTIVATIONS, Activation
from flowattn.contractions.base import Contraction, Push
from flowattn.contractions.blocks import DenseBlocks, TokenBlocks
from flowattn.lipschitz.memory import Remembered
from flowattn.lipschitz.norms import Norm
from flowattn.lipschitz.spectral import spectral_norm_bound


class FeedForward(Contraction):
    r"""A feed-forward network on every token, with a proven Lipschitz bound.

    .. math:: f(x) = \frac{c}{\max(c, \prod_k |W_k|_2)}\,
        \bigl(W_K^T \phi(\dots \phi(W_1^T x + b_1) \dots) + b_K\bigr)

    Args:
        features: width of a token.
        hidden: width of the layers between.
        num_layers: number of matrices; 1 leaves a plain affine map and no hidden layer.
        activation: "lipswish", "clipswish", "tanh" or "sin", smooth and 1-Lipschitz all of them.
        coefficient: the Lipschitz constant c < 1 that is never exceeded; None leaves the map as it is.
        out_features: width of a token afterwards, the same unless given.
        context_features: width of a context that is added inside the first layer.

    Example:
        >>> network = FeedForward(features=4, hidden=16, coefficient=0.9)
        >>> network.lipschitz_bound(num_tokens=7).item() <= 0.9
        True
    """

    structure = "tokenwise"

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        num_layers: int = 2,
        activation: Literal["lipswish", "clipswish", "tanh", "sin"] = "lipswish",
        coefficient: float | None = 0.97,
        out_features: int | None = None,
        context_features: int | None = None,
    ) -> None:
        super().__init__(
            features, coefficient=coefficient, out_features=out_features, context_features=context_features
        )
        check_positive(features=features, hidden=hidden, num_layers=num_layers, out_features=self.out_features)
        check_choice("activation", activation, tuple(ACTIVATIONS))
        self.hidden = hidden
        self.activations = nn.ModuleList(ACTIVATIONS[activation]() for _ in range(num_layers - 1))
        expansion = ACTIVATIONS[activation].expansion
        widths = [features, *[hidden] * (num_layers - 1), self.out_features]
        fan_in = [features, *[hidden * expansion] * (num_layers - 1)]
        self.weights = nn.ParameterList(
            torch.randn(rows, columns) / math.sqrt(rows) for rows, columns in zip(fan_in, widths[1:], strict=True)
        )
        self.biases = nn.ParameterList(torch.zeros(width) for width in widths[1:])
        self._spectral_norm = Remembered(spectral_norm_bound, num_calls=len(self.weights))
        self.U: nn.Parameter | None = None
        if context_features is not None:
            check_positive(context_features=context_features)
            self.U = nn.Parameter(torch.randn(context_features, widths[1]) / math.sqrt(context_features))

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        return self._layers(x, context)[0]

    def free_linearize(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Push]:
        value, slopes = self._layers(x, context, with_slopes=True)

        def push(v: Tensor) -> Tensor:
            v = v @ self.weights[0]
            for W, slope in zip(list(self.weights)[1:], slopes, strict=True):
                v = (torch.cat([v] * (len(W) // v.shape[-1]), -1) * slope) @ W
            return v

        return value, push

    def free_diagonal(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, TokenBlocks]:
        value, slopes = self._layers(x, context, with_slopes=True)
        J = self.weights[0].mT
        for k, (W, slope) in enumerate(zip(list(self.weights)[1:], slopes, strict=True)):
            J = torch.cat([J] * (len(W) // J.shape[-2]), -2)
            if k == 0:  # two matrices and the slopes between them: one product over the hidden units
                J = (slope @ (W.unsqueeze(-1) * J.unsqueeze(-2)).flatten(1)).unflatten(-1, (W.shape[1], -1))
            else:
                J = W.mT @ (slope.unsqueeze(-1) * J)
        return value, DenseBlocks(J.expand(*x.shape[:2], *J.shape[-2:]))

    @property
    def matrix(self) -> Tensor | None:
        """The matrix [D_out, D_in] of a free map that is affine, and None of any other."""
        return self.weights[0].mT if len(self.weights) == 1 else None

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        if norm == "inf":
            bounds = [W.abs().sum(0).amax() for W in self.weights]
        else:
            bounds = [self._spectral_norm(W) for W in self.weights]
        return torch.stack(bounds).prod(0, keepdim=True)

    def _layers(self, x: Tensor, context: Tensor | None, with_slopes: bool = False) -> tuple[Tensor, list[Tensor]]:
        slopes = []
        x = x @ self.weights[0] + self.biases[0]
        if context is not None and self.U is not None:
            x = x + context @ self.U
        for W, b, activation in zip(list(self.weights)[1:], list(self.biases)[1:], self.activations, strict=True):
            assert isinstance(activation, Activation)
            if with_slopes:
                slopes.append(activation.slopes(x))
            x = activation(x) @ W + b
        return x, slopes


class TokenLinear(FeedForward):
    """One matrix for every token, to lift narrow tokens into a wider space and to bring them back."""

    def __init__(self, features: int, out_features: int, *, coefficient: float | None = None) -> None:
        super().__init__(features, 1, num_layers=1, coefficient=coefficient, out_features=out_features)
