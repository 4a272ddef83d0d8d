r"""Proven upper bounds of the Lipschitz constant of dot-product attention, which has none on the whole space.

With the letters of `DotProductHeads` for one head, :math:`\text{Cov}_i` the covariance of the tokens under
:math:`P_i` and :math:`a_i = A x_i + W^{k,T} b` what token i looks for, the derivative is

.. math:: df_i = V \Bigl( \sum_j P_{ij} \bigl(I + (x_j - m_i) a_i^T\bigr) dx_j + \text{Cov}_i A\, dx_i \Bigr).

All bounds here bound the first sum T and the second D. On tokens of length at most R, let
:math:`\rho = |A| R^2` and :math:`\alpha = \rho + |W^{k,T} b| R`, the same without a bias. The key inequality is

.. math:: |T_i| \le c_i \sqrt{\textstyle\sum_j P_{ij} |dx_j|^2}, \qquad
    c_i^2 = 1 + |a_i|^2 |\text{Cov}_i| \le 1 + \alpha^2,

by Cauchy-Schwarz: against a unit vector u the sum has the coefficients :math:`u + \langle x_j - m_i, u\rangle a_i`,
and in the mean of their squares the cross term vanishes. The covariance of points in a ball is at most :math:`R^2`.
Several heads are joined by the triangle inequality, as a sum or as a stack: see `join_heads`.

References:
    | How Smooth Is Attention? (Castin, Ablin, Peyre, 2024)
    | Pay Attention to Attention Distribution (Yudin, Gaponov, Kudriashov, Rakhuba, 2025)
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.lipschitz.heads import DotProductHeads
from flowattn.lipschitz.norms import Norm, check_norm
from flowattn.lipschitz.spectral import spectral_norm_bound


def published_ball_bound(heads: DotProductHeads, num_tokens: int, radius: float) -> Float[Tensor, ""]:
    r"""Theorem of Castin et al.: the constant in the Euclidean norm for n tokens in a ball, causal or not.

    .. math:: \sqrt3\, |V| \bigl( |A|^2 R^4 (4 n + 1) + n \bigr)^{1/2}

    A bias of the queries, which the paper does not have, turns 4n |A|^2 R^4 into :math:`4 n \alpha^2`. `ball_bound`
    is always smaller.
    """
    rho, alpha = _sizes(heads, radius)
    n = _count(num_tokens)
    return join_heads(heads, math.sqrt(3) * (rho.square() + n * (1 + 4 * alpha.square())).sqrt())


def published_mean_field_bound(heads: DotProductHeads, radius: float) -> Float[Tensor, ""]:
    r"""Theorem of Castin et al.: the constant in the Euclidean norm for any number of tokens in a ball.

    .. math:: |V| (1 + 3 |A| R^2)\, e^{2 |A| R^2}

    It is for attention without a mask. With a causal mask it is exceeded: for A = 0 row i is the mean of the first i
    tokens, an operator whose norm tends to 2 (Hardy's inequality) and is 1.38 for 8 tokens, where the formula says 1.
    For a causal mask this function returns what is true there, and of the same form:

    .. math:: |V| \bigl( 2 (1 + 2 \alpha)\, e^{2 \alpha} + \rho \bigr)

    Proof. :math:`P_{ij} \le e^{2\alpha} / i` for the i visible tokens, because logits differ by at most
    :math:`2 \alpha`; and :math:`|I + (x_j - m_i) a_i^T| \le 1 + 2 \alpha`. So :math:`|T_i|` is at most
    :math:`(1 + 2\alpha) e^{2\alpha}` times a mean of :math:`|dx_1|, ..., |dx_i|`, to which Hardy's inequality applies.
    """
    rho, alpha = _sizes(heads, radius)
    growth = (1 + 2 * alpha) * (2 * alpha).exp()
    return join_heads(heads, 2 * growth + rho if heads.causal else growth + rho * (2 * alpha).exp())


def ball_bound(heads: DotProductHeads, num_tokens: int, radius: float, norm: Norm = "2") -> Float[Tensor, ""]:
    r"""The constant for n tokens in a ball: both regimes of Castin et al. in one formula, and smaller than either.

    .. math:: |V| \Bigl( \sqrt{(1 + \alpha^2)\, S_n} + \rho \Bigr), \qquad
        S_n = \frac{n}{1 + (n-1) e^{-2\alpha}} \le \min(n, e^{2\alpha})

    Proof. By the key inequality :math:`|T|^2 \le (1 + \alpha^2) \sum_j |dx_j|^2 \sum_i P_{ij}`, and no logit is more
    than :math:`2 \alpha` above another, so :math:`P_{ij} \le 1 / (1 + (n-1) e^{-2\alpha})`.

    Up to :math:`n = e^{2 \alpha}` tokens the bound grows like :math:`\sqrt n`, then it stays at
    :math:`e^{\alpha}`, as do the inputs of `adversarial_tokens`; the published exponent is :math:`2 \alpha`.
    With a causal mask :math:`S_n = \sum_{i \le n} 1 / (1 + (i-1) e^{-2\alpha})`, which goes on to grow like
    :math:`e^{2 \alpha} \log n`, until the bound of `published_mean_field_bound` is smaller.

    For norm="token" the constant is at most :math:`|V| (\sqrt{1 + \alpha^2} + \rho)`, for any number of tokens and any
    mask: :math:`\sum_j P_{ij} |dx_j|^2 \le 1`. The root of n belongs to the Euclidean norm, not to attention.

    Example:
        >>> heads = DotProductHeads.single(A=torch.eye(1), V=torch.eye(1))
        >>> ball_bound(heads, 4, radius=0.0).round(decimals=2)
        tensor(1.)
    """
    _check_norm(norm)
    rho, alpha = _sizes(heads, radius)
    n = _count(num_tokens)
    factor = (1 + alpha.square()).sqrt()
    if norm == "token":
        return join_heads(heads, factor + rho)
    others = torch.arange(n if heads.causal else 1, dtype=alpha.dtype, device=alpha.device)
    if heads.causal:
        column = (1 / (1 + others * (-2 * alpha).exp().unsqueeze(-1))).sum(-1)
        hardy = 2 * (1 + 2 * alpha) * (2 * alpha).exp()
        return join_heads(heads, torch.minimum(factor * column.sqrt(), hardy) + rho)
    return join_heads(heads, factor * (n / (1 + (n - 1) * (-2 * alpha).exp())).sqrt() + rho)


def join_heads(heads: DotProductHeads, constants: Float[Tensor, "*batch heads"]) -> Float[Tensor, "*batch"]:
    r"""The bound of all heads from bounds g_h of the maps of tokens to their averages.

    .. math:: \min\Bigl( \sum_h |V_h|\, g_h,\; \bigl|[V_1, ..., V_H]\bigr| \sqrt{\textstyle\sum_h g_h^2} \Bigr)
    """
    each = product_norm(heads.out, heads.value)
    # V_h = O_h R_h^T Q_h^T, and rows of Q^T are orthonormal: of the stack the small factors are enough.
    stack = heads.out @ torch.linalg.qr(heads.value.mT).R.mT
    whole = spectral_norm_bound(stack.movedim(0, 1).flatten(1))
    return torch.minimum((each * constants).sum(-1), whole * torch.linalg.vector_norm(constants, dim=-1))


def product_norm(left: Float[Tensor, "*b m k"], right: Float[Tensor, "*b k n"]) -> Float[Tensor, "*b"]:
    """An upper bound of the spectral norm of a product through a narrow space, without the large matrix."""
    return spectral_norm_bound(torch.linalg.qr(left).R @ torch.linalg.qr(right.mT).R.mT)


def _sizes(heads: DotProductHeads, radius: float) -> tuple[Tensor, Tensor]:
    """Rho and alpha of each head."""
    if not 0 <= radius < math.inf:
        raise ValueError(f"radius must be finite and at least 0; got radius={radius}.")
    rho = product_norm(heads.key.mT, heads.query) * radius**2
    offset = torch.linalg.vector_norm(torch.einsum("hwf,hw->hf", heads.key, heads.query_bias), dim=-1)
    return rho, rho + offset * radius


def _count(num_tokens: int) -> int:
    check_positive(num_tokens=num_tokens)
    return num_tokens


def _check_norm(norm: Norm) -> None:
    check_norm(norm)
    if norm == "inf":
        raise ValueError("norm must be 'token' or '2' for dot-product attention; got norm='inf'.")
