r"""Forces along the lines between particles: contractions that turn with the system and keep its centre.

Their heart is a profile h of distances, with h(0) = 0 and slopes between -1 and 1. The map of vectors

.. math:: \psi(r) = h(d)\, r / d, \qquad d = |r|, \qquad
    \partial \psi = \tfrac{h(d)}{d} \bigl(I - \tfrac{r r^T}{d^2}\bigr) + h'(d)\, \tfrac{r r^T}{d^2}

is then 1-Lipschitz, since h(d) / d is a mean of slopes: both eigenvalues of its symmetric Jacobian are slopes of h, or
means of them.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowattn.checks import check_positive, check_positive_number
from flowattn.contractions.base import Contraction
from flowattn.contractions.blocks import DenseBlocks, TokenBlocks
from flowattn.lipschitz.norms import Norm


class Profile(nn.Module):
    """A function h of distances whose slope is linear between evenly spaced knots and constant beyond the last.

    Args:
        num_knots: number of knots, at least 2.
        reach: distance of the last knot; the first is at 0.
    """

    def __init__(self, num_knots: int, reach: float) -> None:
        super().__init__()
        check_positive(num_knots=num_knots)
        if num_knots < 2:
            raise ValueError(f"num_knots must be at least 2; got num_knots={num_knots}.")
        check_positive_number(reach=reach)
        self.spacing = reach / (num_knots - 1)
        self.free_slopes = nn.Parameter(0.1 * torch.randn(num_knots))

    def bound(self) -> Tensor:
        """The steepest slope, below 1."""
        return self.free_slopes.tanh().abs().amax()

    def forward(self, d: Float[Tensor, "*batch"]) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
        """The mean slope h(d) / d and the slope h'(d)."""
        slopes = self.free_slopes.tanh()
        knots = torch.arange(len(slopes), dtype=d.dtype, device=d.device)
        # Each knot's share of the slope, a hat, and the integral of it. The last hat has no right side to fall on,
        # the first no left one.
        t = (d / self.spacing).unsqueeze(-1)
        s = t - knots
        s = torch.cat([s[..., :-1], s[..., -1:].clamp_max(0)], -1)
        slope = (1 - s.abs()).clamp_min(0) @ slopes
        c = s.clamp(-1, 1)
        integral = 0.5 + c - 0.5 * c * c.abs()
        height = integral @ slopes - 0.5 * slopes[0] + (t.squeeze(-1) - knots[-1]).clamp_min(0) * slopes[-1]
        # Up to the first knot h is a polynomial without a constant; dividing it out keeps the digits near 0.
        near = slopes[0] + 0.5 * (slopes[1] - slopes[0]) * t.squeeze(-1)
        far = height / t.squeeze(-1).clamp_min(1)
        return torch.where(t.squeeze(-1) < 1, near, far), slope


def _radial(
    profile: Profile, r: Float[Tensor, "*batch space"]
) -> tuple[Float[Tensor, "*batch space"], Float[Tensor, "*batch space space"]]:
    """The map psi and its Jacobian."""
    # At r = 0 the length has no gradient, but the map has: there the Jacobian is h'(0) I.
    square = r.square().sum(-1, keepdim=True).clamp_min(torch.finfo(r.dtype).tiny ** 0.5)
    mean_slope, slope = (value.unsqueeze(-1) for value in profile(square.squeeze(-1).sqrt()))
    outer = r.unsqueeze(-1) * r.unsqueeze(-2) / square.unsqueeze(-1)
    identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    jacobian = mean_slope.unsqueeze(-1) * (identity - outer) + slope.unsqueeze(-1) * outer
    return mean_slope * r, jacobian


