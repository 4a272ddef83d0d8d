"""From dot-product attention to an invertible Transformer, one change at a time, on the characters of a text.

    python -m flowattn.experiments ladder --data PATH [--rungs ...] [--layers 2 4] [--seeds 0 1] [--rates 8e-3]

writes DIR/results/ladder.csv, one DIR/results/ladder_RUN.csv per run (validation nats against steps), and
DIR/figures/ladder.png. Runs that are in DIR/results/ladder_runs.jsonl are not trained again, and those of the same size
and rate are in the table and the figure too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from flowattn.experiments._lab import COLORS, MARKERS, Row, save_figure, write_csv
from flowattn.experiments._language import Outcome, Run, add_options, make_quick, make_run, run_all
from flowattn.models import RUNGS

Results = list[tuple[Run, Outcome]]
LOOKS = dict(zip(RUNGS, zip((*COLORS, "black"), (*MARKERS, "*"), strict=True), strict=True))
FAR = 0.5  # nats that a rung may end above the best and still be in view


def summary(results: Results) -> list[Row]:
    """One row per rung, depth and rate: the mean over seeds, and how far it is above the first row of its depth."""
    rows: list[Row] = []
    groups: dict[tuple[str, int, float], Results] = {}
    for run, outcome in results:
        groups.setdefault((run.rung, run.layers, run.rate), []).append((run, outcome))
    reference: dict[tuple[int, float], float] = {}
    for (rung, layers, rate), group in groups.items():
        losses = [outcome.val_nll for _, outcome in group]
        mean = statistics.fmean(losses)
        reference.setdefault((layers, rate), mean)
        rows.append(
            {
                "rung": rung,
                "layers": layers,
                "rate": rate,
                "seeds": len(group),
                "parameters": group[0][1].parameters,
                "feed_forward_width": group[0][1].hidden,
                "ms_per_step": statistics.median(outcome.step_ms for _, outcome in group),
                "val_nll": mean,
                "val_bpc": mean / math.log(2),
                "spread": max(losses) - min(losses),
                "above_first": mean - reference[layers, rate],
            }
        )
    return rows


def plot(results: Results) -> Figure:
    """Validation nats against steps, one line per run, coloured by rung; one panel per depth.

    Rungs that end far above the best are left out of the view; the legend says where.
    """
    depths = sorted({run.layers for run, _ in results})
    figure, axes = plt.subplots(
        1, len(depths), figsize=(3.6 * len(depths) + 2.2, 3.4), layout="constrained", sharey=True, squeeze=False
    )
    best = min((outcome.val_nll for _, outcome in results if math.isfinite(outcome.val_nll)), default=0.0)
    top = best
    lines: dict[str, Line2D] = {}
    for run, outcome in results:
        steps, losses = ([float(row[name]) for row in outcome.curve] for name in ("step", "val_nll"))
        ax = axes[0][depths.index(run.layers)]
        color, marker = LOOKS[run.rung]
        (line,) = ax.plot(steps, losses, color=color, marker=marker)
        if outcome.val_nll <= best + FAR:
            top = max([top, *losses])
            lines.setdefault(run.rung, line)
        else:
            lines.setdefault(f"{run.rung}: {outcome.val_nll:.2f}, above", line)
    for ax, layers in zip(axes[0], depths, strict=True):
        ax.set_title(f"{layers} layers")
        ax.set_xlabel("steps")
    axes[0][0].set_ylabel("validation, nats per character")
    axes[0][0].set_ylim(best - 0.02, top + 0.02)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper")
    return figure


def show(title: str, rows: Sequence[Row]) -> None:
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console()
    (console if console.is_terminal else Console(width=160)).print(table)  # a file has no edge to wrap at


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flowattn.experiments ladder", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=list(RUNGS))
    parser.add_argument("--layers", type=int, nargs="+", default=[2], help="depths")
    parser.add_argument("--layer_norm", action="store_true", help="for the rungs that can have it")
    parser.add_argument("--position", choices=["absolute", "relative", "both"], help="for the rungs that can have it")
    add_options(parser)
    options = parser.parse_args(arguments)
    make_quick(options)

    def kind(rung: str) -> dict[str, Any]:
        return {
            "layer_norm": options.layer_norm and rung != "invertible",
            "position": None if rung == "contractive_inf" else options.position,
        }

    runs = [
        make_run(options, rung=rung, layers=layers, seed=seed, rate=rate, schedule="cosine", **kind(rung))
        for layers, rung, rate, seed in itertools.product(options.layers, options.rungs, options.rates, options.seeds)
    ]
    order = list(RUNGS)
    results = run_all(runs, options, "ladder")
    results = [result for result in results if asdict(result[0]).items() >= kind(result[0].rung).items()]
    results.sort(key=lambda result: (result[0].layers, order.index(result[0].rung), result[0].rate, result[0].seed))
    rows = summary(results)
    write_csv(options.out / "results" / "ladder.csv", rows)
    save_figure(options.out / "figures" / "ladder.png", lambda: plot(results))
    show(f"the ladder on {runs[0].text}: validation nats per character", rows)
