"""What the figures of the guide share: how much is measured, the search, and ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from matplotlib.axes import Axes
from torch import Tensor

from flowattn.contractions import Contraction
from flowattn.lipschitz import search_lipschitz

HEAD = 4  # width of a head


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


def heads(features: int) -> int:
    return max(1, features // HEAD)


def plain_ticks(ax: Axes, axis: Literal["x", "y"], values: Sequence[float]) -> None:
    """Plain numbers in place of powers of ten: powers of two if there are many values, or 1, 2, 5, 10, ..."""
    low, high = min(values), max(values)
    steps = [m * 10.0**e for e in range(-3, 6) for m in ((1,) if high / low > 300 else (1, 2, 5))]
    whole = axis == "x" and all(value == int(value) for value in values)
    ticks = sorted(set(values)) if whole else [step for step in steps if low <= step <= high]
    ticks = [t for t in ticks if not whole or math.log2(t).is_integer()]
    (ax.set_xticks if axis == "x" else ax.set_yticks)(ticks, [f"{tick:g}" for tick in ticks])
    (ax.set_xticks if axis == "x" else ax.set_yticks)([], minor=True)


def search(
    f: Contraction, shape: tuple[int, int], norm: str, size: Size, before: Tensor | None
) -> tuple[float, Tensor]:
    """The best input found, with the best of a shorter sequence, repeated, among the starts."""
    start = None if before is None else before.repeat(shape[0] // len(before), 1)
    options = {"num_restarts": size.restarts, "num_steps": size.steps, "start": start, "dtype": torch.float64}
    result = search_lipschitz(f, shape, norm, **options)  # type: ignore[arg-type]
    return result.constant, result.x
