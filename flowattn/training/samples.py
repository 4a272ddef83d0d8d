"""Writes samples of a flow, and a picture of them beside data."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from rich.progress import Progress
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.context import split_context
from flowattn.data.base import SequenceData
from flowattn.data.batch import Batch

SUFFIXES = (".npz", ".npy", ".csv")


def write_samples(
    sample: Callable[[int, Tensor | None], Tensor],
    out: Path,
    num_samples: int,
    batch_size: int,
    datamodule: LightningDataModule | None,
    device: torch.device,
) -> list[Path]:
    """Samples in batches, and writes them by the suffix of `out`: .npz (samples and mask, also without), .npy or .csv.

    Where the data have masks or features to condition on, the samples take those of the test split, row by row, and
    from the start again when they are used up.
    """
    check_positive(num_samples=num_samples, batch_size=batch_size)
    out = out if out.suffix else out.with_suffix(".npz")
    if out.suffix not in SUFFIXES:
        raise ValueError(f"out must end in one of {', '.join(SUFFIXES)}; got {out}.")
    if not isinstance(datamodule, SequenceData):
        raise ValueError("sample needs a data module of sequences, to draw samples beside.")
    split = datamodule.split("test")
    rows = torch.arange(num_samples) % len(split)
    parts: list[Tensor] = []
    with Progress() as progress:
        bar = progress.add_task("sampling", total=num_samples)
        for start in range(0, num_samples, batch_size):
            context = split.batch(rows[start : start + batch_size]).context
            size = min(batch_size, num_samples - start)
            parts.append(sample(size, None if context is None else context.to(device)).cpu())
            progress.advance(bar, size)
    samples, data = torch.cat(parts), split.batch(rows)
    _, mask = split_context(data.context, samples)
    out.parent.mkdir(parents=True, exist_ok=True)
    _write(out, samples.numpy(), None if mask is None else mask.numpy())
    picture = out.with_suffix(".png")
    datamodule.draw(data, shown(samples, data)).savefig(picture, dpi=150)
    return [out, picture]


def shown(samples: Tensor, data: Batch) -> Tensor:
    """Samples for a picture: not a number where there is padding."""
    _, mask = split_context(data.context, samples)
    return samples if mask is None else samples.masked_fill(~mask.unsqueeze(-1), torch.nan)


def _write(out: Path, samples: np.ndarray, mask: np.ndarray | None) -> None:
    if out.suffix == ".npz":
        np.savez(out, samples=samples, **({} if mask is None else {"mask": mask}))  # type: ignore[arg-type]
    elif out.suffix == ".npy":
        np.save(out, samples)
    else:
        with open(out, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["sequence", "token", *(f"feature_{k}" for k in range(samples.shape[2]))])
            for row, token in np.argwhere(np.ones(samples.shape[:2], bool) if mask is None else mask):
                writer.writerow([row, token, *samples[row, token]])
