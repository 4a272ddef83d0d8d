"""What every contraction is: a map of tokens that knows its Lipschitz bound and its derivatives."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from flowattn.checks import check_context, check_finite, check_mask, check_tokens, without_autocast
from flowattn.contractions.blocks import DenseBlocks, TokenBlocks
from flowattn.kernels.determinants import logabsdet_of_blocks
from flowattn.lipschitz.norms import Norm, check_norm
from flowattn.lipschitz.spectral import at_least_single

#: What the Jacobian looks like over tokens: block-diagonal, block lower triangular, or full.
Structure = Literal["tokenwise", "causal", "dense"]

#: A derivative at a point: it takes a direction [B, N, D] to the change of the map along it.
Push = Callable[[Tensor], Tensor]

Method = TypeVar("Method", bound=Callable[..., Any])


def full_precision(method: Method) -> Method:
    """Runs a method without autocast, then on float32 where it was given less: a bound that is rounded is none."""

    def full(value: Any) -> Any:
        return at_least_single(value) if isinstance(value, Tensor) else value

    @functools.wraps(method)
    def wrapper(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(x.device.type):
            if x.dtype in (torch.float16, torch.bfloat16) and isinstance(self, Contraction):
                raise ValueError(
                    f"x must be of single or double precision, since a bound that is rounded is none; got {x.dtype}. "
                    "Use autocast, or a transform of this map."
                )
            return method(self, x, *args, **kwargs)
        with without_autocast(x):
            return method(self, full(x), *map(full, args), **{k: full(v) for k, v in kwargs.items()})

    return wrapper  # type: ignore[return-value]


class Contraction(nn.Module):
    r"""A map f of tokens [B, N, D] whose Lipschitz constant is at most `coefficient`, at all times.

    .. math:: f(X)_i = \frac{c}{\max(c, L_i)}\, g(X)_i

    g is the free map of the subclass and L_i a bound of its row i, in every call that of the weights as they are: there
    is nothing to update after an optimiser's step or a loaded state, and gradients flow through it. With
    ``coefficient=None`` f is g. `mask` [B, N] is True at real tokens: padding is not read, its rows are zero.
    `context` [B, C] or [B, N, C] shifts g from inside, which changes no Lipschitz constant.

    A subclass gives `free`, `row_bounds` and `structure`, and closed forms of the derivatives where it has them:
    `free_linearize`, `free_diagonal`, `free_jacobian`. The defaults differentiate automatically.
    """

    structure: Structure
    norm: Norm = "token"
    max_tokens: int | None = None

    def __init__(
        self,
        features: int,
        *,
        coefficient: float | None,
        out_features: int | None = None,
        context_features: int | None = None,
    ) -> None:
        super().__init__()
        if coefficient is not None and (isinstance(coefficient, str) or not 0 < coefficient < 1):
            raise ValueError(f"coefficient must be None or between 0 and 1; got coefficient={coefficient!r}.")
        self.features = features
        self.out_features = features if out_features is None else out_features
        self.context_features = context_features
        self.coefficient = coefficient
        # It goes where the module goes, and says so where there is no parameter to ask.
        self.register_buffer("_empty", torch.empty(0), persistent=False)

    # -- what a subclass gives

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        """The map before it is scaled. Padding is given as zeros, and its rows may hold anything finite."""
        raise NotImplementedError

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        """Bounds L_i of the rows of the free map: [N], [1] if all are the same, or [B, N] with a mask."""
        raise NotImplementedError

    def whole_bound(self, rows: Tensor, norm: Norm) -> Tensor:
        """The bound of the whole map from those of its rows. For norm="2" this one is right if f is tokenwise."""
        return rows.amax(-1)

    def spread(self, num_tokens: int, mask: Tensor | None) -> Tensor | float:
        """How much smaller than that of the whole map the bounds of its rows must be."""
        return 1.0

    def rounding(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor, *, sharp: bool = False
    ) -> Tensor:
        """What rounding may change of the map, scaled so, at x: [B], in units of the precision, in the norm of the map.

        It comes on top of what is in proportion to the length of x. If `sharp`, it may take as long as the map itself
        to find a smaller number.
        """
        return x.new_zeros(len(x))

    def scaled(self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor) -> Tensor:
        """The free map with its rows multiplied by the scale, [N], [1] or [B, N]."""
        return self.free(x, mask, context) * scale.unsqueeze(-1)

    def free_linearize(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Push]:
        """The free map at x, and its derivative there as a function of the direction."""

        def free(x: Tensor) -> Tensor:
            return self.free(x, mask, context)

        return free(x), lambda v: torch.func.jvp(free, (x,), (v,))[1]

    def free_diagonal(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, TokenBlocks]:
        """The free map and the diagonal blocks of its Jacobian."""
        if self.structure != "tokenwise":
            value, jacobian = self.free_jacobian(x, mask, context)
            return value, DenseBlocks(jacobian.diagonal(dim1=1, dim2=3).movedim(-1, 1))
        value, pull = torch.func.vjp(lambda x: self.free(x, mask, context), x)  # type: ignore[misc]
        rows = torch.eye(self.out_features, dtype=x.dtype, device=x.device)
        cotangents = rows[:, None, None].expand(-1, *value.shape[:2], -1)
        (jacobian,) = torch.func.vmap(pull)(cotangents)
        return value, DenseBlocks(jacobian.movedim(0, 2))

    def free_jacobian(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """The free map and its Jacobian [B, N, D_out, N, D_in]."""
        if self.structure == "tokenwise":
            value, blocks = self.free_diagonal(x, mask, context)
            return value, torch.diag_embed(blocks.dense().movedim(1, -1), dim1=1, dim2=3)
        value, pull = torch.func.vjp(lambda x: self.free(x, mask, context), x)  # type: ignore[misc]
        tokens, features = value.shape[1:]
        rows = torch.eye(tokens * features, dtype=x.dtype, device=x.device).unflatten(-1, (tokens, features))
        (jacobian,) = torch.func.vmap(pull)(rows[:, None].expand(-1, len(x), -1, -1))
        return value, jacobian.movedim(0, 1).unflatten(1, (tokens, features))

    def scaled_jacobian(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The same with rows multiplied by the scale, [N], [1] or [B, N]."""
        value, jacobian = self.free_jacobian(x, mask, context)
        return value * scale.unsqueeze(-1), jacobian * scale[..., None, None, None]

    def scaled_logabsdet(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The free map with its rows multiplied by the scale, and log|det(I + J)| of that, [B]."""
        value, jacobian = self.scaled_jacobian(x, mask, context, scale)
        return value, logabsdet_of_blocks(jacobian)

    # -- what everybody else calls

    @full_precision
    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """The map f."""
        x, context = self._checked(x, mask, context)
        if self.coefficient is None and mask is None:
            return self.free(x, mask, context)
        return self.scaled(x, mask, context, self.scale(x.shape[1], mask))

    @full_precision
    def linearize(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> tuple[Tensor, Push]:
        """The map f at x, and its derivative there: a function that takes a direction v to J v."""
        x, context = self._checked(x, mask, context)
        value, free_push = self.free_linearize(x, mask, context)
        scale = self.scale(x.shape[1], mask).unsqueeze(-1)

        def push(v: Tensor) -> Tensor:
            v = v.to(value.dtype)
            with without_autocast(v):
                return free_push(v if mask is None else v.masked_fill(~mask.unsqueeze(-1), 0)) * scale

        return value * scale, push

    def jvp(
        self, x: Tensor, v: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The map f and its derivative along v, [B, N, D] both."""
        value, push = self.linearize(x, mask, context)
        return value, push(v)

    @full_precision
    def forward_and_diagonal(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, TokenBlocks]:
        """The map f and the diagonal blocks J_ii of its Jacobian, those of padding zero."""
        x, context = self._checked(x, mask, context)
        value, blocks = self.free_diagonal(x, mask, context)
        scale = self.scale(x.shape[1], mask)
        return value * scale.unsqueeze(-1), blocks.scaled(scale)

    @full_precision
    def forward_and_jacobian(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The map f and its Jacobian [B, N, D_out, N, D_in], zero at padding."""
        x, context = self._checked(x, mask, context)
        return self.scaled_jacobian(x, mask, context, self.scale(x.shape[1], mask))

    @full_precision
    def forward_and_logabsdet(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The map f and log|det(I + J)|, [B], from its whole Jacobian."""
        x, context = self._checked(x, mask, context)
        return self.scaled_logabsdet(x, mask, context, self.scale(x.shape[1], mask))

    def scale(self, num_tokens: int, mask: Tensor | None = None) -> Tensor:
        """What row i of the free map is multiplied with: [N], [1], or [B, N] with a mask, zero at padding."""
        like = self._like()
        with without_autocast(like):
            if self.coefficient is None:
                scale = like.new_ones(1)
            else:
                bounds, spread = self.row_bounds(num_tokens, mask, self.norm), self.spread(num_tokens, mask)
                bounds = bounds if isinstance(spread, float) and spread == 1 else bounds * spread
                target = self._target(bounds.dtype)
                scale = target / bounds.clamp_min(target)
            return scale if mask is None else scale * mask

    def lipschitz_bound(self, num_tokens: int, norm: Norm = "token", mask: Tensor | None = None) -> Tensor:
        """An upper bound of the Lipschitz constant of f on sequences of so many tokens, all of them real: [].

        With a mask [B, N] it is that for each sequence, [B]. In a norm that f is not scaled for, those of fewer real
        tokens may have the larger one.
        """
        check_norm(norm)
        self._check_length(num_tokens)
        with without_autocast(self._like()):
            rows = self.row_bounds(num_tokens, mask, norm) * self.scale(num_tokens, mask)
            bound = self.whole_bound(rows.expand(*([] if mask is None else [len(mask)]), num_tokens), norm)
            scaled_for_it = self.coefficient is not None and norm == self.norm
            return bound.clamp_max(self._target(bound.dtype)) if scaled_for_it else bound

    def bound_below_one(self, num_tokens: int) -> float:
        """The same as a number, in the norm of f. Raises unless it is below 1, and f a contraction."""
        bound = self.lipschitz_bound(num_tokens, self.norm).item()
        if not bound < 1:
            raise ValueError(
                f"contraction must have a Lipschitz bound below 1; got {bound:.3g} for num_tokens={num_tokens}. "
                "Give it a coefficient."
            )
        return bound

    def _target(self, dtype: torch.dtype) -> float:
        assert self.coefficient is not None
        return self.coefficient * (1 - 4 * torch.finfo(dtype).eps)  # rounded, still at most the coefficient

    def _like(self) -> Tensor:
        return next(itertools.chain(self.parameters(), self.buffers()))

    def _checked(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        check_tokens("x", x, self.features)
        self._check_length(x.shape[1])
        if mask is not None:
            check_mask(mask, x)
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        check_finite("x", x)
        check_context(context, x, self.context_features)
        if context is not None:
            if mask is not None and context.shape[:2] == mask.shape and context.ndim == 3:
                context = context.masked_fill(~mask.unsqueeze(-1), 0)
            check_finite("context", context)
            context = context.unsqueeze(1) if context.ndim == 2 else context
        return x, context

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens < 1 or num_tokens % 1:
            raise ValueError(
                f"there must be a whole number of tokens, at least one token; got num_tokens={num_tokens}."
            )
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise ValueError(f"a sequence may have at most max_tokens={self.max_tokens} tokens; got {num_tokens}.")

    def extra_repr(self) -> str:
        return f"features={self.features}, coefficient={self.coefficient}, structure={self.structure!r}"
