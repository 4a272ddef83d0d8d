"""Batches in an order that is a function of the seed and the epoch alone, shared out over ranks, resumed anywhere."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.data.batch import Batch, Sequences, generator


class Loader:
    r"""Iterates over the batches of a split that fall to one rank.

    Rank r of W takes the positions r, r + W, r + 2W, ... of the epoch's order, `batch_size` at a time, so that step s
    of all ranks together is the step of one process with batches of W * batch_size. Training shuffles, and leaves
    out the end of the order that does not fill a batch on every rank: all ranks take equally many steps, and other
    sequences are left out in every epoch. Evaluation goes through the rows in order and repeats and leaves out
    nothing: each sequence is on one rank once, and ranks may differ by one batch.

    Lightning stores `state_dict` in its checkpoints and restores it in the middle of an epoch: the batches that
    follow are then exactly those that were still to come. It announces epochs through `batch_sampler.sampler`, after
    it has asked for the iterator; so the order is fixed when the first batch is taken.

    The data are in memory and a batch is one indexing: there are no worker processes.

    Args:
        sequences: the split.
        batch_size: the number of sequences in a batch, on each rank.
        shuffle: whether this is for training.
        seed: of the order.
        rank: of this process.
        num_ranks: the number W of processes.

    Example:
        >>> split = Sequences(torch.zeros(5, 1, 1))
        >>> [batch.index.tolist() for batch in Loader(split, 2)]
        [[0, 1], [2, 3], [4]]
        >>> len(Loader(split, 2, shuffle=True))
        2
    """

    def __init__(
        self,
        sequences: Sequences,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        check_positive(batch_size=batch_size, num_ranks=num_ranks)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must be in 0 to num_ranks - 1; got rank={rank}, num_ranks={num_ranks}.")
        if shuffle and len(sequences) < batch_size * num_ranks:
            raise ValueError(
                f"batch_size times the number of ranks must be at most the number of training sequences; got "
                f"batch_size={batch_size}, {num_ranks} ranks and {len(sequences)} sequences."
            )
        self.dataset = sequences
        # Plain numbers, because checkpoints that are loaded as weights only may hold no others.
        self.batch_size, self.num_ranks = operator.index(batch_size), operator.index(num_ranks)
        self.seed, self.rank = operator.index(seed), operator.index(rank)
        self.shuffle = bool(shuffle)
        self.batch_sampler = _Announced(self)
        self._epoch = 0
        self._position = 0
        self._restored: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration."""
        self._epoch = epoch

    def order(self) -> Tensor:
        """The rows that fall to this rank in this epoch, in order."""
        total = len(self.dataset)
        if not self.shuffle:
            return torch.arange(total)[self.rank :: self.num_ranks]
        together = self.batch_size * self.num_ranks
        order = torch.randperm(total, generator=generator(self.seed, self._epoch))
        return order[self.rank : total // together * together : self.num_ranks]

    def __len__(self) -> int:
        """The number of batches of an epoch, whatever was taken already."""
        if self.shuffle:
            return len(self.dataset) // (self.batch_size * self.num_ranks)
        mine = len(range(self.rank, len(self.dataset), self.num_ranks))
        return -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: nothing below runs before the first batch is wanted, when the epoch is known.
        self._position = self._start()
        order = self.order()
        while self._position < len(self):
            start = self._position * self.batch_size
            self._position += 1
            yield self.dataset.batch(order[start : start + self.batch_size])

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, and what its order depends on."""
        return {"epoch": self._epoch, "position": self._position, **self._settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next iteration go on from there, if it is of the same epoch."""
        self._restored = dict(state)
        self._epoch, self._position = state["epoch"], state["position"]

    def _start(self) -> int:
        state, self._restored = self._restored, None
        if state is None or state["epoch"] != self._epoch or state["position"] in (0, len(self)):
            return 0
        changed = {key: (state[key], now) for key, now in self._settings().items() if state[key] != now}
        if changed:
            raise ValueError(
                f"The checkpoint is from the middle of epoch {state['epoch']}, which can only go on as it began; but "
                + ", ".join(f"{key} was {was} and is {now}" for key, (was, now) in changed.items())
                + ". Restore these, or start from a checkpoint of the end of an epoch."
            )
        return int(state["position"])

    def _settings(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "global_batch_size": self.batch_size * self.num_ranks,
            "num_sequences": len(self.dataset),
        }


class _Announced:
    """Where Lightning looks for something that wants to know the epoch."""

    def __init__(self, sampler: Loader) -> None:
        self.sampler = sampler
