r"""L2 attention that looks at each pair of tokens once, on CPU.

.. math:: E_{ij} = e^{-|u_i - u_j|^2 / s}, \qquad m_i = \frac{\sum_j E_{ij} u_j}{\sum_j E_{ij}}

Without bias and mask the weights are symmetric before they are divided, and largest, namely 1, on the diagonal: half of
them are enough, and no row needs its maximum. For a pair of tokens forward takes three products of d numbers, where
dot-product attention takes four, and backward seven, where it takes ten:

.. math:: du_i = \sum_j E_{ij} g'_j + \sum_j T_{ij} (u_j - u_i), \qquad
    T_{ij} = \tfrac2s E_{ij} \bigl( g'_i \cdot (u_j - m_i) + g'_j \cdot (u_i - m_j) \bigr),

with u the tokens about their centre, g the gradient of m and :math:`g'_i = g_i / \sum_j E_{ij}`. Tokens come last in
here, [heads, width, tokens], where the products are fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.fused_l2 import fused_l2_attention
from flowattn.scratch import Scratch

#: How many weights to compute at a time, so that they stay in the cache.
AT_A_TIME = 2**19

#: No weight is less than two to this: it is nothing beside the 1 on the diagonal, and tiny numbers are slow.
LOWEST = -100.0

LOG2 = math.log(2)

_scratch = Scratch()


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
        left, right, room, _, *sums = _desk(z, max(width + 2, rows), width + 2, rows)
        centre = _place(z, left, right)[1]
        for heads in _parts(z):
            counted, found = _blocks(left[heads, :rows]), [t[heads] for t in sums]
            for i, j, E in _weights(left[heads, : width + 2], right[heads], room):
                if i == j:
                    torch.bmm(counted[i], E, out=found[i])
                else:
                    found[j].baddbmm_(counted[i], E)
                    found[i].baddbmm_(counted[j], E.mT)
        m, mean, total = torch.empty_like(z), _rows(z, width), _rows(z, 1)
        for of_block, near, count in zip(sums, _blocks(mean), _blocks(total), strict=True):
            torch.div(of_block[:, :width], count.copy_(of_block[:, width : width + 1]), out=near)
        torch.add(centre, mean.view(z.mT.shape), out=m.mT)
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
        # T / E is a product of rows as the logits are, and theirs are among them: with a_i = g'_i m_i it is that of
        # [g', 0, -a, u, 1] and [u, half, 1, g', -a].
        left, right, room, more_room, *sums = _desk(z, width + 2 + max(width + 2, rows), 2 * width + 3, rows)
        u = _place(z, left[:, width + 2 :], right[:, : width + 2])[0]
        g = torch.div(_by_heads(dm).mT.reshape(u.shape), total, out=right[:, width + 2 : -1])
        a = torch.mul(mean, g, out=left[:, :width]).sum(-2)
        left[:, :width], left[:, width], left[:, width + 1] = g, 0, torch.neg(a, out=right[:, -1])
        steep = _steepness(width)
        for heads in _parts(z):
            pulled, counted = (_blocks(left[heads, start : start + rows]) for start in (0, width + 2))
            lefts, rights = _blocks(left[heads, : 2 * width + 3]), _blocks(right[heads])
            found = [t[heads] for t in sums]
            for i, j, E in _weights(left[heads, width + 2 : 2 * width + 4], right[heads, : width + 2], room):
                T = torch.bmm(lefts[i].mT, rights[j], out=more_room[: E.numel()].view_as(E)).mul_(E)
                if i == j:
                    T.diagonal(dim1=-2, dim2=-1).zero_()  # what a token does to itself is nothing, or rounding
                    torch.bmm(pulled[i], E, out=found[i]).baddbmm_(counted[i], T, alpha=steep)
                else:
                    found[j].baddbmm_(pulled[i], E).baddbmm_(counted[i], T, alpha=steep)
                    found[i].baddbmm_(pulled[j], E.mT).baddbmm_(counted[j], T.mT, alpha=steep)
        dz = torch.empty_like(z)
        for of_block, own, change in zip(sums, _blocks(u), _blocks(dz.mT), strict=True):
            of_block, own = of_block.view(*change.shape[:2], *of_block.shape[1:]), own.view(change.shape)
            torch.addcmul(of_block[..., :width, :], of_block[..., width : width + 1, :], own, value=-1, out=change)
        return dz.reshape(shape)


def _place(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Writes rows whose products are minus half of the squares of distances, [u, 1, half, 1...] and [u, half, 1].

    Returns the tokens u, about their centre, and that centre.
    """
    width = z.shape[-1]
    centre = z.mT.mean(-1, keepdim=True)
    u = right[:, :width]
    torch.sub(z.mT, centre, out=u.view(z.mT.shape))
    half = torch.mul(u, u, out=left[:, :width]).sum(-2).mul_(-0.5)
    left[:, :width], left[:, width:], left[:, width + 1] = u, 1, half
    right[:, width], right[:, width + 1] = half, 1
    return u, centre


