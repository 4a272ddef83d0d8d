r"""L2 attention that looks at each pair of tokens once, on CPU.

.. math:: E_{ij} = 2^{-|u_i - u_j|^2 / 2}, \qquad m_i = \frac{\sum_j E_{ij} u_j}{\sum_j E_{ij}}

Without bias and mask the weights are symmetric before they are divided, and largest, namely 1, on the diagonal: half of
them are enough, and no row needs its maximum. For a pair of tokens forward takes three products of d numbers, where
dot-product attention takes four, and backward seven, where it takes ten:

.. math:: du_i = \sum_j E_{ij} g'_j + \sum_j T_{ij} (u_j - u_i), \qquad
    T_{ij} = \log 2\; E_{ij} \bigl( g'_i \cdot (u_j - m_i) + g'_j \cdot (u_i - m_j) \bigr),

with g the gradient of m and :math:`g'_i = g_i / \sum_j E_{ij}`. Tokens come last in here, [heads, width, tokens], where
the products are fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.kernels.fused_l2 import fused_l2_attention
from flowattn.kernels.scratch import Scratch, as_they_are, shaped

#: How many weights to compute at a time, so that they stay in the cache.
AT_A_TIME = 2**19

#: No weight is less than two to this: it is nothing beside the 1 on the diagonal, and tiny numbers are slow.
LOWEST = -100.0

LOG2 = math.log(2)

_scratch = Scratch(as_they_are)


def is_worth_it(z: Float[Tensor, "*batch tokens width"]) -> bool:
    """Whether `pair_attention` can be called, and is faster than a fused kernel."""
    return (
        z.device.type == "cpu"
        and z.dtype in (torch.float32, torch.float64)
        and can_look(z)
        and not in_forward_mode()
        and not torch.is_autocast_enabled("cpu")
        and _is_faster(z.shape, recorded=torch.is_grad_enabled() and z.requires_grad)
    )


def _is_faster(shape: torch.Size, *, recorded: bool) -> bool:
    """Whether many steps are better than the single one of torch's kernel, slow at narrow heads and on its way back."""
    tokens, width = shape[-2:]
    if recorded:
        return shape[:-1].numel() * tokens >= 2**20 and (tokens >= 256 or width <= 32)
    return tokens >= (256 if width < 16 else 1536)


def pair_attention(z: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
    r"""Averages the tokens, :math:`\operatorname{softmax}_j(-\|z_i - z_j\|^2 / \sqrt d)\, z_j`.

    Derivatives of derivatives are those of `fused_l2_attention`, at O(N^2) memory.

    Cost: O(N^2 d) time, O(N d) memory.

    Example:
        >>> pair_attention(torch.tensor([[0.0], [2.0], [99.0]]))[2].round()
        tensor([99.])
    """
    m: Tensor = _PairAttention.apply(z)[0]
    return m


class _PairAttention(torch.autograd.Function):
    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape, z, width, rows = z.shape, _by_heads(z), z.shape[-1], _rows_of_sums(z.shape[-1])
        m, mean, total = _side_by_side(z), _rows(z, width), _rows(z, 1)
        desk = _desk(z, max(width + 2, rows), width + 2, rows)
        for part, heads in _parts(z):
            room, left, right, *sums = (t[: heads.stop - heads.start] for t in desk)
            _, centre, unit = _place(z[part].mT, left, right)
            counted = _blocks(left[:, :rows])
            for i, j, E in _weights(left[:, : width + 2], right, room):
                if i == j:
                    torch.bmm(counted[i], E, out=sums[i])
                else:
                    sums[j].baddbmm_(counted[i], E)
                    sums[i].baddbmm_(counted[j], E.mT)
            for found, near, count in zip(sums, _blocks(mean[heads]), _blocks(total[heads]), strict=True):
                torch.div(found[:, :width], count.copy_(found[:, width : width + 1]), out=near)
            torch.add(centre, mean[heads].view(z[part].mT.shape), alpha=1 / unit, out=m[part].mT)
        return m.reshape(shape), mean, total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dm: Tensor | None, *_: None) -> Tensor | None:
        if dm is None:
            return None
        z, mean, total = ctx.saved_tensors
        if torch.is_grad_enabled() or not can_look(dm):
            gradient: Tensor = torch.func.vjp(lambda z: fused_l2_attention(z, None, causal=False), z)[1](dm)[0]
            return gradient
        shape, z, width, rows = z.shape, _by_heads(z), z.shape[-1], _rows_of_sums(z.shape[-1])
        dz, dm = _side_by_side(z), _by_heads(dm)
        desk = _desk(z, width + 2 + max(width + 2, rows), 2 * width + 3, rows, num_rooms=2)
        for part, heads in _parts(z):
            # T / E is a product of rows as the weights are, and theirs are among them: with a_i = g'_i m_i it is that
            # of [g', 0, -a, u, 1] and [u, half, 1, g', -a].
            room, more_room, left, right, *sums = (t[: heads.stop - heads.start] for t in desk)
            u = _place(z[part].mT, left[:, width + 2 :], right[:, : width + 2])[0]
            g = torch.div(dm[part].mT.reshape(u.shape), total[heads], out=right[:, width + 2 : -1])
            a = torch.mul(mean[heads], g, out=left[:, :width]).sum(-2)
            left[:, :width], left[:, width], left[:, width + 1], right[:, -1] = g, 0, -a, -a
            gradients, counted = _blocks(left[:, :rows]), _blocks(left[:, width + 2 : width + 2 + rows])
            lefts, rights = _blocks(left[:, : 2 * width + 3]), _blocks(right)
            for i, j, E in _weights(left[:, width + 2 : 2 * width + 4], right[:, : width + 2], room):
                T = torch.bmm(lefts[i].mT, rights[j], out=shaped(more_room, E.shape)).mul_(E)
                if i == j:
                    T.diagonal(dim1=-2, dim2=-1).zero_()  # what a token does to itself is nothing, or rounding
                    torch.bmm(gradients[i], E, out=sums[i]).baddbmm_(counted[i], T, alpha=LOG2)
                else:
                    sums[j].baddbmm_(gradients[i], E).baddbmm_(counted[i], T, alpha=LOG2)
                    sums[i].baddbmm_(gradients[j], E.mT).baddbmm_(counted[j], T.mT, alpha=LOG2)
            for found, own, change in zip(sums, _blocks(u), _blocks(dz[part].mT), strict=True):
                found, own = found.view(*change.shape[:2], *found.shape[1:]), own.view(change.shape)
                torch.addcmul(found[..., :width, :], found[..., width : width + 1, :], own, value=-1, out=change)
        return dz.reshape(shape)


