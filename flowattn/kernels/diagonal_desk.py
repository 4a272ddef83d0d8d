"""Where `flowattn.kernels.diagonal` works: room for tokens, their products and all gradients, [heads, width, tokens].

Of the products of two features of a token each is there once, in the order of `torch.triu_indices`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowattn.kernels.determinants import small_enough_for_the_cache
from flowattn.kernels.scratch import KEPT, Scratch, shaped


class Desk:
    """Room for what there is of a few samples, all their heads in a row. The next ones have it in the same memory."""

    def __init__(self, *rooms: Tensor) -> None:
        self.near, self.keys, self.v, self.dv, self.dv_of_rows, *rest = rooms
        self.one, self.other, self.dz, self.dkeys, self.logits, self.average, self.dmean, self.blocks = rest
        width, like = self.dz.shape[1], self.dz
        #: The two features of each product, and the same as matrices.
        self.factors = a, b = _factors(width, like)
        self.to_factors = to_one, to_other = to_factors(width, like)
        #: Which two entries of a block are each product, and which of the values is each entry.
        self.entries = width * a + b, width * b + a
        self.values = torch.empty(width**2, dtype=torch.long, device=like.device)
        self.values[self.entries[0]] = self.values[self.entries[1]] = torch.arange(width, width + len(a)).to(a)
        #: 2 / s for a product with two entries, half of it for one on the diagonal, which is counted twice.
        self.share = (2 - (to_one * to_other).sum(0)).unsqueeze(-1) / math.sqrt(width)

    @staticmethod
    def of(z: Tensor, num_rows: int) -> Desk:
        """That for tokens [batch, heads, tokens, width], so many rows of weights at a time, with the tokens laid out.

        Logits are inner products of `near`, the tokens and a row of ones, and `keys`, 2 / s z and -|z|^2 / s. The
        values are the tokens and their products.
        """
        desk = _scratch(z, *_rooms(tuple(z.shape), num_rows))
        width, s = z.shape[-1], math.sqrt(z.shape[-1])
        near, keys = desk.near[:, :width], desk.keys[:, :width]
        near.view(z.mT.shape).copy_(z.mT)
        desk.near[:, width].fill_(1)
        torch.sum(torch.mul(near, near, out=keys), 1, out=desk.keys[:, width]).mul_(-1 / s)
        torch.mul(near, 2 / s, out=keys)
        desk.v[:, :width].copy_(near)
        torch.mul(*desk.select(desk.near, desk.factors), out=desk.v[:, width:])
        return desk

    def select(self, rows: Tensor, which: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Two choices among the rows of [heads, rows, n], one for each product."""
        shape = (len(rows), len(which[0]), rows.shape[2])
        one, other = shaped(self.one, shape), shaped(self.other, shape)
        return torch.index_select(rows, 1, which[0], out=one), torch.index_select(rows, 1, which[1], out=other)

    def pull_products(self, z: Tensor, g: Tensor, out: Tensor) -> Tensor:
        """Adds to `out` the gradient after z, given that after its products. Of z the first rows are read."""
        one, other = self.select(z, self.factors)
        to_one, to_other = (t.expand(len(z), -1, -1) for t in self.to_factors)
        return out.baddbmm_(to_one, other.mul_(g)).baddbmm_(to_other, one.mul_(g))


_scratch = Scratch(Desk)


def to_factors(width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices of zeros and ones [width, products] that take a token to the two factors of each product."""
    identity = torch.eye(width, dtype=like.dtype, device=like.device)
    a, b = _factors(width, like)
    return identity[:, a], identity[:, b]


def _factors(width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    a, b = torch.triu_indices(width, width, device=like.device)
    return a, b


def samples(z: Tensor, num_rows: int) -> list[slice]:
    """As many samples at a time as there is memory to keep for, and more where memory is quick."""
    one = sum(map(math.prod, _rooms((1, *z.shape[1:]), num_rows)))
    count = max(1, max(KEPT, small_enough_for_the_cache(z)) // max(1, one))
    return [slice(start, start + count) for start in range(0, len(z), count)]


def _rooms(shape: tuple[int, ...], num_rows: int) -> list[tuple[int, ...]]:
    """The shapes of the rooms of a desk, for z of a shape."""
    batch, heads, tokens, width = shape
    products = width * (width + 1) // 2
    tokens_and_one, values = [(width + 1, tokens)] * 2, [(width + products, tokens)] * 3
    gradients = [(width, tokens), (width + 1, tokens)]
    of_rows = [(tokens, num_rows), (width + products, num_rows), (width, num_rows), (width**2, num_rows)]
    rooms = [*tokens_and_one, *values, *[(products, tokens)] * 2, *gradients, *of_rows]
    return [(batch * heads, *room) for room in rooms]
