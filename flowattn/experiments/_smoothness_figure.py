"""The figure of the experiment `smoothness`, from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowattn.experiments._lab import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Row,
    column,
    fitted_exponent,
    plain_ticks,
    where,
)

LAYER_COLORS = (BLUE, BLUE, RED, RED, GREEN, GREEN, ORANGE, PURPLE, SKY)
LAYER_MARKERS = "o^o^o^sDv"


def plot(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(7.4, 7.2), layout="constrained")
    (first, second), (third, fourth) = figure.subplots(2, 2)
    plot_adversarial(first, where(rows, part="adversarial"))
    plot_regimes(second, where(rows, part="regimes"))
    plot_layers(third, where(rows, part="layers"))
    plot_layer_norm(fourth, where(rows, part="LayerNorm"))
    return figure


def plot_adversarial(ax: Axes, rows: Sequence[Row]) -> None:
    own = where(rows, series="opposite", mask="none")
    n = column(own, "tokens")
    ax.plot(n, column(own, "published_bound"), ":", color="0.5", label="ball bound, published")
    ax.plot(n, column(own, "bound"), "-", color="black", linewidth=1, label="ball bound, ours")
    # All four lie on one line, so that markers of two sizes must tell them apart.
    for kind, color, large in zip(("half", "opposite"), (SKY, RED), (8, 4), strict=True):
        for mask, marker in (("none", "o"), ("causal", "^")):
            own = where(rows, series=kind, mask=mask)
            label = f"{kind}, {'masked' if mask == 'causal' else 'unmasked'}: $n^{{{slope(own):.2f}}}$"
            style: dict[str, Any] = {"color": color, "markerfacecolor": "none", "markersize": large, "linewidth": 0.7}
            ax.plot(column(own, "tokens"), column(own, "constant"), marker + "-", label=label, **style)
    finish(ax, "number of tokens $n$", "adversarial tokens", [])
    ax.set(ylabel="local Lipschitz constant")


def plot_regimes(ax: Axes, rows: Sequence[Row]) -> None:
    for alpha, color in zip(dict.fromkeys(str(row["series"]) for row in rows), (BLUE, ORANGE, GREEN), strict=False):
        own = where(rows, series=alpha)
        n = column(own, "tokens")
        ax.plot(n, column(own, "constant"), "o", color=color, markersize=3, label=f"best tokens, $|A|R^2$ = {alpha}")
        ax.plot(n, column(own, "bound"), "-", color=color, label="bound, ours")
        ax.plot(n, column(own, "published_bound"), ":", color=color, label="ball bound, published")
        ax.plot(n, column(own, "published_mean_field"), "--", color=color, linewidth=1, label="mean field, published")
    finish(ax, "number of tokens $n$", "where the mean field takes over", [])


def plot_layers(ax: Axes, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys((str(row["series"]), str(row["mask"])) for row in rows))
    for index, (name, mask) in enumerate(names):
        own = where(rows, series=name, mask=mask)
        label = f"{short(name)}{', masked' if mask == 'causal' else ''}: $n^{{{slope(own):.2f}}}$"
        style: dict[str, Any] = {"color": LAYER_COLORS[index % len(LAYER_COLORS)], "markersize": 3.5}
        line = LAYER_MARKERS[index % len(LAYER_MARKERS)] + ("--" if mask == "causal" else "-")
        ax.plot(column(own, "tokens"), column(own, "constant"), line, label=label, **style)
    finish(ax, "number of tokens $n$", "layers of Transformers", column(rows, "tokens"))
    ax.set(ylabel="local Lipschitz constant")


def plot_layer_norm(ax: Axes, rows: Sequence[Row]) -> None:
    for name, color, marker in zip(("attention", "behind LayerNorm"), (BLUE, GREEN), "os", strict=True):
        own = where(rows, series=name)
        label = f"{name} alone" if name == "attention" else name
        ax.plot(column(own, "radius"), column(own, "constant"), marker + "-", color=color, label=label)
    tokens = int(rows[0]["tokens"])
    finish(ax, "scale of random tokens", f"LayerNorm, $n$ = {tokens}", column(rows, "radius"))


def finish(ax: Axes, label: str, title: str, values: Sequence[float]) -> None:
    ax.set(xscale="log", yscale="log", xlabel=label, title=title)
    if values:
        plain_ticks(ax, "x", values)
    options: dict[str, Any] = {"ncols": 2, "columnspacing": 0.8, "handlelength": 1.6, "handletextpad": 0.5}
    ax.legend(loc="upper center", bbox_to_anchor=(0.46, -0.19), fontsize=7, **options)


def slope(rows: Sequence[Row]) -> float:
    return fitted_exponent(column(rows, "tokens"), column(rows, "constant"))


def short(name: str) -> str:
    """Names that fit a legend."""
    names = {"MultiheadAttention": "MHA", ", pretrained": " on text", " weights": "", " tokens": "", " of ": "/"}
    for long, brief in names.items():
        name = name.replace(long, brief)
    return name
