r"""Transforms of the mean-free space, in which the tokens of a sequence add up to zero: systems of particles.

Each maps the mean-free space :math:`\sum_i x_i = 0` to itself, with the log-determinant that belongs to it there, and
leaves the mean of any other sequence as it is: so each is a bijection of all sequences too, with the same
log-determinant. None depends on the order of the tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowattn.checks import check_positive, check_positive_number, check_tokens
from flowattn.context import keep_padding, refuse_mask, split_context, zero_padding
from flowattn.contractions import Contraction, FeedForward
from flowattn.contractions.base import full_precision
from flowattn.contractions.centred import Centred, centre, moves_with_tokens
from flowattn.inverse import Solver, invert
from flowattn.logdet import LogDet
from flowattn.transforms.base import TwoWayTransform
from flowattn.transforms.parts import contractive_attention
from flowattn.transforms.residual import ResidualTransform


class MovingResidual(ResidualTransform):
    r"""The residual block of a contraction that moves with its tokens, taken modulo shifts: nothing is lost.

    .. math:: y = x + P f(x), \qquad \log|\det J| = \log|\det(I + \partial f / \partial x)| - \log|\det(I + A)|

    where :math:`f(X + 1 t^T) = f(X) + 1 (A t)^T`. The map F = id + f is a bijection, f being a contraction, and it
    takes :math:`X + 1 t^T` to :math:`F(X) + 1 ((I + A) t)^T`. Since :math:`|A| < 1`, F takes shifted copies of a
    sequence to all the shifted copies of another: it is a bijection between mean-free representatives, which is
    :math:`x \mapsto x + P f(x)`. Its Jacobian is block-triangular over shifts and the mean-free space, with the block
    I + A on shifts. To bound P f itself would cost a factor of 2 (N - 1) / N in the token norm.

    The inverse solves x + f(x) = y and takes the mean-free part, which at most doubles the certified error; so it is
    found to half the tolerance.
    """

    def __init__(
        self, contraction: Contraction, logdet: LogDet | Literal["auto"] = "auto", solver: Solver | None = None
    ) -> None:
        super().__init__(contraction, logdet, solver)
        if not moves_with_tokens(contraction):
            raise ValueError(
                "contraction must move with its tokens: L2 attention without radius, causal mask and position bias, "
                f"affine maps, or chains of them; got {type(contraction).__name__}. Use Centred for other maps."
            )

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        features, mask = self._split(context, inputs)
        refuse_mask(mask, context)
        if not inverse:
            change, logabsdet = self.logdet(self.contraction, inputs, None, features)
            return inputs + centre(change), logabsdet - self._shift_logabsdet(inputs)
        tolerance = self.solver.tolerance or (1e-10 if inputs.dtype == torch.float64 else 1e-5)
        solver = dataclasses.replace(self.solver, tolerance=tolerance / 2)
        outputs = invert(self.contraction, inputs, None, features, solver)
        outputs = centre(outputs) + inputs.mean(1, keepdim=True)
        _, logabsdet = self.logdet(self.contraction, outputs, None, features)
        return outputs, self._shift_logabsdet(inputs) - logabsdet

    def _shift_logabsdet(self, inputs: Tensor) -> Tensor:
        """The logarithm of |det(I + A)|, A being read off the map of equal tokens: it is exact there."""
        f, num_tokens = self.contraction, inputs.shape[1]
        shifts = torch.eye(f.features, dtype=inputs.dtype, device=inputs.device)
        shifts = torch.cat([torch.zeros_like(shifts[:1]), shifts]).unsqueeze(1).expand(-1, num_tokens, -1)
        context = None if f.context_features is None else inputs.new_zeros(len(shifts), f.context_features)
        rows = f(shifts, None, context)[:, 0]
        return torch.linalg.slogdet(shifts[1:, 0] + rows[1:] - rows[0]).logabsdet


class CentredAttention(MovingResidual):
    r"""Invertible L2 attention of the mean-free space.

    .. math:: y_i = x_i + c \sum_h B_h^T \bigl( m^h_i - \tfrac1N \textstyle\sum_j m^h_j \bigr)

    Args:
        features: width D of a token.
        num_heads: number of heads.
        lift: None, or the width that tokens are lifted to before attention and brought back from after it.
        head_features: width of a head; that of a token, or of a lifted one, over num_heads unless given.
        coefficient: Lipschitz constant that the contraction never exceeds.
        logdet, solver: as of `flowattn.transforms.ResidualTransform`.

    Example:
        >>> block, x = CentredAttention(features=2, num_heads=4, lift=16), centre(torch.randn(3, 5, 2))
        >>> y, logabsdet = block(x)
        >>> y.sum(1).abs().max().item() < 1e-5
        True
    """

    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        lift: int | None = None,
        head_features: int | None = None,
        coefficient: float = 0.97,
        logdet: LogDet | Literal["auto"] = "auto",
        solver: Solver | None = None,
    ) -> None:
        contraction = contractive_attention(
            features, num_heads, lift=lift, coefficient=coefficient, head_features=head_features
        )
        super().__init__(contraction, logdet, solver)


class CentredFeedForward(ResidualTransform):
    r"""An invertible feed-forward network of the mean-free space.

    .. math:: y_i = x_i + g(x_i) - \tfrac1N \textstyle\sum_j g(x_j)

    Args:
        features: width of a token.
        hidden: width of the hidden layers.
        coefficient: Lipschitz constant that the contraction never exceeds.
        logdet, solver: as of `flowattn.transforms.ResidualTransform`.
        options: those of `flowattn.contractions.FeedForward`: num_layers, activation, context_features.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        coefficient: float = 0.97,
        logdet: LogDet | Literal["auto"] = "auto",
        solver: Solver | None = None,
        **options: Any,
    ) -> None:
        network = FeedForward(features, hidden, coefficient=None, **options)
        super().__init__(Centred(network, coefficient=coefficient), logdet, solver)


