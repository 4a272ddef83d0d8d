"""Interleaved timing: rivals take turns, so that a slow moment of the machine hits them alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from rich.progress import track


def medians(rivals: dict[str, Callable[[], object]], rounds: int = 25, title: str = "") -> dict[str, float]:
    """The median time of each rival in milliseconds, after one round of warming up.

    Every round has an order of its own, drawn: what ran before leaves the caches and the memory in its own state.
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    order, shuffle = list(rivals), random.Random(0).shuffle
    for turn in track(range(rounds + 1), description=title, transient=True):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            rivals[name]()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}
