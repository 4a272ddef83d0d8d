"""The figures of docs/guide.md, each from measurements made here: which log-determinant, which norm, which radius.

    python -m flowattn.experiments guide [--quick] [--out DIR]

writes DIR/figures/guide_*.png and the numbers behind them as DIR/results/guide_*.csv.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from flowattn.attention import attention_weights
from flowattn.contractions import Contraction, L2SelfAttention
from flowattn.lipschitz import published_infinity_bound, published_two_norm_bound, search_lipschitz
from flowattn.logdet import AutoLogDet, ExactLogDet, LogDet, PowerSeries, RussianRoulette

Row = dict[str, str | int | float]

HEAD = 4  # width of a head

# Okabe and Ito's colours, which the colour-blind tell apart, each with a marker of its own.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS, MARKERS = (BLUE, ORANGE, GREEN, RED, PURPLE), "os^vD"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    batch: int = 8
    rounds: int = 9
    draws: int = 64
    layers: Sequence[tuple[str, int, int]] = (("dense", 16, 4), ("dense", 64, 8), ("causal", 64, 8))
    terms: Sequence[int] = (1, 2, 4, 8, 16, 32)
    widths: Sequence[int] = (2, 4, 8, 16, 32)
    dimensions: Sequence[int] = (32, 64, 96, 128, 192, 256, 384, 512)
    norm_tokens: Sequence[int] = (8, 16, 32, 64, 128, 256)
    norm_features: Sequence[int] = (4, 8, 16, 32, 64)
    weights: int = 3
    ratios: Sequence[float] = (0.5, 1.0, 2.0, 4.0, math.inf)
    radius_tokens: Sequence[int] = (2, 4, 8, 16, 32, 64, 128, 256)
    restarts: int = 8
    steps: int = 40


QUICK = Size(
    batch=4,
    rounds=2,
    draws=24,
    layers=(("dense", 6, 4), ("causal", 8, 4)),
    terms=(1, 4, 16),
    widths=(4,),
    dimensions=(16, 64, 256),
    norm_tokens=(4, 8),
    norm_features=(4, 8),
    weights=1,
    ratios=(1.0, math.inf),
    radius_tokens=(2, 8),
    restarts=16,
    steps=12,
)


# -- which log-determinant


def measure_logdet_errors(size: Size) -> Iterator[Row]:
    """How far each log-determinant is off, and what it costs in a training step."""
    for structure, tokens, features in size.layers:
        torch.manual_seed(0)
        f = steep_layer(features, causal=structure == "causal")
        x = torch.randn(size.batch, tokens, features, dtype=torch.float64)
        true, truncated = true_and_truncated(f, x, max(size.terms))
        survival = f.lipschitz_bound(tokens).item() ** 2
        methods: list[tuple[str, int, LogDet, LogDet]] = [("exact", 0, ExactLogDet(), ExactLogDet())]
        methods += [("series", n, PowerSeries(n), PowerSeries(n)) for n in size.terms]
        for chance in (survival, 0.5):
            for n in size.terms[:-1]:
                roulette = RussianRoulette(n, survival=chance)
                methods.append((f"roulette, survival {chance:.2f}", n, roulette, average_roulette(n, chance)))
        times = training_times([timed for *_, timed in methods], f, x.float(), size.rounds)
        for (name, n, logdet, timed), milliseconds in zip(methods, times, strict=True):
            with torch.no_grad():
                num_draws = 1 if name == "exact" else size.draws
                error = torch.stack([logdet(f, x)[1] for _ in range(num_draws)]) - true
            row: Row = {"structure": structure, "tokens": tokens, "features": features, "method": name, "terms": n}
            row["derivatives"] = 0 if name == "exact" else getattr(timed, "num_exact_terms", n)
            row["milliseconds"] = milliseconds
            row["rms_error_of_a_draw"] = error.square().mean().sqrt().item()
            if isinstance(logdet, PowerSeries):
                row["bias"] = (truncated[n - 1] - true).abs().max().item()
                row["remainder_bound"] = logdet.remainder(f, tokens)
            yield row


def measure_logdet_times(size: Size) -> Iterator[Row]:
    """Where the exact log-determinant of dense attention stops being cheaper than the unbiased estimate."""
    for features in size.widths:
        for dimensions in size.dimensions:
            tokens = dimensions // features
            if not 2 <= tokens <= 256:
                continue
            row: Row = {"tokens": tokens, "features": features, "dimensions": tokens * features}
            for structure in ("dense", "causal"):
                f = L2SelfAttention(features, heads(features), causal=structure == "causal", radius="learned")
                survival = f.lipschitz_bound(tokens).item() ** 2
                rivals = [ExactLogDet(), average_roulette(RussianRoulette().num_exact_terms, survival)]
                times = training_times(rivals, f, torch.randn(size.batch, tokens, features), size.rounds)
                row |= {f"exact_{structure}_ms": times[0], f"roulette_{structure}_ms": times[1]}
            yield row


def crossover(rows: Sequence[Row], features: int) -> float:
    """The N D above which the exact log-determinant of dense attention takes longer, between measurements."""
    own = [row for row in rows if row["features"] == features]
    size = [math.log(float(row["dimensions"])) for row in own]
    gain = [math.log(float(row["roulette_dense_ms"]) / float(row["exact_dense_ms"])) for row in own]
    for k in range(len(own) - 1, 0, -1):
        if gain[k] < 0 <= gain[k - 1]:
            return math.exp(size[k - 1] + (size[k] - size[k - 1]) * gain[k - 1] / (gain[k - 1] - gain[k]))
    return math.exp(size[-1]) if gain[-1] >= 0 else math.exp(size[0])


def plot_logdet(errors: Sequence[Row], times: Sequence[Row]) -> Figure:
    layers = list(dict.fromkeys((row["structure"], row["tokens"], row["features"]) for row in errors))
    num_rows = math.ceil((len(layers) + 1) / 2)
    figure = Figure(figsize=(7.4, 2.9 * num_rows), layout="constrained")
    *axes, last = [figure.add_subplot(num_rows, 2, k + 1) for k in range(len(layers) + 1)]
    roulettes = list(dict.fromkeys(row["method"] for row in errors if "roulette" in str(row["method"])))
    top = max(float(row["remainder_bound"]) for row in errors if "remainder_bound" in row)
    for ax, layer in zip(axes, layers, strict=True):
        own = [row for row in errors if (row["structure"], row["tokens"], row["features"]) == layer]
        series = [row for row in own if row["method"] == "series"]
        x = column(series, "milliseconds")
        ax.axvline(column(own, "milliseconds")[0], color="black", label="exact: no error")
        ax.plot(x, column(series, "remainder_bound"), "--", color=SKY, label="n terms: bound of the bias")
        ax.plot(x, column(series, "bias"), "o-", color=BLUE, label="n terms: bias")
        ax.plot(x, column(series, "rms_error_of_a_draw"), "s-", color=GREEN, label="n terms: error of a draw")
        for method, color, marker in zip(roulettes, (ORANGE, RED), "^v", strict=True):
            points = [row for row in own if row["method"] == method]
            y = column(points, "rms_error_of_a_draw")
            ax.plot(column(points, "milliseconds"), y, marker + "-", color=color, label=f"{method}: error of a draw")
        for place, bias, row in zip(x, column(series, "bias"), series, strict=True):
            if bias > 1e-5:  # labels of smaller ones would lie below the axis
                label = f"n = {row['terms']}" if row is series[0] else f"{row['terms']}"
                ax.annotate(
                    label, (place, bias), (-3, -4), textcoords="offset points", ha="right", va="top", color=BLUE
                )
        ax.set(xscale="log", yscale="log", ylim=(1e-6, 3 * top), title="{}, N = {}, D = {}".format(*layer))
        ax.set(xlabel="training step (ms)", ylabel="error of log|det| (nats)")
        milliseconds = column(own, "milliseconds")
        ax.set_xlim(min(milliseconds) / 1.7, max(milliseconds) * 1.2)
        plain_ticks(ax, "x", milliseconds)
    plot_times(last, times)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def plot_times(ax: Axes, times: Sequence[Row]) -> None:
    for features, color, marker in zip(sorted({int(r["features"]) for r in times}), COLORS, MARKERS, strict=False):
        own = [row for row in times if row["features"] == features]
        ratio = [float(row["exact_dense_ms"]) / float(row["roulette_dense_ms"]) for row in own]
        ax.plot(column(own, "dimensions"), ratio, marker + "-", color=color, label=f"dense, D = {features}")
    sizes = sorted({int(row["dimensions"]) for row in times})
    causal = [
        statistics.median(
            float(r["exact_causal_ms"]) / float(r["roulette_causal_ms"]) for r in times if r["dimensions"] == n
        )
        for n in sizes
    ]
    ax.plot(sizes, causal, "--", color="black", label="causal, all D")
    limit = AutoLogDet().max_dense
    ax.axhline(1, color="0.6", linewidth=1, zorder=0)
    ax.axvline(limit, ymax=0.7, color="0.6", linewidth=1, zorder=0)
    ax.annotate("max_dense", (limit, 0.22), (4, 0), textcoords="offset points", color="0.4")
    ax.set(xscale="log", yscale="log", ylim=(0.2, 60), title="exact over roulette")
    ax.set(xlabel="number of dimensions N D", ylabel="ratio of training steps")
    plain_ticks(ax, "x", sizes)
    plain_ticks(ax, "y", [0.2, 50])
    ax.legend(loc="upper left", ncols=2)


def steep_layer(features: int, *, causal: bool, num_steps: int = 100) -> L2SelfAttention:
    """Attention that was trained to shrink volumes: the hard case, for log(1 - t) has the slowest series."""
    f = L2SelfAttention(features, heads(features), causal=causal, radius="learned").double()
    optimizer = torch.optim.Adam(f.parameters(), lr=0.05)
    for _ in range(num_steps):
        optimizer.zero_grad()
        ExactLogDet()(f, torch.randn(8, 16, features, dtype=torch.float64))[1].mean().backward()
        optimizer.step()
    return f


@torch.no_grad()
def true_and_truncated(f: Contraction, x: Tensor, num_terms: int) -> tuple[Tensor, list[Tensor]]:
    """log|det(I + J)| and the sums of the first 1, 2, ... terms of its series, without probes."""
    J = f.forward_and_jacobian(x)[1].flatten(3).flatten(1, 2)
    true = torch.linalg.slogdet(torch.eye(J.shape[-1], dtype=J.dtype) + J).logabsdet
    power, total, sums = J, x.new_zeros(len(x)), []
    for k in range(1, num_terms + 1):
        total = total + (-1) ** (k + 1) / k * power.diagonal(dim1=1, dim2=2).sum(-1)
        sums.append(total)
        power = power @ J
    return true, sums


def average_roulette(num_exact_terms: int, survival: float) -> RussianRoulette:
    """Roulette that always takes as many terms as it does on average. Its time is the average, without the wait."""
    return RussianRoulette(num_exact_terms + round(survival / (1 - survival)), survival=1e-12)


def training_times(logdets: Sequence[LogDet], f: Contraction, x: Tensor, rounds: int) -> list[float]:
    """Median milliseconds of forward pass, log-determinant and backward pass; they take turns."""
    f = copy.deepcopy(f).to(x.dtype)

    def step(logdet: LogDet) -> float:
        f.zero_grad()
        start = time.perf_counter()
        value, logabsdet = logdet(f, x.clone().requires_grad_())
        (value.sum() + logabsdet.sum()).backward()
        return 1e3 * (time.perf_counter() - start)

    # Every turn is run twice and the second one counts, or whoever follows a large one pays for its memory.
    times = [[(step(logdet), step(logdet))[1] for logdet in logdets] for _ in range(rounds)]
    return [statistics.median(taken) for taken in zip(*times, strict=True)]


# -- which norm


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


def search(
    f: Contraction, shape: tuple[int, int], norm: str, size: Size, before: Tensor | None
) -> tuple[float, Tensor]:
    """The best input found, with the best of a shorter sequence, repeated, among the starts."""
    start = None if before is None else before.repeat(shape[0] // len(before), 1)
    options = {"num_restarts": size.restarts, "num_steps": size.steps, "start": start, "dtype": torch.float64}
    result = search_lipschitz(f, shape, norm, **options)  # type: ignore[arg-type]
    return result.constant, result.x


# -- which radius


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


# -- all of them


def heads(features: int) -> int:
    return max(1, features // HEAD)


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def plain_ticks(ax: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """Plain numbers in place of powers of ten: powers of two if there are many values, or 1, 2, 5, 10, ..."""
    low, high = min(values), max(values)
    steps = [m * 10.0**e for e in range(-3, 6) for m in ((1,) if high / low > 300 else (1, 2, 5))]
    whole = axis == "x" and all(value == int(value) for value in values)
    ticks = sorted(set(values)) if whole else [step for step in steps if low <= step <= high]
    ticks = [t for t in ticks if not whole or math.log2(t).is_integer()]
    (ax.set_xticks if axis == "x" else ax.set_yticks)(ticks, [f"{tick:g}" for tick in ticks])
    (ax.set_xticks if axis == "x" else ax.set_yticks)([], minor=True)


MEASUREMENTS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "logdet_errors": measure_logdet_errors,
    "logdet_times": measure_logdet_times,
    "norm": measure_norm,
    "radius": measure_radius,
}


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m flowattn.experiments guide", description="Figures of the guide.")
    parser.add_argument("--quick", action="store_true", help="a few small sizes, in seconds")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="where figures/ and results/ go")
    options = parser.parse_args(arguments)
    size = QUICK if options.quick else Size()
    figures, results = options.out / "figures", options.out / "results"
    for folder in (figures, results):
        folder.mkdir(parents=True, exist_ok=True)

    rows: dict[str, list[Row]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} rows"), TimeElapsedColumn())
    with Progress(*columns) as progress:
        for name, measure in MEASUREMENTS.items():
            torch.manual_seed(0)
            task = progress.add_task(name, total=None)
            rows[name] = []
            for row in measure(size):
                rows[name].append(row)
                progress.update(task, advance=1)
            progress.update(task, total=len(rows[name]))
            write_csv(results / f"guide_{name}.csv", rows[name])
    with matplotlib.rc_context(STYLE):
        plot_logdet(rows["logdet_errors"], rows["logdet_times"]).savefig(figures / "guide_logdet.png", dpi=160)
        plot_norm(rows["norm"]).savefig(figures / "guide_norm.png", dpi=160)
        plot_radius(rows["radius"]).savefig(figures / "guide_radius.png", dpi=160)
    console = Console()
    for features in size.widths:
        limit = crossover(rows["logdet_times"], features)
        console.print(f"dense, D = {features}: exact takes less time than roulette up to N D = {limit:.0f}")
    console.print(f"figures are in {figures}, numbers in {results}")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
