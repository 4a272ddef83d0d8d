"""Which norm: how far the bounds are above the best input found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from flowattn.contractions import L2SelfAttention
from flowattn.experiments._guide_common import Size, heads, plain_ticks, search
from flowattn.experiments._lab import BLUE, GREEN, RED, Row
from flowattn.lipschitz import published_infinity_bound, published_two_norm_bound


def measure_norm(size: Size) -> Iterator[Row]:
    """How far the bounds are above the best input found, for random weights as in the paper."""
    narrow, middle = size.norm_features[1], size.norm_tokens[len(size.norm_tokens) // 3]
    shapes = [(tokens, narrow) for tokens in size.norm_tokens]
    shapes += [(middle, features) for features in size.norm_features if features != narrow]
    for draw in range(size.weights):
        generator = torch.Generator().manual_seed(draw)
        found: dict[str, Tensor] = {}
        last = 0
        for tokens, features in shapes:
            if features != last:
                weights, found, last = paper_weights(features, generator), {}, features
            f = L2SelfAttention.from_paper_weights(*weights).requires_grad_(False)
            published = {"inf": published_infinity_bound, "2": published_two_norm_bound}
            for norm in ("token", "2", "inf"):
                constant, found[norm] = search(f, (tokens, features), norm, size, found.get(norm))
                bounds = {"ours": f.lipschitz_bound(tokens, norm)}
                if norm in published:
                    bounds["published"] = published[norm](*weights, tokens)
                for source, bound in bounds.items():
                    row: Row = {"draw": draw, "tokens": tokens, "features": features, "norm": norm, "source": source}
                    yield row | {"bound": bound.item(), "found": constant}


def plot_norm(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(7.4, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    widths = statistics.mode(int(row["features"]) for row in rows)
    lengths = sorted({int(row["tokens"]) for row in rows if row["features"] != widths})
    parts = [("tokens", "number of tokens N", [row for row in rows if row["features"] == widths], f"D = {widths}")]
    parts.append(
        ("features", "width of a token D", [row for row in rows if row["tokens"] in lengths], f"N = {lengths[0]}")
    )
    kinds = [("token", "ours"), ("2", "ours"), ("2", "published"), ("inf", "ours"), ("inf", "published")]
    styles = [("o-", BLUE), ("s-", GREEN), ("s--", GREEN), ("^-", RED), ("^--", RED)]
    for ax, (name, label, part, title) in zip(axes, parts, strict=True):
        sizes = sorted({int(row[name]) for row in part})
        for (norm, source), (line, color) in zip(kinds, styles, strict=True):
            own = [row for row in part if (row["norm"], row["source"]) == (norm, source)]
            ratios = [[float(r["bound"]) / float(r["found"]) for r in own if r[name] == size] for size in sizes]
            ax.plot(sizes, list(map(statistics.median, ratios)), line, color=color, label=f"norm={norm!r}, {source}")
            ax.fill_between(sizes, list(map(min, ratios)), list(map(max, ratios)), color=color, alpha=0.15, linewidth=0)
        ax.set(xscale="log", yscale="log", xlabel=label, title=title)
        plain_ticks(ax, "x", sizes)
    axes[0].set(ylabel="bound / best input found", ylim=(1, None))
    plain_ticks(axes[0], "y", [1, 1e3])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def paper_weights(features: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random weights of queries, values and outputs that neither grow nor shrink what they are given."""
    count, scale = heads(features), 1 / math.sqrt(features)
    shapes = [(count, features, features // count)] * 2 + [(count, features // count, features)]
    q, v, o = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale for shape in shapes)
    return q, v, o
