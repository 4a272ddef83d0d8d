"""The figures of docs/guide.md, each from measurements made here: which log-determinant, which norm, which radius.

    python -m flowattn.experiments guide [--quick] [--out DIR]

writes DIR/figures/guide_*.png and the numbers behind them as DIR/results/guide_*.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flowattn.experiments._guide_common import QUICK, Size
from flowattn.experiments._guide_logdet import crossover, measure_logdet_errors, measure_logdet_times, plot_logdet
from flowattn.experiments._guide_norm import measure_norm, plot_norm
from flowattn.experiments._guide_radius import measure_radius, plot_radius
from flowattn.experiments._lab import Row, save_figure, write_csv

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
    save_figure(figures / "guide_logdet.png", lambda: plot_logdet(rows["logdet_errors"], rows["logdet_times"]))
    save_figure(figures / "guide_norm.png", lambda: plot_norm(rows["norm"]))
    save_figure(figures / "guide_radius.png", lambda: plot_radius(rows["radius"]))
    console = Console()
    for features in size.widths:
        limit = crossover(rows["logdet_times"], features)
        console.print(f"dense, D = {features}: exact takes less time than roulette up to N D = {limit:.0f}")
    console.print(f"figures are in {figures}, numbers in {results}")
