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

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.fused_l2 import fused_l2_attention

#: How many weights to compute at a time, so that they stay in the cache.
AT_A_TIME = 2**19

#: Weights of two to less than this are zero: they are nothing beside the 1 on the diagonal, and tiny numbers are slow.
LOWEST = -120.0

LOG2 = math.log(2)


def is_worth_it(z: Float[Tensor, "*batch tokens width"]) -> bool:
    """Whether `pair_attention` can be called, and is faster than a fused kernel."""
    return (
        z.device.type == "cpu"
        and z.dtype in (torch.float32, torch.float64)
        and can_look(z)
        and not in_forward_mode()
        and not torch.is_autocast_enabled("cpu")
        and z.shape[-2] >= fewest_tokens(z.shape[-1], recorded=torch.is_grad_enabled() and z.requires_grad)
    )


def fewest_tokens(width: int, *, recorded: bool) -> int:
    """With fewer tokens torch's fused kernel is faster. It is slow at narrow heads, and on the way back."""
    return 256 if recorded or width < 16 else 1536


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
        left, right = _rows(z, z.shape[-1] + 2), _rows(z, z.shape[-1] + 2)
        u, centre, unit = _place(z, left, right)
        size = _block_size(u.shape[-1])
        means, totals = _zeros(u, size), _zeros(u[:, :1], size)
        for heads, pairs in _weights(left, right, size):
            tokens = u[heads].split(size, -1)
            for i, j, E in pairs:
                means[j][heads].baddbmm_(tokens[i], E)
                totals[j][heads] += E.sum(-2, keepdim=True)
                if i != j:
                    means[i][heads].baddbmm_(tokens[j], E.mT)
                    totals[i][heads] += E.sum(-1).unsqueeze(-2)
        total = torch.cat(totals, -1)
        mean = torch.cat(means, -1).div_(total)
        return torch.add(centre, mean, alpha=1 / unit).mT.reshape(z.shape), mean, total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, dm: Tensor, *_: Tensor) -> Tensor:
        z, mean, total = ctx.saved_tensors
        if torch.is_grad_enabled() or not can_look(dm):
            gradient: Tensor = torch.func.vjp(lambda z: fused_l2_attention(z, None, causal=False), z)[1](dm)[0]
            return gradient
        # T / E is a product of rows as the weights are, and theirs are among them: with a_i = g'_i m_i it is that of
        # [g', 0, -a, u, 1] and [u, half, 1, g', -a].
        width = z.shape[-1]
        left, right = _rows(z, 2 * width + 4), _rows(z, 2 * width + 3)
        u = _place(z, left[:, width + 2 :], right[:, : width + 2])[0]
        g = torch.div(_tokens_last(dm), total, out=right[:, width + 2 : -1])
        right[:, -1:] = (mean * g).sum(-2, keepdim=True).neg_()
        left[:, :width], left[:, width], left[:, width + 1] = g, 0, right[:, -1]
        size = _block_size(u.shape[-1])
        changes, sums = _zeros(u, size), _zeros(u[:, :1], size)
        room = u.new_empty(AT_A_TIME)
        for heads, pairs in _weights(left[:, width + 2 :], right[:, : width + 2], size):
            tokens, gradients, lefts, rights = (t[heads].split(size, -1) for t in (u, g, left[:, :-1], right))
            for i, j, E in pairs:
                T = torch.bmm(lefts[i].mT, rights[j], out=room[: E.numel()].view_as(E)).mul_(E)
                if i == j:  # what a token does to itself is nothing, or rounding if it is computed
                    T.diagonal(dim1=-2, dim2=-1).zero_()
                changes[j][heads].baddbmm_(tokens[i], T, alpha=LOG2).baddbmm_(gradients[i], E)
                sums[j][heads] += T.sum(-2, keepdim=True)
                if i != j:
                    changes[i][heads].baddbmm_(tokens[j], T.mT, alpha=LOG2).baddbmm_(gradients[j], E.mT)
                    sums[i][heads] += T.sum(-1).unsqueeze(-2)
        change = torch.cat(changes, -1).addcmul_(torch.cat(sums, -1), u, value=-LOG2)
        return change.mT.reshape(z.shape)


def _place(z: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, float]:
    """Writes rows whose products are the exponents of the weights, [u, 1, half] and [u, half, 1].

    Returns the tokens u, about their centre and in the unit in which weights are powers of two, that centre and unit.
    """
    unit = math.sqrt(2 / LOG2) / z.shape[-1] ** 0.25
    z = _tokens_last(z)
    centre = z.mean(-1, keepdim=True)
    u = torch.sub(z, centre, out=right[:, :-2]).mul_(unit)
    half = u.square().sum(-2).mul_(-0.5)
    right[:, -2], right[:, -1] = half, 1
    left[:, :-2], left[:, -2], left[:, -1] = u, 1, half
    return u, centre, unit


def _weights(left: Tensor, right: Tensor, size: int) -> Iterator[tuple[slice, Iterator[tuple[int, int, Tensor]]]]:
    """A few heads at a time, and for those the weights E between the i-th and the j-th block of tokens, j <= i.

    The next weights are written where the last ones were.
    """
    room = left.new_empty(AT_A_TIME)

    def pairs(left: Tensor, right: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        lefts, rights = left.split(size, -1), right.split(size, -1)
        for i in range(len(lefts)):
            for j in range(i + 1):
                shape = len(left), lefts[i].shape[-1], rights[j].shape[-1]
                E = torch.bmm(lefts[i].mT, rights[j], out=room[: math.prod(shape)].view(shape))
                torch.threshold_(E, LOWEST, -math.inf).clamp_max_(0).exp2_()
                if i == j:  # far from the centre rounding might say otherwise, and of any pair that it weighs over 1
                    E.diagonal(dim1=-2, dim2=-1).fill_(1)
                yield i, j, E

    step = AT_A_TIME // size**2
    for start in range(0, len(left), step):
        heads = slice(start, start + step)
        yield heads, pairs(left[heads], right[heads])


def _block_size(num_tokens: int) -> int:
    """How many tokens to take at a time: large products are quick, but weights on the diagonal are computed twice.

    The number of heads has no say, or a sequence would be rounded as its batch mates have it.
    """
    if num_tokens < 512:
        return 128
    return 256 if num_tokens < 2048 else 512


def _zeros(t: Tensor, size: int) -> list[Tensor]:
    """Where to add things up, block by block: torch's fast products want what they write to in one piece."""
    return [t.new_zeros(block.shape) for block in t.split(size, -1)]


def _rows(z: Tensor, count: int) -> Tensor:
    """Room for so many numbers of each token."""
    return z.new_empty(z.shape[:-2].numel(), count, z.shape[-2])


def _tokens_last(t: Tensor) -> Tensor:
    return t.reshape(-1, *t.shape[-2:]).mT
