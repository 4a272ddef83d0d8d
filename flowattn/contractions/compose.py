"""Chains of maps: lift narrow tokens, attend where there is room, and come back."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from flowattn.contractions.attention import L2SelfAttention
from flowattn.contractions.base import Contraction, Push, Structure
from flowattn.contractions.blocks import DenseBlocks, TokenBlocks
from flowattn.contractions.feed_forward import FeedForward, TokenLinear
from flowattn.lipschitz.norms import Norm, token_norm


class Compose(Contraction):
    r"""The chain :math:`f = c\, g_K \circ \dots \circ g_1 / \max(c, L)`, applied from left to right.

    The bound is the product of the parts' bounds, row by row; the Jacobian is the product of theirs, so it is
    tokenwise, causal or dense as the least of them. The parts are usually free (``coefficient=None``), and have any
    widths inside. L2 attention among affine maps is taken as attention of the outer width: no Jacobian of the inner
    width, which may be far larger, is built.

    Example:
        >>> from flowattn.contractions import L2SelfAttention, TokenLinear
        >>> lift, back = TokenLinear(2, 32), TokenLinear(32, 2)
        >>> f = Compose(lift, L2SelfAttention(32, 4, coefficient=None), back, coefficient=0.9)
        >>> f(torch.randn(3, 5, 2)).shape, f.structure
        (torch.Size([3, 5, 2]), 'dense')
    """

    def __init__(self, *parts: Contraction, coefficient: float | None = 0.97) -> None:
        if not parts:
            raise ValueError("parts must hold at least one map; got none.")
        for k, part in enumerate(parts):
            if not isinstance(part, Contraction):
                raise TypeError(f"parts must be Contractions; got {type(part).__name__} as part {k}.")
        for k, (one, other) in enumerate(itertools.pairwise(parts)):
            if one.out_features != other.features:
                raise ValueError(
                    f"each part must take what the one before it gives; got part {k} with "
                    f"out_features={one.out_features} before part {k + 1} with features={other.features}."
                )
        widths = {p.context_features for p in parts if p.context_features is not None}
        if len(widths) > 1:
            raise ValueError(f"all parts must have the same context_features; got {sorted(widths)}.")
        if any(p.norm != "token" for p in parts if p.coefficient is not None):
            raise ValueError(
                "parts that are scaled must be scaled in norm='token'; bounds in other norms do not chain."
            )
        super().__init__(
            parts[0].features,
            coefficient=coefficient,
            out_features=parts[-1].out_features,
            context_features=widths.pop() if widths else None,
        )
        self.parts = nn.ModuleList(parts)
        self.structure = functools.reduce(join, (p.structure for p in parts))
        self.lifted = _lifted(parts)
        lengths = [p.max_tokens for p in parts if p.max_tokens is not None]
        self.max_tokens = min(lengths) if lengths else None

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        for part in self.parts:
            x = part(x, mask, self._for(part, context))
        return x

    def rounding(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor, *, sharp: bool = False
    ) -> Tensor:
        total = x.new_zeros(len(x))
        for part in self.parts:
            assert isinstance(part, Contraction)
            own, given = part.scale(x.shape[1], mask), self._for(part, context)
            stretch = part.row_bounds(x.shape[1], mask).amax(-1) if part.coefficient is None else part.coefficient
            total = total * stretch + part.rounding(x, mask, given, own, sharp=sharp)
            x = part.scaled(x, mask, given, own)
            total = total + token_norm(x)
        return total * scale.amax(-1)

    def free_linearize(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Push]:
        pushes = []
        for part in self.parts:
            assert isinstance(part, Contraction)
            x, push = part.linearize(x, mask, self._for(part, context))
            pushes.append(push)
        return x, lambda v: functools.reduce(lambda v, push: push(v), pushes, v)

    def free_diagonal(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, TokenBlocks]:
        if self.structure == "dense":
            return super().free_diagonal(x, mask, context)
        if self.lifted is not None:
            attention, shift, *given = self._between(self.lifted, x, mask, context)
            value, blocks = attention.diagonal_with(*given)
            return value + shift, blocks
        product: Tensor | None = None
        for part in self.parts:
            assert isinstance(part, Contraction)
            x, blocks = part.forward_and_diagonal(x, mask, self._for(part, context))
            product = blocks.dense() if product is None else blocks.dense() @ product
        assert product is not None
        return x, DenseBlocks(product)

    def free_jacobian(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.lifted is not None:
            attention, shift, *given = self._between(self.lifted, x, mask, context)
            value, J = attention.jacobian_with(*given)
            return value + shift, J
        blocks: Tensor | None = None  # of the tokens, until they are mixed
        product: Tensor | None = None
        for part in self.parts:
            assert isinstance(part, Contraction)
            own_context = self._for(part, context)
            if part.structure == "tokenwise":
                x, own = part.forward_and_diagonal(x, mask, own_context)
                if product is not None:
                    product = torch.einsum("bnij,bnjmk->bnimk", own.dense(), product)
                else:
                    blocks = own.dense() if blocks is None else own.dense() @ blocks
                continue
            x, J = part.forward_and_jacobian(x, mask, own_context)
            if product is not None:
                product = torch.einsum("bnipj,bpjmk->bnimk", J, product)
            else:
                product = J if blocks is None else torch.einsum("bnimj,bmjk->bnimk", J, blocks)
        if product is None:
            assert blocks is not None
            product = torch.diag_embed(blocks.movedim(1, -1), dim1=1, dim2=3)
        return x, product

    def scaled_logabsdet(
        self, x: Tensor, mask: Tensor | None, context: Tensor | None, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.lifted is None or self.structure != "dense" or scale.numel() != 1:
            return super().scaled_logabsdet(x, mask, context, scale)
        attention, shift, W, B, *given = self._between(self.lifted, x, mask, context)
        value, logabsdet = attention.logabsdet_with(W, B * scale, *given)
        return value + shift * scale, logabsdet

    def _between(self, place: int, x: Tensor, mask: Tensor | None, context: Tensor | None) -> tuple[Any, ...]:
        """The attention at this place, what the maps after it add to its values, and what its `..._with` take."""
        before, (attention, *after) = self.parts[:place], self.parts[place:]
        assert isinstance(attention, L2SelfAttention)
        W: Tensor = attention.W
        B: Tensor = attention.B
        shift = x.new_zeros(1, 1, attention.features)
        for part in before:
            x = part(x, mask, self._for(part, context))
        for part in reversed(before):
            W = _matrix(part).mT @ W
        for part in after:
            B, shift = B @ _matrix(part).mT, part(shift)
        return attention, shift, W, B, x, mask, self._for(attention, context)

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        rows: Tensor | None = None
        for part in self.parts:
            assert isinstance(part, Contraction)
            if norm == "token":
                own = part.row_bounds(num_tokens, mask) * part.scale(num_tokens, mask)
            else:
                own = part.lipschitz_bound(num_tokens, norm).unsqueeze(0)
            rows = own if rows is None else own * _seen(rows, part.structure)
        assert rows is not None
        return rows

    def _for(self, part: nn.Module, context: Tensor | None) -> Tensor | None:
        return context if part.context_features is not None else None

    def extra_repr(self) -> str:
        return f"coefficient={self.coefficient}, structure={self.structure!r}"


def _lifted(parts: tuple[Contraction, ...]) -> int | None:
    """The place of L2 attention if all other parts are affine, so that they are as good as part of its matrices.

    Subclasses are left alone: they may be other maps.
    """
    places = [k for k, part in enumerate(parts) if type(part) not in (FeedForward, TokenLinear) or part.matrix is None]
    if len(places) != 1 or type(parts[places[0]]) is not L2SelfAttention:
        return None
    attention, *after = parts[places[0] :]
    is_plain = attention.coefficient is None and all(part.context_features is None for part in after)
    return places[0] if is_plain else None


def _matrix(part: nn.Module) -> Tensor:
    """The matrix of an affine part, scaled as the part is."""
    assert isinstance(part, FeedForward) and part.matrix is not None
    return part.matrix if part.coefficient is None else part.matrix * part.scale(num_tokens=1)


def join(one: Structure, other: Structure) -> Structure:
    """The structure of a product of Jacobians: the least special of the two."""
    order: tuple[Structure, ...] = ("tokenwise", "causal", "dense")
    return max(one, other, key=order.index)


def _seen(rows: Tensor, structure: Structure) -> Tensor:
    """The largest bound among the rows that each row of the next part sees."""
    if structure == "tokenwise":
        return rows
    if structure == "causal":
        return rows.cummax(-1).values
    return rows.amax(-1, keepdim=True)
