"""What the experiments of the laboratory share: options, results that outlive an interruption, tables, and a style.

An experiment is a set of named jobs, each of which returns rows of a table. A job draws from `Lab.generator`, so that
its rows do not depend on the jobs before it, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Row = dict[str, str | int | float]
Job = Callable[[], Iterable[Row]]

# Okabe and Ito's colours, which the colour-blind tell apart, each with a marker of its own.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLORS, MARKERS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY), "os^vDP"
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
class Lab:
    """One run of an experiment: NAME.png goes to out/figures, NAME.csv to out/results."""

    name: str
    out: Path = Path("docs")
    quick: bool = False
    seed: int = 0

    @classmethod
    def from_arguments(cls, name: str, description: str, arguments: Sequence[str]) -> Lab:
        """Reads --quick, --out and --seed."""
        prog = f"python -m flowattn.experiments {name}"
        parser = argparse.ArgumentParser(prog=prog, description=description)
        parser.add_argument("--quick", action="store_true", help="a few small sizes, in seconds")
        parser.add_argument("--out", type=Path, default=cls.out, help="where figures/ and results/ go")
        parser.add_argument("--seed", type=int, default=cls.seed, help="of everything that is random")
        return cls(name, **vars(parser.parse_args(arguments)))

    def generator(self, *labels: str | int | float) -> torch.Generator:
        """Randomness of its own for every set of labels."""
        text = repr((self.seed, *labels)).encode()
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:6], "big"))

    def run(self, jobs: Mapping[str, Job]) -> list[Row]:
        """The rows of all jobs, in order. Those done by a run that was stopped are not done again."""
        partial = self._folder("results") / f".{self.name}.partial.jsonl"
        done = self._resume(partial)
        rows: list[Row] = []
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, TimeRemainingColumn()) as progress, partial.open("a") as file:
            task = progress.add_task(self.name, total=len(jobs), completed=0)
            for name, job in jobs.items():
                progress.update(task, description=f"{self.name}: {name}")
                if name not in done:
                    done[name] = list(job())
                    print(json.dumps([name, done[name]]), file=file, flush=True)
                rows += done[name]
                progress.advance(task)
            progress.update(task, description=self.name)
        write_csv(self._folder("results") / f"{self.name}.csv", rows)
        partial.unlink()
        return rows

    def save(self, plot: Callable[[], Figure], part: str = "") -> None:
        """Draws a figure in our style and writes it."""
        save_figure(self._folder("figures") / f"{self.name}{part}.png", plot)

    def show(self, title: str, rows: Sequence[Row]) -> None:
        """Prints rows as a table."""
        table = Table(*column_names(rows), title=title)
        for row in rows:
            table.add_row(*(_text(row.get(name, "")) for name in column_names(rows)))
        Console().print(table)

    def say(self, text: str) -> None:
        """Prints a line."""
        Console().print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Says where everything is."""
        self.say(f"figures are in {self.out / 'figures'}, numbers in {self.out / 'results'}")

    def _folder(self, name: str) -> Path:
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _resume(self, partial: Path) -> dict[str, list[Row]]:
        """The jobs in the file, if it is of the same options and the same source. Otherwise it is begun anew."""
        module = sys.modules.get(f"flowattn.experiments.{self.name}")
        source = Path(module.__file__).read_bytes() if module is not None and module.__file__ else b""
        mark = [self.quick, self.seed, hashlib.sha256(source).hexdigest()]
        lines = partial.read_text().splitlines(keepends=True) if partial.exists() else []
        lines = [line for line in lines if line.endswith("\n")]  # the last one may have been cut
        if not lines or json.loads(lines[0]) != mark:
            lines = [json.dumps(mark) + "\n"]
        partial.write_text("".join(lines))
        return dict(json.loads(line) for line in lines[1:])


def save_figure(path: Path, plot: Callable[[], Figure]) -> None:
    """Draws a figure in our style and writes it, into a folder that is made where it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        figure = plot()
        figure.savefig(path, dpi=160)
    plt.close(figure)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Numbers to six digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, column_names(rows), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def column_names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def column(rows: Iterable[Row], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def where(rows: Iterable[Row], **values: str | int | float) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in values.items())]


def fitted_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y against log x by least squares.

    Example:
        >>> round(fitted_exponent([1, 4, 16], [1, 2, 4]), 6)
        0.5
    """
    a, b = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    a = a - a.mean()
    return ((a * b).sum() / a.square().sum()).item()


def plain_ticks(ax: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """Plain numbers in place of powers of ten: those of 1, 2, 5, 10, ... in range, or of 1, 10, 100 if it is wide."""
    low, high = min(values), max(values)
    digits = (1,) if high > 300 * low else (1, 2, 5)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [tick for e in exponents for m in digits if low * 0.999 <= (tick := m * 10.0**e) <= high * 1.001]
    set_ticks = ax.set_xticks if axis == "x" else ax.set_yticks
    set_ticks(ticks, [f"{tick:,.10g}" for tick in ticks])
    set_ticks([], minor=True)


def _text(value: str | int | float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
