"""The one table of `test`: a model beside what is known about its data."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowattn.data.base import SequenceData
from flowattn.data.batch import Batch
from flowattn.metrics import Likelihood, lengths
from flowattn.training.ranks import gather_rows


class Row(NamedTuple):
    """A density and how well it fits, in nats but for the bits per dimension."""

    density: str
    nll: float
    nll_error: float
    token_nll: float
    bpd: float


class Report:
    """Collects log-densities of the test split under a model, under references and under the truth.

    Args:
        data: the data module, which perhaps knows the truth.
        name: of the model.
        references: log-densities under simple models of the same space, by name.
        device: where batches are.
        is_exact: whether the model's log-determinants are exact.
        is_mean_free: whether one of a sequence's tokens is given by the others.
    """

    def __init__(
        self,
        data: SequenceData,
        name: str,
        references: dict[str, Callable[[Batch], Tensor]],
        device: torch.device,
        is_exact: bool,
        is_mean_free: bool,
    ) -> None:
        self.data = data
        self.is_exact = is_exact
        self.is_mean_free = is_mean_free
        self.name = name
        self.references = references
        self.metrics = {
            label: Likelihood(data.event_shape[1], is_mean_free).to(device)
            for label in [name, *self.references, "truth"]
        }
        self.rows: list[dict[str, Tensor]] = []

    def add(self, batch: Batch, log_prob: Tensor) -> None:
        """Counts a batch and its log-densities under the model."""
        length = lengths(batch.inputs, batch.context)
        self.metrics[self.name].update(log_prob, length)
        for label, reference in self.references.items():
            self.metrics[label].update(reference(batch), length)
        row = {"index": batch.index, "length": length, "model": log_prob.double()}
        true = self.data.log_density(batch)
        if true is not None:
            self.metrics["truth"].update(true, length)
            row["truth"] = true.double()
        self.rows.append(row)

    def show(self, folder: Path, is_first: bool) -> None:
        """Prints the table, and writes it with the pictures; called on all ranks, done by the first."""
        values = {label: metric.values() for label, metric in self.metrics.items()}
        rows = gather_rows(self.rows)
        if not is_first or not rows:
            return
        table = [Row(label, **value) for label, value in values.items() if label != "truth" or "truth" in rows]
        entropy = self.data.entropy()
        if entropy is not None:
            tokens = rows["length"].double().mean().item()
            dimensions = self.data.event_shape[1] * (tokens - 1 if self.is_mean_free else tokens)
            table.append(Row("entropy", *entropy, entropy[0] / tokens, entropy[0] / (dimensions * math.log(2))))
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "test.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(table)
        logdet = "exact" if self.is_exact else "as in training"
        notes = [f"{len(rows['index']):,} sequences of the test split; log-determinants: {logdet}"]
        if "truth" in rows:
            gap = (rows["truth"] - rows["model"]) / rows["length"].double().mean()
            error = gap.std().item() / math.sqrt(len(gap))
            notes.append(f"divergence from the truth: {gap.mean():.4f} ± {error:.4f} nats per token")
            path = folder / "test-densities.png"
            scatter(rows["truth"], rows["model"]).savefig(path, dpi=150)
            notes.append(f"true against modelled: {path}")
        print_table(table, notes)


def print_table(rows: list[Row], notes: list[str]) -> None:
    table = Table("density", title="negative log-likelihood", title_justify="left")
    for heading in ("nats per sequence", "nats per token", "bits per dimension"):
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows):
        nats = f"{row.nll:.3f} ± {row.nll_error:.3f}"
        table.add_row(
            row.density, nats, f"{row.token_nll:.4f}", f"{row.bpd:.4f}", style="bold" if number == 0 else None
        )
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def scatter(true: Tensor, modelled: Tensor) -> Figure:
    """Each sequence's log-density under the model over that under the truth, and the line where they agree."""
    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(true.numpy(), modelled.numpy(), ".", markersize=2, alpha=0.4, color="#0072B2")
    ends = [float(true.min()), float(true.max())]
    axes.plot(ends, ends, color="black", linewidth=1)
    axes.set(xlabel="true log-density (nats)", ylabel="modelled log-density (nats)")
    axes.set_title(f"{len(true):,} sequences; mean gap {float((true - modelled).mean()):.2f} nats")
    return figure
