r"""First and second moments of tokens under weights, in the layout of one more attention.

The products :math:`z_a z_b` with :math:`a \le b` ride beside z as values, each once, so that one average gives both
moments. Everything here can be differentiated any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def with_squares(z: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens moments"]:
    """The tokens, their products, and zeros up to a width that matrix products like.

    Example:
        >>> with_squares(torch.tensor([[2.0, 3.0]]))
        tensor([[2., 3., 4., 6., 9., 0., 0., 0.]])
    """
    first, second, _ = _pairs(z.shape[-1], z)
    return torch.cat([z, (z @ first) * (z @ second)], -1)


def mean_and_covariance(
    moments: Float[Tensor, "*batch tokens moments"],
    width: int,
    *,
    scale: float = 1.0,
    diagonal: Float[Tensor, "*batch tokens"] | None = None,
) -> tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch tokens width width"]]:
    r"""The mean m, and :math:`\text{scale}\,(E\, z z^T - m m^T) + \text{diagonal}\, I`.

    Example:
        >>> z = torch.tensor([[1.0], [3.0]])
        >>> mean_and_covariance(with_squares(z).mean(0, keepdim=True), width=1)
        (tensor([[2.]]), tensor([[[1.]]]))
    """
    m, products = moments.tensor_split([width], -1)
    if diagonal is None:
        diagonal = torch.zeros_like(m[..., 0])
    if torch.compiler.is_compiling():
        return m, _covariance(m, products, diagonal, scale)
    covariance: Tensor = _Covariance.apply(m, products, diagonal, scale)
    return m, covariance


def _covariance(m: Tensor, products: Tensor, diagonal: Tensor, scale: float) -> Tensor:
    width = m.shape[-1]
    second = (products @ _pairs(width, m)[2]).unflatten(-1, (width, width))
    # A token that sees itself alone has exactly no covariance, as long as its products are rounded but once.
    covariance = second.sub_(m.unsqueeze(-1) * m.unsqueeze(-2)).mul_(scale)
    covariance.diagonal(dim1=-2, dim2=-1).add_(diagonal.unsqueeze(-1))
    return covariance


class _Covariance(torch.autograd.Function):
    """`_covariance` with a backward pass of as few sweeps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(m: Tensor, products: Tensor, diagonal: Tensor, scale: float) -> Tensor:
        return _covariance(m, products, diagonal, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        m, _, _, ctx.scale = inputs
        ctx.save_for_backward(m)
        ctx.save_for_forward(m)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (m,) = ctx.saved_tensors
        both = g + g.mT
        dm = (both * m.unsqueeze(-2)).sum(-1) * -ctx.scale
        full = _pairs(m.shape[-1], m)[2] * ctx.scale
        return dm, g.flatten(-2) @ full.mT, g.diagonal(dim1=-2, dim2=-1).sum(-1), None

    @staticmethod
    def jvp(ctx: Any, dm: Tensor, dproducts: Tensor, ddiagonal: Tensor, _: None) -> Tensor:
        (m,) = ctx.saved_tensors
        second = (dproducts @ (_pairs(m.shape[-1], m)[2] * ctx.scale)).unflatten(-1, (m.shape[-1], m.shape[-1]))
        outer = m.unsqueeze(-1) * dm.unsqueeze(-2)
        return second - ctx.scale * (outer + outer.mT) + torch.diag_embed(ddiagonal.unsqueeze(-1).expand_as(m))


def _pairs(width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Takes z to the factors of its products z_a z_b with a <= b, each once, and the products to a full matrix.

    Matrices of zeros and ones: an index would be differentiated by scattering, which is slow.
    """
    identity = torch.eye(width, dtype=like.dtype, device=like.device)
    a, b = torch.triu_indices(width, width, device=like.device)
    first, second = (F.pad(identity[:, index], (0, -(width + len(index)) % 8)) for index in (a, b))
    both = first.unsqueeze(1) * second.unsqueeze(0)
    full = torch.maximum(both, both.transpose(0, 1))
    return first, second, full.permute(2, 0, 1).flatten(1)
