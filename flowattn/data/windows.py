"""Batches of characters: windows of a stream, or lines."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from flowattn.data.batch import generator

NOTHING = -1  #: the target where nothing is to be predicted


class CharBatch(NamedTuple):
    """Characters, the character that follows each (or `NOTHING`), and where the texts begin in their split."""

    inputs: Int[Tensor, "batch tokens"]
    targets: Int[Tensor, "batch tokens"]
    index: Int[Tensor, " batch"]  # type: ignore[assignment]  # tuples have a method of this name


class StreamWindows:
    """Windows of a text that goes on without a break. Before its first character there is `first`.

    In training every epoch shifts the windows. In evaluation every character is predicted once, those of the first
    window from all before them, later ones from `overlap` characters at least.
    """

    def __init__(self, symbols: np.ndarray, tokens: int, first: int, overlap: int | None) -> None:
        self.symbols, self.tokens, self.first, self.overlap = symbols, tokens, first, overlap
        self.stride = tokens if overlap is None else tokens - overlap

    def __len__(self) -> int:
        if self.overlap is None:  # as many as there are after any shift
            return (len(self.symbols) - self.tokens + 1) // self.tokens
        return 1 + max(0, -(-(len(self.symbols) - self.tokens) // self.stride))

    def rows(self, order: Tensor, seed: int, epoch: int) -> Tensor:
        """Where the windows of these numbers begin in this epoch."""
        if self.overlap is not None:
            return order * self.stride
        return order * self.tokens + torch.randint(self.tokens, (), generator=generator(seed, epoch, 1))

    def batch(self, starts: Tensor) -> CharBatch:
        where = starts.numpy()[:, None] + np.arange(-1, self.tokens)
        inside = where < len(self.symbols)
        symbols = self.symbols[np.where(inside, where, 0).clip(min=0)].astype(np.int64)
        symbols[where == -1] = self.first
        targets = np.where(inside[:, 1:], symbols[:, 1:], NOTHING)
        if self.overlap:
            seen = (np.arange(self.tokens) < self.overlap) & (starts.numpy()[:, None] > 0)
            targets[seen] = NOTHING
        return CharBatch(torch.from_numpy(symbols[:, :-1].copy()), torch.from_numpy(targets), starts)


class Lines:
    """The lines of a text, each by itself, its end included. Before its first character there is `first`."""

    def __init__(self, symbols: np.ndarray, tokens: int, first: int, end: int) -> None:
        ends = np.flatnonzero(symbols == end) + 1
        if not len(ends) or ends[-1] < len(symbols):
            ends = np.append(ends, len(symbols))
        starts = np.concatenate([[0], ends[:-1]])
        fits = ends - starts <= tokens
        self.symbols, self.first = symbols, first
        self.starts, self.ends = starts[fits], ends[fits]
        self.num_left_out = int((~fits).sum())

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, order: Tensor, seed: int, epoch: int) -> Tensor:
        return order

    def batch(self, rows: Tensor) -> CharBatch:
        starts, ends = self.starts[rows.numpy()], self.ends[rows.numpy()]
        where = starts[:, None] + np.arange((ends - starts).max())
        inside = where < ends[:, None]
        targets = np.where(inside, self.symbols[np.where(inside, where, 0)].astype(np.int64), NOTHING)
        inputs = np.concatenate([np.full((len(rows), 1), self.first), targets[:, :-1]], 1)
        return CharBatch(
            torch.from_numpy(np.where(inputs == NOTHING, self.first, inputs)), torch.from_numpy(targets), rows
        )
