r"""The mean of what each token sees, and how it moves with the token itself, in one recorded step.

.. math:: m_i = \sum_j P_{ij} z_j, \qquad \partial m_i / \partial z_i = P_{ii} I + \tfrac2s \operatorname{Cov}_i, \qquad
    \operatorname{Cov}_i = \sum_j P_{ij} z_j z_j^T - m_i m_i^T

The products :math:`z_a z_b` with :math:`a \le b` ride below z as values, each once, so that one average gives both
moments. Only the weights P are kept for backward; all else is computed once more, in memory kept from call to call.
Tokens come last in here, [heads, width, tokens], but for C and its gradient.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import can_look, in_forward_mode
from flowattn.kernels.diagonal_desk import Desk, samples, to_factors
from flowattn.kernels.dot_products import HIDDEN, softmax_weights
from flowattn.kernels.fused_l2 import queries_and_keys
from flowattn.kernels.scratch import shaped

#: Under a causal mask so many rows are computed at a time, so that little is computed of what nobody sees.
ROWS = 64

MeanAndBlocks = tuple[Float[Tensor, "*batch tokens width"], Float[Tensor, "*batch tokens width width"]]


def mean_and_blocks(
    z: Float[Tensor, "*batch tokens width"],
    bias: Float[Tensor, "*_ #tokens tokens"] | None = None,
    *,
    causal: bool = False,
) -> MeanAndBlocks:
    r"""The means and :math:`\partial m_i / \partial z_i`, for tokens near the origin.

    Cost: O(N^2 d^2) time, O(N^2 + N d^2) memory.

    Example:
        >>> m, C = mean_and_blocks(torch.tensor([[-1.0], [1.0]]), torch.tensor([[-4.0, 0.0], [0.0, -4.0]]))
        >>> m, C  # each sees both alike
        (tensor([[0.],
                [0.]]), tensor([[[2.5000]],
        <BLANKLINE>
                [[2.5000]]]))
    """
    if bias is not None:
        bias = bias.reshape((1,) * (z.ndim - bias.ndim) + bias.shape)
    given = (z,) if bias is None else (z, bias)
    if z.ndim != 4 or z.dtype not in (torch.float32, torch.float64) or not can_look(*given) or in_forward_mode():
        return _step_by_step(z, bias, causal)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    found: MeanAndBlocks = _MeanAndBlocks.apply(z, bias, causal, keep)
    return found


def _step_by_step(z: Tensor, bias: Tensor | None, causal: bool) -> MeanAndBlocks:
    """For derivatives of every order."""
    tokens, width = z.shape[-2:]
    queries, keys = queries_and_keys(z)
    to_one, to_other = to_factors(width, z)
    values = torch.cat([z, (z @ to_one) * (z @ to_other)], -1)
    averages, own = [], []
    for rows in _parts(tokens, causal):
        seen, part = slice(rows.stop), bias if bias is None else _part(bias, rows)
        P = softmax_weights(queries[..., rows, :], keys[..., seen, :], part, causal)
        averages.append(P @ values[..., seen, :])
        own.append(P.diagonal(rows.start, dim1=-2, dim2=-1))
    m, products = torch.cat(averages, -2).tensor_split([width], -1)
    both = to_one.unsqueeze(1) * to_other
    entries = torch.maximum(both, both.transpose(0, 1)).flatten(0, 1)  # which product is each entry of a block
    covariance = (products @ entries.mT).unflatten(-1, (width, width)) - m.unsqueeze(-1) * m.unsqueeze(-2)
    straight = torch.cat(own, -1).unsqueeze(-1).expand_as(m)
    return m, covariance * (2 / math.sqrt(width)) + torch.diag_embed(straight)


def _parts(tokens: int, causal: bool) -> list[slice]:
    """The rows to compute at a time."""
    if not causal or tokens == 0:
        return [slice(0, tokens)]
    return [slice(start, min(start + ROWS, tokens)) for start in range(0, tokens, ROWS)]


def _longest(parts: list[slice]) -> int:
    return max(rows.stop - rows.start for rows in parts)


def _part(bias: Tensor, rows: slice) -> Tensor:
    """The bias of these rows, and of all tokens that they may see."""
    return bias[..., rows if bias.shape[-2] > 1 else slice(None), : rows.stop]


class _MeanAndBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, causal: bool, keep: bool) -> MeanAndBlocks:
        rows = _parts(z.shape[2], causal)
        m, C = torch.empty_like(z.mT, memory_format=torch.contiguous_format), z.new_empty(*z.shape, z.shape[-1])
        weights = [z.new_empty(*z.shape[:2], r.stop - r.start, r.stop) for r in rows] if keep else []
        longest = _longest(rows)
        for some in samples(z, longest):
            desk = Desk.of(z[some], longest)
            part = bias if bias is None or len(bias) == 1 else bias[some]
            for k, r in enumerate(rows):
                kept = weights[k][some].flatten(0, 1) if keep else None
                _average(desk, r, part, causal, kept, m[some], C[some])
        if keep:
            ctx.save_for_backward(z, bias, m, *weights)
            ctx.causal = causal
        return m.mT, C

    @staticmethod
    def backward(ctx: Any, g_m: Tensor, g_C: Tensor) -> Any:
        z, bias, m, *weights = ctx.saved_tensors
        if torch.is_grad_enabled() or not can_look(g_m, g_C):
            given = (z,) if bias is None else (z, bias)
            pull = torch.func.vjp(lambda z, bias=None: _step_by_step(z, bias, ctx.causal), *given)[1]
            return *pull((g_m, g_C)), *[None] * (4 - len(given))
        rows = _parts(z.shape[2], ctx.causal)
        dz = torch.empty_like(m)
        dbias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[1] else None
        longest = _longest(rows)
        for some in samples(z, longest):
            desk = Desk.of(z[some], longest)
            desk.dkeys.zero_()
            desk.dv.zero_()
            for r, P in zip(rows, weights, strict=True):
                dlogits = _pull(desk, r, P[some].flatten(0, 1), m[some], g_m.mT[some], g_C[some])
                if dbias is not None:
                    part = _part(dbias if len(dbias) == 1 else dbias[some], r)
                    part += dlogits.view(-1, z.shape[1], *dlogits.shape[1:]).sum_to_size(part.shape)
            dz[some] = _to_tokens(desk).view_as(dz[some])
        return dz.mT, dbias, None, None


def _average(
    desk: Desk, rows: slice, bias: Tensor | None, causal: bool, kept: Tensor | None, m: Tensor, C: Tensor
) -> None:
    """Fills in these rows of m and C, and their weights if these are to be kept."""
    batch, heads, width, _ = m.shape
    g, n, seen = batch * heads, rows.stop - rows.start, slice(rows.stop)
    logits = torch.bmm(desk.near[..., rows].mT, desk.keys[..., seen], out=shaped(desk.logits, (g, n, rows.stop)))
    if bias is not None:
        logits.view(batch, heads, n, -1).add_(_part(bias, rows))
    if causal:
        logits[..., rows].add_(logits.new_full((n, n), HIDDEN).triu_(1))
    P = torch.softmax(logits, -1, out=logits if kept is None else kept)
    average = torch.bmm(desk.v[..., seen], P.mT, out=shaped(desk.average, (g, desk.v.shape[1], n)))
    mean, products = average.tensor_split([width], 1)
    m[..., rows] = mean.view(batch, heads, width, n)
    # A token that sees itself alone has exactly no covariance, its products being rounded but once.
    one, other = desk.select(average, desk.factors)
    products.sub_(one.mul_(other)).mul_(2 / math.sqrt(width))
    blocks = torch.index_select(average, 1, desk.values, out=shaped(desk.blocks, (g, width**2, n)))
    blocks[:, :: width + 1].add_(P.diagonal(rows.start, dim1=-2, dim2=-1).unsqueeze(1))
    C.flatten(3)[:, :, rows] = blocks.mT.view(batch, heads, n, width**2)


def _pull(desk: Desk, rows: slice, P: Tensor, m: Tensor, g_m: Tensor, g_C: Tensor) -> Tensor:
    """Adds to the gradients of keys and values, fills in that of these queries, and gives that of the logits."""
    batch, heads, width, _ = m.shape
    g, n, seen = batch * heads, rows.stop - rows.start, slice(rows.stop)
    blocks, daverage = shaped(desk.blocks, (g, width**2, n)), shaped(desk.average, (g, desk.v.shape[1], n))
    blocks.view(batch, heads, width**2, n).copy_(g_C.flatten(3)[:, :, rows].mT)
    one, other = desk.select(blocks, desk.entries)
    torch.mul(one.add_(other), desk.share, out=daverage[:, width:])
    dmean, mean = shaped(desk.dmean, (g, width, n)).zero_(), m[..., rows].reshape(g, width, n)
    desk.pull_products(mean, daverage[:, width:], out=dmean)
    torch.sub(g_m[..., rows].reshape(g, width, n), dmean, out=daverage[:, :width])

    dlogits = torch.bmm(daverage.mT, desk.v[..., seen], out=shaped(desk.logits, (g, n, rows.stop)))
    dlogits.diagonal(rows.start, dim1=-2, dim2=-1).add_(blocks[:, :: width + 1].sum(1))
    dlogits.mul_(P)
    dlogits.addcmul_(P, dlogits.sum(-1, keepdim=True), value=-1)
    # Rows add up to zero. Where a token sees little but itself, its own entry would be nothing but rounding.
    dlogits.diagonal(rows.start, dim1=-2, dim2=-1).sub_(dlogits.sum(-1))
    desk.dz[..., rows] = torch.bmm(desk.keys[:, :width, seen], dlogits.mT)
    desk.dkeys[..., seen] += torch.bmm(desk.near[..., rows], dlogits)
    desk.dv[..., seen] += torch.bmm(daverage, P, out=shaped(desk.dv_of_rows, (g, desk.v.shape[1], rows.stop)))
    return dlogits


def _to_tokens(desk: Desk) -> Tensor:
    """The gradient after the tokens from those after queries, keys and values."""
    width = desk.dz.shape[1]
    steep = 2 / math.sqrt(width)
    moved, count = desk.dkeys.tensor_split([width], 1)
    dz = desk.pull_products(desk.near, desk.dv[:, width:], out=desk.dz).add_(desk.dv[:, :width])
    return dz.add_(moved, alpha=steep).addcmul_(desk.near[:, :width], count, value=-steep)