def _weights(left: Tensor, right: Tensor, room: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """The weights E between the i-th and the j-th block of tokens, j from i down to 0.

    The next weights are written where the last ones were.
    """
    lefts, rights, steep = _blocks(left), _blocks(right), _steepness(left.shape[1] - 2) / LOG2
    for i in range(len(lefts)):
        for j in range(i, -1, -1):
            shape = len(left), lefts[i].shape[-1], rights[j].shape[-1]
            E = room[: math.prod(shape)].view(shape)
            torch.baddbmm(E, lefts[i].mT, rights[j], beta=0, alpha=steep, out=E).clamp_(LOWEST, 0).exp2_()
            if i == j:  # far from the centre rounding might say otherwise, and of any pair that it weighs over 1
                E.diagonal(dim1=-2, dim2=-1).fill_(1)
            yield i, j, E


def _steepness(width: int) -> float:
    """What half of the square of a distance is multiplied by in a logit."""
    return 2 / math.sqrt(width)


def _rows_of_sums(width: int) -> int:
    """How many rows of `left` to sum up, [u, 1] for the tokens and the weights.

    Of a single head torch multiplies 5 to 7 and 9 to 11 rows in another order than of several.
    """
    return width + 1 if width > 10 else 4 * (width // 4 + 1)


def _parts(z: Tensor) -> Iterator[slice]:
    """A few heads at a time."""
    num_heads, count = z.shape[:2].numel(), max(1, _at_a_time(z))
    for start in range(0, num_heads, count):
        yield slice(start, min(start + count, num_heads))


def _at_a_time(z: Tensor) -> int:
    """How many heads to take at a time."""
    return min(max(1, AT_A_TIME // max(1, _block_size(z.shape[2])) ** 2), z.shape[:2].numel())


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


def _rows(z: Tensor, count: int) -> Tensor:
    """Room for so many numbers of each token, [heads, count, tokens]."""
    return z.new_empty(z.shape[:2].numel(), count, z.shape[2])


def _desk(z: Tensor, on_the_left: int, on_the_right: int, summed: int) -> tuple[Tensor, ...]:
    """Room for so many rows on both sides, for the weights between two blocks of tokens, twice, and for their sums.

    The sums are those of each block, [heads, summed, block], since torch adds to blocks of a larger matrix slowly.
    """
    num_heads, num_tokens = z.shape[:2].numel(), z.shape[2]
    weights = (_at_a_time(z) * _block_size(num_tokens) ** 2,)
    size = max(1, _block_size(num_tokens))
    blocks = (min(size, num_tokens - start) for start in range(0, num_tokens, size))
    rows = ((num_heads, count, num_tokens) for count in (on_the_left, on_the_right))
    return _scratch(z, *rows, weights, weights, *((num_heads, summed, block) for block in blocks))
