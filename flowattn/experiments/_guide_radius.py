"""Which radius: the bound in a ball, and what attention can single out there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowattn.attention import attention_weights
from flowattn.contractions import L2SelfAttention
from flowattn.experiments._guide_common import HEAD, Size, plain_ticks, search
from flowattn.experiments._lab import COLORS, MARKERS, Row, column


def measure_radius(size: Size) -> Iterator[Row]:
    """The bound of one head with W = B = I, the best input found, and how much one token can stand out."""
    for ratio in size.ratios:
        radius = None if ratio == math.inf else math.sqrt(ratio * math.sqrt(HEAD))
        f = L2SelfAttention(HEAD, 1, radius=radius, coefficient=None).double().requires_grad_(False)
        f.W.copy_(torch.eye(HEAD))
        f.B.copy_(torch.eye(HEAD))
        best: Tensor | None = None
        for tokens in size.radius_tokens:
            constant, best = search(f, (tokens, HEAD), "token", size, best)
            row: Row = {"ratio": ratio, "tokens": tokens, "bound": f.lipschitz_bound(tokens).item(), "found": constant}
            yield row | {"largest_weight": largest_weight(radius, tokens)}


def plot_radius(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = sorted({float(row["ratio"]) for row in rows})
    for ratio, color, marker in zip(ratios, COLORS, MARKERS, strict=False):
        own = [row for row in rows if row["ratio"] == ratio]
        x, color = column(own, "tokens"), "black" if ratio == math.inf else color
        label = "no ball" if ratio == math.inf else f"$R^2/s$ = {ratio:g}"
        left.plot(x, column(own, "bound"), "-", color=color, label=label)
        left.plot(x, column(own, "found"), marker, color=color, markerfacecolor="white")
        right.plot(x, column(own, "largest_weight"), marker + "-", color=color, label=label)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="number of tokens N")
        plain_ticks(ax, "x", column(rows, "tokens"))
    left.set(ylim=(0, None), ylabel="Lipschitz constant of attention", title="bound (line), best input found (marker)")
    right.set(ylim=(0, 1.03), ylabel="largest weight of one token", title="what attention can single out")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=len(ratios))
    return figure


def largest_weight(radius: float | None, tokens: int) -> float:
    """The most attention that one token can keep for itself: it at one pole of the ball, all others at the other."""
    z = torch.zeros(tokens, HEAD, dtype=torch.float64)
    z[:, 0] = 1e3 if radius is None else radius
    z[0] *= -1
    return attention_weights(z)[0, 0].item()
