"""Invertible residual blocks y = x + f(x), f a contraction."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch
from jaxtyping import Float
from nflows.transforms.base import InverseTransform, Transform
from torch import Tensor, nn
from torch.func import functional_call

from flowattn.context import split_context
from flowattn.contractions import Compose, Contraction, FeedForward, L2SelfAttention, TokenLinear
from flowattn.contractions.base import full_precision
from flowattn.inverse import Solver, invert
from flowattn.logdet import AutoLogDet, LogDet


class ResidualTransform(Transform):
    r"""The residual block of a contraction.

    .. math:: y = x + f(x), \qquad \log|\det J| = \log|\det(I + \partial f / \partial x)|

    The inverse is found to a certified error or raises `InverseNotConverged`; it can be differentiated, so flows can be
    trained by samples too. Padding passes through and counts for nothing. Under autocast, and in a model of half
    precision, all is computed in float32, log-determinants included.

    Args:
        contraction: the map f, ours or a user's own module as `flowattn.contractions.Declared`.
        logdet: a `flowattn.logdet.LogDet`, or "auto" for exact where that is cheap and unbiased elsewhere.
        solver: how the inverse is computed, a `flowattn.inverse.Solver`.

    Example:
        >>> from flowattn.contractions import FeedForward
        >>> import torch
        >>> block = ResidualTransform(FeedForward(features=3, hidden=8))
        >>> x = torch.randn(2, 5, 3)
        >>> y, logabsdet = block(x)
        >>> torch.allclose(block.inverse(y)[0], x, atol=1e-4)
        True
    """

    def __init__(
        self, contraction: Contraction, logdet: LogDet | Literal["auto"] = "auto", solver: Solver | None = None
    ) -> None:
        super().__init__()
        if not isinstance(contraction, Contraction):
            raise TypeError(
                f"contraction must be a flowattn Contraction, which knows its Lipschitz bound; got "
                f"{type(contraction).__name__}. Wrap a module of your own in flowattn.contractions.Declared."
            )
        if contraction.features != contraction.out_features:
            raise ValueError(
                f"contraction must keep the width of a token; got features={contraction.features}, "
                f"out_features={contraction.out_features}."
            )
        bound = contraction.lipschitz_bound(1, contraction.norm).item()  # refuses maps that have none
        if not bound < 1:
            raise ValueError(
                f"contraction must have a Lipschitz bound below 1; got {bound:.3g} for a single token. "
                "Give it a coefficient."
            )
        if logdet != "auto" and not isinstance(logdet, LogDet):
            raise ValueError(f"logdet must be 'auto' or a LogDet; got logdet={logdet!r}.")
        self.contraction = contraction
        self.logdet = AutoLogDet() if logdet == "auto" else logdet
        self.solver = Solver() if solver is None else solver

    def forward(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        if _is_half(inputs):
            outputs, logabsdet = functional_call(self, _single(self), (_full(inputs), _full(context)))
            return outputs.to(inputs.dtype), logabsdet
        return self._forward(inputs, context)

    def inverse(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        if _is_half(inputs):
            back = InverseTransform(self)
            outputs, logabsdet = functional_call(back, _single(back), (_full(inputs), _full(context)))
            return outputs.to(inputs.dtype), logabsdet
        return self._inverse(inputs, context)

    @full_precision
    def _forward(self, inputs: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        features, mask = self._split(context, inputs)
        change, logabsdet = self.logdet(self.contraction, inputs, mask, features)
        return inputs + change, logabsdet

    @full_precision
    def _inverse(self, inputs: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        features, mask = self._split(context, inputs)
        outputs = invert(self.contraction, inputs, mask, features, self.solver)
        _, logabsdet = self.logdet(self.contraction, outputs, mask, features)
        return outputs, -logabsdet

    def _split(self, context: Tensor | None, inputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        features, mask = split_context(context, inputs)
        return (None if self.contraction.context_features is None else features), mask

    def extra_repr(self) -> str:
        return f"logdet={self.logdet}, solver={self.solver}"


def _is_half(inputs: Tensor) -> bool:
    """Whether the block was moved to half precision, in which there are neither bounds nor determinants."""
    return inputs.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(inputs.device.type)


def _full(context: Tensor | None) -> Tensor | None:
    return context.float() if context is not None and context.is_floating_point() else context


def _single(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers in single precision, such that gradients reach the originals."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: tensor.float() for name, tensor in named if tensor.is_floating_point()}


class InvertibleAttention(ResidualTransform):
    r"""The residual block of contractive L2 self-attention.

    .. math:: y_i = x_i + c_i \sum_h B_h^T m^h_i

    Args:
        features: width D of a token.
        num_heads: number of heads.
        lift: None, or the width that tokens are lifted to before attention and brought back from after it. Narrow
            tokens, such as particles in the plane, want one.
        logdet, solver: as of `ResidualTransform`.
        coefficient: Lipschitz constant that the block's f never exceeds.
        options: those of `flowattn.contractions.L2SelfAttention`: head_features, causal, position_bias, radius, norm,
            max_tokens, context_features.

    Example:
        >>> import torch
        >>> block = InvertibleAttention(features=2, num_heads=4, lift=16)
        >>> y, logabsdet = block(torch.randn(3, 5, 2))
        >>> y.shape, logabsdet.shape
        (torch.Size([3, 5, 2]), torch.Size([3]))
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        lift: int | None = None,
        logdet: LogDet | Literal["auto"] = "auto",
        solver: Solver | None = None,
        coefficient: float = 0.97,
        **options: Any,
    ) -> None:
        contraction: Contraction
        if lift is None:
            contraction = L2SelfAttention(features, num_heads, coefficient=coefficient, **options)
        else:
            attention = L2SelfAttention(lift, num_heads, coefficient=None, **options)
            contraction = Compose(
                TokenLinear(features, lift), attention, TokenLinear(lift, features), coefficient=coefficient
            )
        super().__init__(contraction, logdet, solver)


class InvertibleFeedForward(ResidualTransform):
    r"""The residual block of a contractive feed-forward network on every token, with an exact log-determinant.

    .. math:: y_i = x_i + g(x_i)

    Args:
        features: width of a token.
        hidden: width of the hidden layers.
        logdet, solver: as of `ResidualTransform`.
        options: those of `flowattn.contractions.FeedForward`: num_layers, activation, coefficient, context_features.

    Example:
        >>> import torch
        >>> y, logabsdet = InvertibleFeedForward(features=3, hidden=16)(torch.randn(2, 5, 3))
        >>> y.shape, logabsdet.shape
        (torch.Size([2, 5, 3]), torch.Size([2]))
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        logdet: LogDet | Literal["auto"] = "auto",
        solver: Solver | None = None,
        **options: Any,
    ) -> None:
        super().__init__(FeedForward(features, hidden, **options), logdet, solver)
