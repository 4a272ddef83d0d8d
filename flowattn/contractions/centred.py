"""Contractions of the mean-free space, in which the tokens of a sequence add up to zero."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flowattn.contractions.attention import L2SelfAttention
from flowattn.contractions.base import Contraction, Push
from flowattn.contractions.compose import Compose
from flowattn.contractions.feed_forward import FeedForward
from flowattn.lipschitz.norms import Norm


def centre(
    x: Float[Tensor, "batch tokens *rest"], mask: Bool[Tensor, "batch tokens"] | None = None
) -> Float[Tensor, "batch tokens *rest"]:
    r"""The mean-free part P X of sequences, :math:`x_i - \frac1N \sum_j x_j`, over real tokens; padding is zero.

    Example:
        >>> centre(torch.tensor([[[1.0], [3.0]]]))[0, :, 0]
        tensor([-1.,  1.])
    """
    if mask is None:
        return x - x.mean(1, keepdim=True)
    real = mask.reshape(mask.shape + (1,) * (x.ndim - 2))
    x = torch.where(real, x, 0)
    return torch.where(real, x - x.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp_min(1), 0)


class Centred(Contraction):
    r"""The mean-free part of a contraction of the mean-free part.

    .. math:: f(X) = P g(P X), \qquad P = I - \tfrac1N 1 1^T

    So x + f(x) maps the mean-free space to itself and keeps the mean of any other sequence. Its Jacobian is P J P,
    and :math:`\log|\det(I + P J P)|` is that on the mean-free space, because the complement is left alone.

    Where g is tokenwise the coefficient holds in the norm of all entries together, norm="2": there P has norm 1, and
    g is as contractive as it is on a token, so centring costs nothing. Other maps are held to it in the token norm,
    where P has norm 2 (N - 1) / N on the way out, and once more on the way in. (Attention that moves with its tokens
    needs none of that: see `flowattn.transforms.CentredAttention`.)

    Args:
        contraction: the map g, usually free (``coefficient=None``).
        coefficient: the Lipschitz constant that f never exceeds.

    Example:
        >>> f = Centred(FeedForward(2, 16, coefficient=None), coefficient=0.9)
        >>> f(torch.randn(3, 5, 2)).sum(1).abs().max().item() < 1e-5
        True
        >>> f.norm, f.lipschitz_bound(5, "2").item() <= 0.9
        ('2', True)
    """

    structure = "dense"

    def __init__(self, contraction: Contraction, *, coefficient: float | None = 0.97) -> None:
        if not isinstance(contraction, Contraction):
            raise TypeError(f"contraction must be a Contraction; got {type(contraction).__name__}.")
        if contraction.norm != "token" and contraction.coefficient is not None:
            raise ValueError(
                f"contraction must be free, or scaled in norm='token'; got one scaled in norm={contraction.norm!r}."
            )
        super().__init__(
            contraction.features,
            coefficient=coefficient,
            out_features=contraction.out_features,
            context_features=contraction.context_features,
        )
        self.contraction = contraction
        self.norm = "2" if contraction.structure == "tokenwise" else "token"
        self.max_tokens = contraction.max_tokens

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        return centre(self.contraction(centre(x, mask), mask, context), mask)

    def rounding(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor, *, sharp: bool = False
    ) -> Tensor:
        own = self.contraction.scale(x.shape[1], mask)
        inner = self.contraction.rounding(centre(x, mask), mask, context, own, sharp=sharp)
        return 2 * inner * scale.amax(-1)

    def free_linearize(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Push]:
        value, push = self.contraction.linearize(centre(x, mask), mask, context)
        return centre(value, mask), lambda v: centre(push(centre(v, mask)), mask)

    def free_jacobian(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor]:
        value, J = self.contraction.forward_and_jacobian(centre(x, mask), mask, context)
        J = centre(centre(J, mask).movedim(3, 1), mask).movedim(1, 3)
        return centre(value, mask), J

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        inner = self.contraction
        if norm == "2" and inner.structure != "tokenwise":
            return inner.lipschitz_bound(num_tokens, "2").unsqueeze(0)
        own = inner.row_bounds(num_tokens, mask, norm) * inner.scale(num_tokens, mask)
        if norm == "2":
            return own.amax(-1, keepdim=True)
        if mask is None:
            return own.amax(-1, keepdim=True) * (2 * (num_tokens - 1) / num_tokens) ** 2
        count = mask.sum(-1, keepdim=True).clamp_min(1)
        return own.expand(mask.shape).amax(-1, keepdim=True) * (2 * (count - 1) / count).square()


def moves_with_tokens(f: Contraction) -> bool:
    r"""Whether a shift of all tokens shifts all rows of f alike: :math:`f(X + 1 t^T) = f(X) + 1 (A t)^T`.

    L2 attention does, since its weights are a matter of differences, unless tokens are mapped into a ball, or rows have
    bounds of their own because they see different tokens; affine maps of tokens do, and chains of such maps.
    """
    if isinstance(f, L2SelfAttention):
        return f.radius is None and f.position_bias is None and not f.causal
    if isinstance(f, FeedForward):
        return len(f.weights) == 1
    if isinstance(f, Compose):
        return all(isinstance(part, Contraction) and moves_with_tokens(part) for part in f.parts)
    return False
