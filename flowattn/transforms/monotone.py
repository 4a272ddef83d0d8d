"""Increasing functions of a number, with the logarithm of their slope: what couplings do to a feature.

Their parameters may be any numbers, zeros give the identity, and slopes are bounded from both sides, so that no
weights of a network can make an inverse that float32 does not have the digits for.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from nflows.transforms.splines import rational_quadratic
from torch import Tensor

# nflows looks at values in the midst of it. Compiled around as a whole it costs one break of the graph, not a dozen.
_rational_quadratic_spline = torch.compiler.disable(rational_quadratic.rational_quadratic_spline)


def affine(
    x: Float[Tensor, "*shape"], parameters: Float[Tensor, "*shape 2"], *, max_log_scale: float, inverse: bool = False
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    r"""Scales and shifts.

    .. math:: y = e^s x + t, \qquad s = s_{max} \tanh(u / s_{max})

    Example:
        >>> affine(torch.tensor([3.0]), torch.tensor([[0.0, 4.0]]), max_log_scale=2.0)
        (tensor([7.]), tensor([0.]))
    """
    u, shift = parameters.unbind(-1)
    log_scale = max_log_scale * torch.tanh(u / max_log_scale)
    if inverse:
        return (x - shift) * torch.exp(-log_scale), -log_scale
    return x * torch.exp(log_scale) + shift, log_scale


def spline(
    x: Float[Tensor, "*shape"], parameters: Float[Tensor, "*shape num"], *, tail_bound: float, inverse: bool = False
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    r"""A rational-quadratic spline on [-tail_bound, tail_bound], and the identity beyond.

    Of the 3 K - 1 parameters the first K say how wide the bins are, the next K how high, the others how steep it is
    between bins. A parameter u acts as :math:`\tanh u`: then no slope leaves [1/600, 60] or so with 8 bins, and in
    float32 the inverse is right to four digits; without a limit, none are left for large parameters.

    References:
        | Neural Spline Flows (Durkan, Bekasov, Murray, Papamakarios, 2019)

    Example:
        >>> spline(torch.tensor([0.5]), torch.zeros(1, 11), tail_bound=2.0)[0]
        tensor([0.5000])
    """
    if not x.numel():  # nflows looks for the smallest of none
        return x, torch.zeros_like(x)
    exact = torch.promote_types(x.dtype, torch.float32)
    num_bins = (parameters.shape[-1] + 1) // 3
    widths, heights, slopes = torch.tanh(parameters.to(exact)).split([num_bins, num_bins, num_bins - 1], -1)
    slope_one = math.log(math.expm1(1 - rational_quadratic.DEFAULT_MIN_DERIVATIVE))
    slopes = F.pad(slopes, (1, 1)) + slope_one
    # Tails are put in afterwards, so that no shape depends on the data. The very ends are left to them: there nflows
    # looks for a bin beyond the last one when its shift by 1e-6 is lost to rounding.
    inside = x.abs() < tail_bound
    y, log_slope = _rational_quadratic_spline(
        torch.where(inside, x, 0).to(exact),
        widths,
        heights,
        slopes,
        inverse=inverse,
        left=-tail_bound,
        right=tail_bound,
        bottom=-tail_bound,
        top=tail_bound,
    )
    return torch.where(inside, y.to(x.dtype), x), torch.where(inside, log_slope, 0)
