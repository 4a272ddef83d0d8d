"""Interleaved timing: rivals take turns, so that a slow moment of the machine hits them alike."""

from __future__ import annotations

import ctypes
import random
import statistics
import sys
import time
from collections.abc import Callable

from rich.progress import track


def medians(rivals: dict[str, Callable[[], object]], rounds: int = 25, title: str = "") -> dict[str, float]:
    """The median time of each rival in milliseconds, after one round of warming up.

    Every round has an order of its own, drawn: what ran before leaves the caches in its own state. It leaves the heap
    so, too: some of the memory that it has freed goes back to the system in the middle of the next call. That is done
    before the clock starts, so that each pays for the memory that it takes and for no other.
    """
    times: dict[str, list[float]] = {name: [] for name in rivals}
    order, shuffle = list(rivals), random.Random(0).shuffle
    for turn in track(range(rounds + 1), description=title, transient=True):
        shuffle(order)
        for name in order:
            _give_memory_back()
            start = time.perf_counter()
            rivals[name]()
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def _give_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # of the GNU C library, others have none
        trim(0)
