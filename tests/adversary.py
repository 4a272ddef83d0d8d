"""Looks for the input that a contraction stretches most: every value found is a lower bound of its constant."""

import math

import torch


def unit(v, norm):
    """The dual direction: of length 1 in the norm, and as far along v as possible. [B, N, D]."""
    if norm == "inf":
        return v.sign()
    dim = -1 if norm == "token" else (-2, -1)
    return v / torch.linalg.vector_norm(v, dim=dim, keepdim=True).clamp_min(1e-300)


def best_direction(f, x, rows, norm, mask, context, e):
    """One step of power iteration: the derivative along the best v for e, the value reached, and the next e."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad((f(x, mask, context) * e).sum(), x)
    v = unit(g, norm)
    _, change = f.jvp(x, v, mask, context)
    if norm != "2":
        change = change * rows
    if norm == "inf":  # one entry of one row
        best = change.detach().abs().flatten(1).argmax(-1)
        e = torch.nn.functional.one_hot(best, change[0].numel()).view_as(change) * change.detach().sign()
    else:
        e = change.detach() / torch.linalg.vector_norm(change.detach(), dim=(-2, -1), keepdim=True).clamp_min(1e-300)
    return x, (change * e).sum((-2, -1)), e


def starts(num_tokens, features, row, scale):
    """Random tokens, and two heaps on either side of the token of the row, which is the worst case in one dimension."""
    x = torch.randn(len(row), num_tokens, features, dtype=torch.float64)
    heaps = torch.randn(len(row), 1, features, dtype=torch.float64)
    heaps = heaps / heaps.norm(dim=-1, keepdim=True) * (torch.arange(num_tokens) % 2 * 2 - 1)[:, None] + 0.1 * x
    heaps[torch.arange(len(row)), row] = 0
    x[::2] = heaps[::2]
    return x * scale[:, None, None]


def worst_stretch(f, num_tokens, norm="token", *, mask=None, context=None, num_starts=8, steps=40, size=1.0, x=None):
    """The stretch reached by each start [num_starts], the row it was reached in, and the inputs.

    The values are those of one row for the norms "token" and "inf", of all rows for "2". `mask` is [N]; `size` is
    the length of tokens that matters, around which starts are drawn over three decades.
    """
    allowed = torch.arange(num_tokens) if mask is None else mask.nonzero().flatten()
    row = allowed[torch.randint(len(allowed), (num_starts,))]
    row[1::2] = allowed[-1]
    scale = size * 10 ** torch.linspace(-1.5, 1.5, num_starts).double()[torch.randperm(num_starts)]
    scale[:2] = size
    x = starts(num_tokens, f.features, row, scale) if x is None else x
    mask = None if mask is None else mask.expand(num_starts, -1)
    context = None if context is None else context.expand(num_starts, *context.shape)
    rows = torch.nn.functional.one_hot(row, num_tokens).double().unsqueeze(-1)
    e = torch.randn(num_starts, num_tokens, f.out_features, dtype=torch.float64)
    e = e if norm == "2" else e * rows
    best, best_x = torch.full((num_starts,), -math.inf, dtype=torch.float64), x.clone()
    first = second = torch.zeros_like(x)
    for step in range(1, steps + 1):
        at, value, e = best_direction(f, x, rows, norm, mask, context, e)
        better = value.detach() > best
        best, best_x = torch.where(better, value.detach(), best), torch.where(better[:, None, None], x, best_x)
        (g,) = torch.autograd.grad(value.sum(), at, allow_unused=True, materialize_grads=True)
        g = g * scale[:, None, None]  # Adam, in units of each start's scale
        first, second = 0.8 * first + 0.2 * g, 0.95 * second + 0.05 * g.square()
        move = (first / (1 - 0.8**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-12)
        x = (x + 0.15 * (1 - step / (steps + 1)) * scale[:, None, None] * move).detach()
    return best, row, best_x
