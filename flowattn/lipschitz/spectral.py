"""Upper bounds of the spectral norms of matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import without_autocast
from flowattn.lipschitz.gram import singular_value, upper_bound


def spectral_norm_bound(
    matrix: Float[Tensor, "*batch rows columns"], tolerance: float = 0.01
) -> Float[Tensor, "*batch"]:
    r"""An upper bound of the largest singular value, at most `tolerance` above it, by Gram iteration.

    .. math:: \|W\|_2 \le \bigl(\operatorname{tr} A^{2p}\bigr)^{1/4p} \le r^{1/4p} \|W\|_2,
        \qquad A = W W^T \in R^{r \times r}

    The powers are p = 2^k by squaring: products of matrices only, batched and differentiable. Power iteration,
    the usual choice, bounds the norm from below. Large matrices are shifted before each squaring, which saves two or
    three of them, see `flowattn.lipschitz.gram`. A margin covers the rounding of the products.

    Cost: O(r^3 log log r).

    References:
        | Efficient Bound of Lipschitz Constant for Convolutional Layers by Gram Iteration
          (Delattre, Barthelemy, Araujo, Allauzen, 2023)

    Example:
        >>> spectral_norm_bound(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        tensor(3.0000)
    """
    if not tolerance > 0:
        raise ValueError(f"tolerance must be above 0; got tolerance={tolerance}.")
    if matrix.ndim < 2 or not matrix.is_floating_point():
        raise ValueError(
            f"matrix must be of a floating-point type and have shape [..., rows, columns]; "
            f"got {matrix.dtype} of shape {list(matrix.shape)}."
        )
    rows, columns = matrix.shape[-2:]
    with without_autocast(matrix):
        W = at_least_single(matrix).reshape(-1, rows, columns)
        bound = upper_bound(W, singular_value(W, tolerance))
        return (bound * margin(rows, columns)).view(matrix.shape[:-2])


def at_least_single(t: Tensor) -> Tensor:
    """In single precision what has less of it: a bound that is rounded is none."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def margin(rows: int, columns: int) -> float:
    """Covers the rounding of a bound, of single precision for all: evaluated in double, a map must not change."""
    return 1 + 2 * (rows + columns) * torch.finfo(torch.float32).eps