class CentredLinear(TwoWayTransform):
    r"""A linear map of every token of the mean-free space, of which N - 1 count.

    .. math:: y_i = W^T (x_i - \bar x) + \bar x, \qquad \log|\det J| = (N - 1) \log|\det W|

    W = L U with ones on the diagonal of L and :math:`e^{s_k}` on that of U, so that it is always invertible. Under a
    mask, N counts the real tokens, and the mean is theirs.

    Args:
        features: width of a token.
        isotropic: whether W is a number, so that the map turns with the system.
        scale: the number that W is at the start, times the identity.
    """

    def __init__(self, features: int, *, isotropic: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        check_positive(features=features)
        check_positive_number(scale=scale)
        self.features = features
        self.log_scale = nn.Parameter(torch.full((1 if isotropic else features,), math.log(scale)))
        self.off_diagonal = None if isotropic else nn.Parameter(torch.zeros(2, features, features))

    @full_precision
    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        check_tokens("inputs", inputs, self.features)
        _, mask = split_context(context, inputs)
        x = zero_padding(inputs, mask)
        count = x.new_full((len(x),), x.shape[1]) if mask is None else mask.sum(1)
        u, mean = centre(x, mask), x.sum(1, keepdim=True) / count.clamp_min(1)[:, None, None]
        logabsdet = (count - 1).clamp_min(0) * self.log_scale.expand(self.features).sum()
        mapped = self._divide(u) if inverse else u @ self._lower() @ self._upper()
        return keep_padding(mapped + mean, inputs, mask), -logabsdet if inverse else logabsdet

    def _divide(self, u: Tensor) -> Tensor:
        u = torch.linalg.solve_triangular(self._upper(), u, upper=True, left=False)
        return torch.linalg.solve_triangular(self._lower(), u, upper=False, left=False, unitriangular=True)

    def _upper(self) -> Tensor:
        diagonal = torch.diag(self.log_scale.expand(self.features).exp())
        return diagonal if self.off_diagonal is None else self.off_diagonal[1].triu(1) + diagonal

    def _lower(self) -> Tensor:
        ones = torch.eye(self.features, dtype=self.log_scale.dtype, device=self.log_scale.device)
        return ones if self.off_diagonal is None else self.off_diagonal[0].tril(-1) + ones

    def extra_repr(self) -> str:
        return f"features={self.features}, isotropic={self.off_diagonal is None}"
