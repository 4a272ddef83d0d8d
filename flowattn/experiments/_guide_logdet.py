"""Which log-determinant: what each is off by, and what it costs."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator, Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowattn.contractions import Contraction, L2SelfAttention
from flowattn.experiments._guide_common import Size, heads, plain_ticks
from flowattn.experiments._lab import BLUE, COLORS, GREEN, MARKERS, ORANGE, RED, SKY, Row, column
from flowattn.logdet import AutoLogDet, ExactLogDet, LogDet, PowerSeries, RussianRoulette


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
