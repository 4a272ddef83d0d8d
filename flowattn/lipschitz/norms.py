"""Norms of sequences of tokens, and upper bounds of the norms of matrices."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, nothing_is_recorded, without_autocast

#: "token": the longest token, in Euclidean length. "inf": the largest entry. "2": the length of all entries together.
Norm = Literal["token", "inf", "2"]


def token_norm(x: Float[Tensor, "*batch tokens features"]) -> Float[Tensor, "*batch"]:
    r"""The length of the longest token.

    .. math:: \|X\| = \max_i \|x_i\|_2

    Example:
        >>> token_norm(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
        tensor(5.)
    """
    return torch.linalg.vector_norm(x, dim=-1).amax(-1)


def sequence_norm(x: Float[Tensor, "*batch tokens features"], norm: Norm = "token") -> Float[Tensor, "*batch"]:
    """The norm of each sequence of a batch, by name.

    Example:
        >>> sequence_norm(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), "inf")
        tensor(4.)
    """
    check_norm(norm)
    if norm == "token":
        return token_norm(x)
    return torch.linalg.vector_norm(x, ord=float(norm), dim=(-2, -1))


def check_norm(norm: str) -> None:
    """Raises for a norm that has no such name."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm must be one of {', '.join(map(repr, get_args(Norm)))}; got norm={norm!r}.")


def spectral_norm_bound(
    matrix: Float[Tensor, "*batch rows columns"], tolerance: float = 0.01
) -> Float[Tensor, "*batch"]:
    r"""An upper bound of the largest singular value, at most `tolerance` above it, by Gram iteration.

    .. math:: \|W\|_2 \le \bigl(\operatorname{tr} A^{2p}\bigr)^{1/4p} \le r^{1/4p} \|W\|_2,
        \qquad A = W W^T \in R^{r \times r}

    The powers are p = 2^k by squaring: products of matrices only, batched and differentiable. Power iteration,
    the usual choice, bounds the norm from below. A margin covers the rounding of the products.

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
        W = W.reshape(-1, rows, columns)
        rank = min(rows, columns)
        num_squarings = math.ceil(math.log2(max(1.0, math.log(rank) / (4 * math.log1p(tolerance)))))
        if torch.compiler.is_compiling() or nothing_is_recorded():
            bound = _gram_iteration(W, num_squarings)[0]
        else:
            bound = _GramIteration.apply(W, num_squarings)[0]
        # The margin of single precision for all: a map must not change when it is evaluated in double.
        return (bound * (1 + 2 * (rows + columns) * torch.finfo(torch.float32).eps)).view(matrix.shape[:-2])


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


def _gram_iteration(W: Tensor, num_squarings: int) -> list[Tensor]:
    """The bound, and the powers A, A^2, A^4, ... on the way to it, each up to a factor."""
    rows, columns = W.shape[-2:]
    tiny = torch.finfo(W.dtype).tiny
    bound = largest_entry(W)
    W = W / bound
    power = torch.bmm(W, W.mT) if rows <= columns else torch.bmm(W.mT, W)  # which is quicker to call than @
    powers = []
    for k in range(num_squarings + 1):
        if k % 3 == 0 or k == num_squarings:  # three squarings shrink a power of norm 1 to no less than r^-4
            # The clamp is for a zero matrix, whose bound is 0 and whose gradient is 0, where the root has none.
            scale = torch.linalg.vector_norm(power, dim=(-2, -1), keepdim=True).clamp_min(tiny)
            bound = bound * scale ** (0.5 / 2**k)
            power = power / scale
        powers.append(power)
        if k < num_squarings:
            power = torch.bmm(power, power)
    return [bound.view(-1), *powers]


def largest_entry(W: Tensor) -> Tensor:
    """The largest entry. A bound of W / size times size does not depend on it, so it needs no gradient."""
    return W.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(W.dtype).tiny)


class _GramIteration(torch.autograd.Function):
    """`_gram_iteration` with half the products in its backward pass, because the powers commute."""

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, num_squarings: int) -> tuple[Tensor, ...]:
        return tuple(_gram_iteration(W, num_squarings))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        W, ctx.num_squarings = inputs
        ctx.save_for_backward(W, *output)
        ctx.save_for_forward(W)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        W, bound, *powers = ctx.saved_tensors
        if torch.is_grad_enabled():
            pull = torch.func.vjp(lambda W: _gram_iteration(W, ctx.num_squarings)[0], W)[1]
            return *pull(g), None
        return _gradient(W, bound, powers) * g[..., None, None], None

    @staticmethod
    def jvp(ctx: Any, dW: Tensor, *_: None) -> Any:
        W, *_ = ctx.saved_tensors
        bound, *powers = _gram_iteration(W, ctx.num_squarings)  # anew, so that it can be differentiated
        return (_gradient(W, bound, powers) * dW).sum((-2, -1)), *[None] * len(powers)


def _gradient(W: Tensor, bound: Tensor, powers: list[Tensor]) -> Tensor:
    # tr A^2p has the gradient A^(2p-1) W with A^(2p-1) = A^p A^(p-1) and p - 1 = p/2 + ... + 2 + 1. The factors that
    # the powers were divided by are restored by <gradient, W> = bound, the map being homogeneous.
    product = powers[-1]
    for power in reversed(powers[:-1]):
        product = torch.bmm(product, power)
    size = largest_entry(W)
    W = W / size
    direction = torch.bmm(product, W) if product.shape[-1] == W.shape[-2] else torch.bmm(W, product)
    along = (direction * W).sum((-2, -1), keepdim=True).clamp_min(torch.finfo(W.dtype).tiny)
    return direction / along * (bound[..., None, None] / size)
