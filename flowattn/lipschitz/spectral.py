"""Upper bounds of the spectral norms of matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, nothing_is_recorded, without_autocast
from flowattn.lipschitz.gram import largest_singular_value


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
    rows, columns = matrix.shape[-2:]
    with without_autocast(matrix):
        W = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
        bound = largest_singular_value(W.reshape(-1, rows, columns), tolerance)
        return (bound * margin(rows, columns)).view(matrix.shape[:-2])


def margin(rows: int, columns: int) -> float:
    """Covers the rounding of a bound, of single precision for all: evaluated in double, a map must not change."""
    return 1 + 2 * (rows + columns) * torch.finfo(torch.float32).eps


class RememberedNorm:
    """`spectral_norm_bound`, computed once for matrices of the same values as long as no derivative is taken.

    An evaluation knows its weights from the call before. It compares every number, so there is nothing to reset: not
    after an optimiser's step, a loaded state or a change of `weight.data`. On CPU only, where comparing waits for
    nothing. Copies and saved modules start without a memory.

    Args:
        num_matrices: how many to remember, a copy of each.

    Example:
        >>> norm, matrix = RememberedNorm(num_matrices=1), torch.eye(2)
        >>> with torch.no_grad():
        ...     norm(matrix) == spectral_norm_bound(matrix)
        tensor(True)
    """

    def __init__(self, num_matrices: int) -> None:
        self.num_matrices = num_matrices
        self.known: tuple[tuple[Tensor, float, Tensor], ...] = ()

    def __call__(
        self, matrix: Float[Tensor, "*batch rows columns"], tolerance: float = 0.01
    ) -> Float[Tensor, "*batch"]:
        """The bound of the matrix."""
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if not (nothing_is_recorded() and can_look(matrix)) or matrix.device.type != "cpu" or is_traced:
            return spectral_norm_bound(matrix, tolerance)
        for known, known_tolerance, bound in self.known:
            if known_tolerance == tolerance and known.dtype == matrix.dtype and torch.equal(known, matrix):
                return bound.clone()
        bound = spectral_norm_bound(matrix, tolerance)
        # A new tuple, since another thread may be reading the old one.
        self.known = (*self.known, (matrix.clone(), tolerance, bound))[-self.num_matrices :]
        return bound.clone()

    def __reduce__(self) -> tuple[type[RememberedNorm], tuple[int]]:
        return RememberedNorm, (self.num_matrices,)
