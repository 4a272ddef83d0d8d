r"""Proven upper bounds of the Lipschitz constant of L2 self-attention, one function per theorem.

Attention is :math:`f(X)_i = \sum_h B_h^T m^h_i` with :math:`m^h` the L2 attention of the tokens
:math:`z_j = \text{ball}_R(W_h^T x_j)`, see `flowattn.attention`. In the token norm, row i of f is bounded by what
the weights stretch times what the attention stretches:

.. math:: \kappa_i = \sup_{\|dy\| \le 1} |dm_i|, \qquad
    L_i = \min\Bigl( \sum_h \kappa_i^h |W_h|_2 |B_h|_2,\; |B|_2 \sqrt{\textstyle\sum_h (\kappa_i^h |W_h|_2)^2} \Bigr)

`visible_weight`, `attention_stretch` and `ball_stretch` give :math:`\kappa`; `token_bound` gives :math:`L`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowattn.lipschitz.head_norms import Norms, head_norms, single_head_norms
from flowattn.lipschitz.lambert import wright_omega
from flowattn.lipschitz.spectral import spectral_norm_bound


def visible_weight(
    bias: Float[Tensor, "*heads tokens tokens"],
    *,
    causal: bool = False,
    mask: Bool[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "*batch_heads tokens"]:
    r"""How much the tokens that i sees weigh before distance counts, against i itself, as a logarithm.

    .. math:: \log S_i, \qquad S_i = \sum_{j \ne i \text{ visible}} e^{b_{ij} - b_{ii}}

    Without bias S is the number of the other visible tokens. A mask puts a batch dimension in front.

    Example:
        >>> visible_weight(torch.zeros(3, 3), causal=True).exp()
        tensor([0., 1., 2.])
    """
    own = bias.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    visible = ~torch.eye(bias.shape[-1], dtype=torch.bool, device=bias.device)
    if causal:
        visible = visible.tril()
    if mask is not None:
        mask = mask.reshape(len(mask), *[1] * (bias.ndim - 1), mask.shape[-1])
        visible = visible & mask
    # A row that sees nothing but itself has log 0 = -inf, whose gradient must be 0 and not NaN.
    alone = ~visible.any(-1)
    logs = torch.where(visible | alone.unsqueeze(-1), bias - own, -math.inf)
    return torch.where(alone, -math.inf, logs.logsumexp(-1))


def attention_stretch(log_weight: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""How far row i of the attention moves when every token moves by at most one, given log S_i.

    .. math:: \kappa_i \le 1 + 4 W_0(S_i / e)

    Proof. :math:`dm_i = \sum_j P_{ij} dz_j + \sum_j P_{ij} dL_{ij} (z_j - m_i)` with
    :math:`|dL_{ij}| \le \frac4s |z_i - z_j|`. The first sum is at most 1. For the second, by Cauchy-Schwarz and
    because the variance is the smallest second moment,
    :math:`\sum_j P_{ij} |z_j - m_i| |z_i - z_j| \le \sum_j P_{ij} |z_i - z_j|^2`. With
    :math:`d_j = |z_i - z_j|^2 / s` this is :math:`s \sum_j w_j d_j e^{-d_j} / (1 + \sum_j w_j e^{-d_j})`, largest where
    all :math:`d_j = 1 + W_0(S_i / e)`, with the value :math:`s W_0(S_i / e)`.

    Example:
        >>> attention_stretch(torch.tensor([-math.inf, 2.0]))
        tensor([1., 5.])
    """
    return 1 + 4 * wright_omega(log_weight - 1)


@functools.lru_cache(maxsize=4096)
def counted_stretch(num_others: int) -> float:
    """`attention_stretch` of a number of unbiased tokens, as a plain number.

    Example:
        >>> counted_stretch(0)
        1.0
    """
    return _counted(num_others, num_others + 1)[0]


@functools.lru_cache(maxsize=64)
def counted_stretches(num_tokens: int) -> tuple[float, ...]:
    """`counted_stretch` of the tokens before each, none to all but one.

    Example:
        >>> counted_stretches(1)
        (1.0,)
    """
    return tuple(_counted(0, num_tokens))


def _counted(start: int, stop: int) -> list[float]:
    with torch.inference_mode(False):
        stretches: list[float] = attention_stretch(torch.arange(start, stop, dtype=torch.float64).log()).tolist()
    return stretches


