"""Writes what `predict` computes: a row for each sequence, and a histogram."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from flowattn.training.progress import tell
from flowattn.training.ranks import gather_rows

SUFFIXES = (".csv", ".parquet", ".npz")


class PredictionWriter(Callback):
    """Collects what is predicted, and writes it when all is done: on every rank, whatever started it.

    Args:
        out: a .csv, .parquet or .npz.
    """

    def __init__(self, out: Path) -> None:
        if out.suffix not in SUFFIXES:
            raise ValueError(f"out must end in one of {', '.join(SUFFIXES)}; got {out}.")
        self.out = out
        self.parts: list[dict[str, Tensor]] = []

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.parts.append({name: value.detach().cpu() for name, value in outputs.items()})

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tell(write_predictions(self.parts, self.out, trainer.is_global_zero))


def write_predictions(parts: list[dict[str, Tensor]], out: Path, is_first: bool) -> list[Path]:
    """Writes the rows of all batches of all ranks, by index, in the format that the suffix of `out` says.

    Called on all ranks, done by the first, which gets to know what was written.
    """
    rows = gather_rows(parts)
    if not is_first or not rows:
        return []
    columns = {name: value.numpy() for name, value in rows.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".npz":
        np.savez(out, **columns)  # type: ignore[arg-type]
    elif out.suffix == ".parquet":
        _write_parquet(columns, out)
    else:
        with open(out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))
    picture = out.with_suffix(".png")
    histogram(columns).savefig(picture, dpi=150)
    return [out, picture]


def histogram(columns: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    values = columns["log_prob_per_token"]
    finite = values[np.isfinite(values)]
    axes.hist(finite, bins="auto", color="#0072B2")
    left_out = f", {len(values) - len(finite):,} of them not finite" if len(finite) < len(values) else ""
    axes.set(xlabel="log-density per token (nats)", ylabel="sequences", title=f"{len(values):,} sequences{left_out}")
    return figure


def _write_parquet(columns: dict[str, Any], out: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{out} needs pyarrow: pip install 'flowattn[data]', or write .csv or .npz.") from error
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
