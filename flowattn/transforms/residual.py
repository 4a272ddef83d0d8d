"""Invertible residual blocks y = x + f(x), f a contraction."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from flowattn.checks import can_look
from flowattn.context import split_context
from flowattn.contractions import Contraction, FeedForward
from flowattn.contractions.base import full_precision
from flowattn.inverse import Solver, invert
from flowattn.logdet import AutoLogDet, LogDet
from flowattn.transforms.base import TwoWayTransform
from flowattn.transforms.parts import contractive_attention


class ResidualTransform(TwoWayTransform):
    r"""The residual block of a contraction.

    .. math:: y = x + f(x), \qquad \log|\det J| = \log|\det(I + \partial f / \partial x)|

    The inverse is found to a certified error or raises `InverseNotConverged`; it can be differentiated, so flows can be
    trained by samples too. Padding passes through and counts for nothing. Under autocast, and in a model of half
    precision, all is computed in float32, log-determinants included. A contraction without a coefficient is asked for
    its bound at the length of every batch, and refused where that is not below 1.

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
        contraction.bound_below_one(1)  # refuses maps that have none, too
        if logdet != "auto" and not isinstance(logdet, LogDet):
            raise ValueError(f"logdet must be 'auto' or a LogDet; got logdet={logdet!r}.")
        self.contraction = contraction
        self.context_features = contraction.context_features
        self.logdet = AutoLogDet() if logdet == "auto" else logdet
        self.solver = Solver() if solver is None else solver

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        features, mask = self._split(context, inputs)
        if inverse:
            outputs = invert(self.contraction, inputs, mask, features, self.solver)
            _, logabsdet = self.logdet(self.contraction, outputs, mask, features)
            return outputs, -logabsdet
        change, logabsdet = self.logdet(self.contraction, inputs, mask, features)
        return inputs + change, logabsdet

    def _split(self, context: Tensor | None, inputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The features and the mask, once it is clear that so many tokens are mapped by a bijection."""
        features, mask = split_context(context, inputs)
        if self.contraction.coefficient is None and can_look():
            self.contraction.bound_below_one(inputs.shape[1])
        return (None if self.context_features is None else features), mask

    def extra_repr(self) -> str:
        return f"logdet={self.logdet}, solver={self.solver}"


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
        options: those of `flowattn.contractions.L2SelfAttention`: head_features, causal, position_bias, radius, norm
            (which a lift leaves at "token"), max_tokens, context_features.

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
        contraction = contractive_attention(features, num_heads, lift=lift, coefficient=coefficient, **options)
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