def _place(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, float]:
    """Writes rows whose products are the exponents of the weights, [u, 1, half, 0...] and [u, half, 1].

    Returns the tokens u, about their centre and in the unit in which weights are powers of two, that centre and unit.
    """
    width = z.shape[-2]
    unit = math.sqrt(2 / LOG2) / width**0.25
    centre = z.mean(-1, keepdim=True)
    u = right[:, :width]
    torch.sub(z, centre, out=u.view(z.shape)).mul_(unit)
    half = torch.mul(u, u, out=left[:, :width]).sum(-2).mul_(-0.5)
    left[:, :width], left[:, width], left[:, width + 1], left[:, width + 2 :] = u, 1, half, 0
    right[:, width], right[:, width + 1] = half, 1
    return u, centre, unit


def _weights(left: Tensor, right: Tensor, room: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The weights E between the i-th and the j-th block of tokens, j from i down to 0.

    The next weights are written where the last ones were.
    """
    lefts, rights = _blocks(left), _blocks(right)
    for i in range(len(lefts)):
        for j in range(i, -1, -1):
            shape = len(left), lefts[i].shape[-1], rights[j].shape[-1]
            E = torch.bmm(lefts[i].mT, rights[j], out=shaped(room, shape))
            E.clamp_(LOWEST, 0).exp2_()
            if i == j:  # far from the centre rounding might say otherwise, and of any pair that it weighs over 1
                E.diagonal(dim1=-2, dim2=-1).fill_(1)
            yield i, j, E


def _rows_of_sums(width: int) -> int:
    """How many rows of `left` to sum up, [u, 1] for the tokens and the weights.

    Of a single head torch multiplies 5 to 7 and 9 to 11 rows in another order than of several.
    """
    return width + 1 if width > 10 else 4 * (width // 4 + 1)


def _at_a_time(z: Tensor) -> int:
    """How many heads to take at a time."""
    return min(max(1, AT_A_TIME // max(1, _block_size(z.shape[2])) ** 2), z.shape[:2].numel())


def _parts(z: Tensor) -> Iterator[tuple[tuple[slice, slice], slice]]:
    """A few heads at a time: where they are in z, [batch, heads, tokens, width], and among all heads in a row."""
    batch, heads = z.shape[:2]
    count = _at_a_time(z)
    samples, some = max(1, count // max(1, heads)), max(1, min(count, heads))
    for sample, head in itertools.product(range(0, batch, samples), range(0, heads, some)):
        part = slice(sample, min(sample + samples, batch)), slice(head, min(head + some, heads))
        start, number = sample * heads + head, math.prod(s.stop - s.start for s in part)
        yield part, slice(start, start + number)


def _block_size(num_tokens: int) -> int:
    """How many tokens to take at a time: large products are quick, but weights on the diagonal are computed twice.

    Blocks are alike as far as possible. The number of heads has no say, or a sequence would be rounded as its batch
    mates have it.
    """
    largest = 128 if num_tokens < 512 else 256 if num_tokens < 2048 else 512
    num_blocks = math.ceil(num_tokens / largest)
    return 8 * math.ceil(num_tokens / max(1, num_blocks) / 8)


def _blocks(t: Tensor) -> tuple[Tensor, ...]:
    return t.split(_block_size(t.shape[-1]), -1)


def _by_heads(z: Tensor) -> Tensor:
    """The tokens as [batch, heads, tokens, width]."""
    return z.reshape(z.shape[:-3].numel(), z.shape[-3] if z.ndim > 2 else 1, *z.shape[-2:])


def _side_by_side(z: Tensor) -> Tensor:
    """Room for as many tokens, the heads of each side by side: so they are wanted next."""
    batch, heads, tokens, width = z.shape
    return z.new_empty(batch, tokens, heads, width).transpose(1, 2)


def _rows(z: Tensor, count: int) -> Tensor:
    """Room for so many numbers of each token, [heads, count, tokens]."""
    return z.new_empty(z.shape[:2].numel(), count, z.shape[2])


def _desk(z: Tensor, on_the_left: int, on_the_right: int, summed: int, num_rooms: int = 1) -> tuple[Tensor, ...]:
    """Rooms for the weights between two blocks of tokens, so many rows of both sides, and sums of each block.

    All for as many heads as are taken at a time. Sums are not those of all tokens at once, because torch adds to blocks
    of larger matrices slowly.
    """
    heads, tokens = _at_a_time(z), z.shape[2]
    rooms = [(heads, _block_size(tokens) ** 2)] * num_rooms
    rows = [(heads, count, tokens) for count in (on_the_left, on_the_right)]
    return _scratch(z, *rooms, *rows, *((heads, summed, block.shape[-1]) for block in _blocks(z.mT)))