class PairForces(Contraction):
    r"""Every particle is moved by every other one, along the line between them.

    .. math:: f(X)_i = \frac1N \sum_j \psi(x_i - x_j)

    The forces of a pair cancel, so the centre stays where it is; f turns with the system and does not know the order
    of the particles. In the norm of all entries together f is :math:`\frac1N E^T \psi(E X)` with the pairs'
    differences E, and :math:`|E|^2 = N`: its Lipschitz constant is at most the steepest slope of h, which is attained.
    Its Jacobian is symmetric.

    Args:
        features: number of dimensions.
        num_knots: knots of the profile.
        reach: distance of the last of them.
        coefficient: the Lipschitz constant, in norm="2", that is never exceeded.

    References:
        | Equivariant Flows: Exact Likelihood Generative Learning for Symmetric Densities (Koehler, Klein, Noe, 2020),
          where such forces drive a continuous flow

    Example:
        >>> f = PairForces(features=2, coefficient=0.9)
        >>> f(torch.randn(3, 5, 2)).sum(1).abs().max().item() < 1e-5, f.lipschitz_bound(5, "2").item() <= 0.9
        (True, True)
    """

    structure = "dense"
    norm: Norm = "2"

    def __init__(
        self, features: int, *, num_knots: int = 32, reach: float = 6.0, coefficient: float | None = 0.97
    ) -> None:
        super().__init__(features, coefficient=coefficient)
        check_positive(features=features)
        self.profile = Profile(num_knots, reach)

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        forces, _, E, count = self._pairs(x, mask)
        return (forces.mT @ E).mT / count

    def free_jacobian(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor]:
        forces, jacobians, E, count = self._pairs(x, mask)
        tokens, features = x.shape[1:]
        both = (E.unsqueeze(2) * E.unsqueeze(1)).flatten(1)
        J = (jacobians.flatten(2).mT @ both).view(-1, features, features, tokens, tokens)
        return (forces.mT @ E).mT / count, J.permute(0, 3, 1, 4, 2) / count[..., None, None]

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        bound = self.profile.bound().unsqueeze(0)
        if norm == "2":
            return bound
        # A particle feels N - 1 forces, each of a difference of two particles that move by at most 1.
        bound = bound * (2 * (num_tokens - 1) / num_tokens)
        return bound if norm == "token" else bound * math.sqrt(self.features)

    def _pairs(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Forces [B, pairs, D] and their Jacobians, the differences E [pairs, N], and how many particles are real."""
        num_tokens = x.shape[1]
        i, j = torch.triu_indices(num_tokens, num_tokens, 1, device=x.device)
        one = torch.eye(num_tokens, dtype=x.dtype, device=x.device)
        E = one[i] - one[j]
        forces, jacobians = _radial(self.profile, x[:, i] - x[:, j])
        if mask is None:
            return forces, jacobians, E, x.new_full((1, 1, 1), num_tokens)
        real = (mask[:, i] & mask[:, j]).unsqueeze(-1)
        count = mask.sum(1).clamp_min(1).to(x.dtype)[:, None, None]
        return forces * real, jacobians * real.unsqueeze(-1), E, count


class CentralForces(Contraction):
    r"""Every particle is moved along the line to the origin, :math:`f(X)_i = \psi(x_i)`.

    Inside `Centred` the origin is the centre of the system, which then stays where it is.

    Args:
        features: number of dimensions.
        num_knots: knots of the profile.
        reach: distance of the last of them.
        coefficient: the Lipschitz constant that is never exceeded; None leaves it to the steepest slope, below 1.
    """

    structure = "tokenwise"

    def __init__(
        self, features: int, *, num_knots: int = 32, reach: float = 6.0, coefficient: float | None = None
    ) -> None:
        super().__init__(features, coefficient=coefficient)
        check_positive(features=features)
        self.profile = Profile(num_knots, reach)

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        return _radial(self.profile, x)[0]

    def free_diagonal(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, TokenBlocks]:
        value, blocks = _radial(self.profile, x)
        return value, DenseBlocks(blocks)

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        bound = self.profile.bound().unsqueeze(0)
        return bound * math.sqrt(self.features) if norm == "inf" else bound