def ball_stretch(ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    r"""What `attention_stretch` is at most when the tokens are mapped into a ball, whatever their number.

    .. math:: \kappa \le \min\bigl( \sqrt{1 + (2.4 \rho)^2},\; 1.105 \sqrt{1 + 4 \rho^2} \bigr), \qquad \rho = R^2 / s

    Proof. Measure in units of R and let :math:`a = |z_i|`, :math:`t_j = |z_j|`, E the mean under :math:`P_i`,
    :math:`u = E\,t^2`. Now :math:`dz_j = G_j dy_j` with :math:`G_j = \sqrt{1-t_j^2}\,(I - z_j z_j^T)`, and

    .. math:: dm_i = E\,dz_j + 2\rho \bigl( E[(z_j - m_i)(z_i - z_j)^T dz_j] + \operatorname{Cov}_i dz_i \bigr).

    The first term is at most :math:`E\sqrt{1-t^2}`, the last :math:`u \sqrt{1-a^2}`, and the middle one, by
    Cauchy-Schwarz, :math:`\sqrt{u\,v}` with :math:`v = E |G_j (z_i - z_j)|^2 \le E\,g^2`,

    .. math:: g^2(a, t) = (1-t^2) \max_{|p| \le a} \bigl( (1-t^2)^2 (p-t)^2 + a^2 - p^2 \bigr),

    p being the part of :math:`z_i` along :math:`z_j`. For a given u the means of :math:`\sqrt{1-t^2}` and
    :math:`g^2` are at most their concave envelopes in :math:`t^2`, which leaves a supremum over two numbers:

    .. math:: \kappa \le \sup_{a,u} \sqrt{1-u} + 2\rho \bigl( \sqrt{u\,\hat g^2(a, u)} + u \sqrt{1-a^2} \bigr).

    It is a convex function of :math:`\rho`; `tests/test_lipschitz_bounds.py` computes it and finds the stated
    formula above it everywhere, by 0.4 to 6 percent. (The simpler estimate |G_j| <= sqrt(1 - t^2) in the middle
    term and 1 for the first gives 1 + 2.52 rho, up to 45 percent more.)

    Example:
        >>> ball_stretch(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 2.4709])
    """
    one = torch.ones_like(ratio)
    return torch.minimum(torch.hypot(one, 2.4 * ratio), 1.105 * torch.hypot(one, 2 * ratio))


def token_bound(
    W: Float[Tensor, "heads features width"],
    B: Float[Tensor, "heads width features_out"],
    stretch: Float[Tensor, "*batch #heads tokens"],
    *,
    ball: Float[Tensor, "*_ #heads #tokens"] | None = None,
    norms: Callable[[Tensor, Tensor], Norms] | None = None,
) -> Float[Tensor, "*batch tokens"]:
    r"""The Lipschitz constant of each row of attention in the token norm is at most this.

    .. math:: L_i = \min\Bigl( \sum_h \kappa_i^h |W_h|_2 |B_h|_2,\;
        |B|_2 \sqrt{\textstyle\sum_h (\kappa_i^h |W_h|_2)^2} \Bigr)

    with :math:`\kappa` the smaller of `stretch` and `ball`: by the triangle inequality, over heads or over the stack of
    them. A single head has the tighter `single_head_bound`. `norms` is `head_norms`, or remembers what it gave.

    Cost: that of the spectral norms, the same for any number of tokens.
    """
    if len(W) == 1:
        return single_head_bound(W, B, stretch, ball=ball, norms=norms)
    if ball is not None:
        stretch = torch.minimum(stretch, ball)
    norm_W, norm_B, norm_of_all = (norms or head_norms)(W, B)
    stretched = stretch * norm_W.unsqueeze(-1)
    by_head = (stretched * norm_B.unsqueeze(-1)).sum(-2)
    return torch.minimum(by_head, norm_of_all * torch.linalg.vector_norm(stretched, dim=-2))


def single_head_bound(
    W: Float[Tensor, "1 features width"],
    B: Float[Tensor, "1 width features_out"],
    stretch: Float[Tensor, "*batch 1 tokens"],
    *,
    ball: Float[Tensor, "*_ 1 #tokens"] | None = None,
    norms: Callable[[Tensor, Tensor], Norms] | None = None,
) -> Float[Tensor, "*batch tokens"]:
    r"""The `token_bound` of one head, which knows that B need not stretch most what W does.

    .. math:: L_i = |W||B| + (\kappa_i - 1) \gamma, \qquad
        \gamma = \min\bigl(|W||B|,\; \tfrac12 |\alpha B B^T + \alpha^{-1} W^T W|\bigr)

    with :math:`\kappa` the `stretch`, spectral norms and any :math:`\alpha > 0`, which is :math:`|W|_F / |B|_F` here.
    With a ball it is :math:`\min(\kappa_i, \kappa_R) |W||B|`: the map into it turns vectors between W and B, each token
    its own way.

    Proof. In the proof of `attention_stretch` the second sum of :math:`B^T dm_i` has the two parts
    :math:`\frac2s B^T \operatorname{Cov}_i W^T dx_i` and
    :math:`\frac2s \sum_j P_{ij} B^T (z_j - m_i) (z_i - z_j)^T W^T dx_j`. With :math:`\Sigma_i` the second moment about
    :math:`z_i`, which is at least the covariance, each is at most
    :math:`\frac2s \sqrt{\operatorname{tr}(B B^T \Sigma_i) \operatorname{tr}(W^T W \Sigma_i)} \le
    \frac2s \operatorname{tr}\bigl(\tfrac12(\alpha B B^T + \alpha^{-1} W^T W) \Sigma_i\bigr) \le
    \frac2s \gamma \operatorname{tr} \Sigma_i`, and :math:`\operatorname{tr} \Sigma_i \le s W_0(S_i/e)`.
    """
    product, mixed = (norms or single_head_norms)(W, B)
    if ball is not None:
        return torch.minimum(stretch, ball).squeeze(-2) * product
    return torch.addcmul(product, stretch.squeeze(-2) - 1, mixed)


def infinity_bound(
    W: Float[Tensor, "heads features width"],
    B: Float[Tensor, "heads width features_out"],
    stretch: Float[Tensor, "*batch #heads tokens"],
    *,
    ball: Float[Tensor, "*_ #heads #tokens"] | None = None,
) -> Float[Tensor, "*batch tokens"]:
    r"""The Lipschitz constant of each row of attention in the norm of the largest entry is at most this.

    .. math:: L_i = \max_o \sum_h \Bigl(\sum_d |B_h|_{do}\Bigr)\, \kappa_i^h\, |W_h^T|_\infty, \qquad
        \kappa_i = 1 + 4 s W_0(S_i / e)

    `stretch` is `attention_stretch`, from which kappa follows by :math:`|dz|_2 \le s |dz|_\infty`. With `ball`, the
    `ball_stretch` of the heads, it is :math:`\min(s + 4 s W_0, s \cdot \text{ball})`: the map into the ball is
    1-Lipschitz in Euclidean length only. This is `published_infinity_bound` in our weights, summed head by head.
    """
    s = math.sqrt(W.shape[-1])
    kappa = 1 + s * (stretch - 1) if ball is None else s * torch.minimum(stretch, ball)
    stretched = kappa * W.abs().sum(-2).amax(-1).unsqueeze(-1)
    return torch.einsum("ho,...hn->...no", B.abs().sum(-2), stretched).amax(-1)


def published_infinity_bound(
    w_q: Float[Tensor, "heads features width"],
    w_v: Float[Tensor, "heads features width"],
    w_o: Float[Tensor, "heads width features"],
    num_tokens: int,
) -> Float[Tensor, ""]:
    r"""Theorem 3.2 of Kim et al. for the norm of the largest entry, in the paper's weights.

    .. math:: \bigl(4 W_0(\tfrac{N-1}{e}) + \tfrac1s\bigr) |W^{O,T}|_\infty
        \max_h |W^{Q,h}|_\infty |W^{Q,h,T}|_\infty \max_h |W^{V,h,T}|_\infty
    """
    s = math.sqrt(w_q.shape[-1])
    growth = counted_stretch(num_tokens - 1) - 1 + 1 / s
    out = w_o.abs().sum((0, 1)).amax()
    square = (w_q.abs().sum(-1).amax(-1) * w_q.abs().sum(-2).amax(-1)).amax()
    return growth * out * square * w_v.abs().sum(-2).amax()


def published_two_norm_bound(
    w_q: Float[Tensor, "heads features width"],
    w_v: Float[Tensor, "heads features width"],
    w_o: Float[Tensor, "heads width features"],
    num_tokens: int,
) -> Float[Tensor, ""]:
    r"""Theorem 3.2 of Kim et al. for the Euclidean norm, in the paper's weights and in its homogeneous form.

    .. math:: \tfrac{\sqrt N}{s} \bigl(4 W_0(\tfrac{N-1}{e}) + 1\bigr)
        \sqrt{\textstyle\sum_h |W^{Q,h}|_2^4\, |W^{V,h}|_2^2}\; |W^O|_2

    The power 4 is ours: the map is quadratic in W^Q, and with the power 2 the bound is exceeded.
    """
    s = math.sqrt(w_q.shape[-1])
    heads = spectral_norm_bound(w_q).square() * spectral_norm_bound(w_v)
    out = spectral_norm_bound(w_o.flatten(0, 1))
    return math.sqrt(num_tokens) / s * counted_stretch(num_tokens - 1) * torch.linalg.vector_norm(heads) * out
