"""Texts character by character: a continuous stream, or line by line."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from pytorch_lightning import LightningDataModule
from torch import Tensor

from flowattn.checks import check_choice, check_positive
from flowattn.data.loader import Loader
from flowattn.data.text import PENN_TREEBANK_URL, decode, encode, fetch_penn_treebank, open_text
from flowattn.data.windows import Lines, StreamWindows

log = logging.getLogger(__name__)

LONGEST_LINE = 288  # of those who take lines one by one


class CharLoader(Loader):
    """The `Loader` of windows and lines."""

    def order(self) -> Tensor:
        return self.dataset.rows(super().order(), self.seed, self._epoch)  # type: ignore[attr-defined]


class CharCorpus(LightningDataModule):
    """The characters of a text, in batches that can be resumed and are shared out over ranks.

    A folder with Mikolov's ptb.train.txt, ptb.valid.txt and ptb.test.txt is the Penn Treebank in the standard count:
    5,017,482, 393,042 and 442,423 characters of 50 kinds, the end of a line being one of them and `<unk>` five. Any
    other text file is cut into 90, 5 and 5 percent. Without a path the text is Python's own documentation, in lower
    case and of 50 kinds of characters; it differs from version to version of Python.

    Args:
        path: a folder with the Penn Treebank, a text file in UTF-8, or None.
        download: whether to fetch the Penn Treebank into `path` if it is not there and no file of another text is. Its
            licence is the reader's business.
        url: the folder to fetch it from.
        mode: "stream" goes on over the ends of lines, as the standard count has it; "lines" takes each line by
            itself and leaves out those of more than 288 characters, which makes other, incomparable numbers.
        max_tokens: length of a window; of lines, the longest with its end, at most 289.
        overlap: how many characters an evaluated window shares with the one before, as context only.
        batch_size: texts in a batch of training, on each device.
        eval_batch_size: the same for evaluation; None for `batch_size`.
        seed: of the order of batches.
        cache: folder of the memory-mapped symbols; None for flowattn in the user's cache folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = CharCorpus(max_tokens=16, batch_size=4, cache=folder)
        ...     corpus.setup()
        ...     batch = next(iter(corpus.train_dataloader()))
        >>> len(corpus.alphabet), batch.inputs.shape
        (50, torch.Size([4, 16]))
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        download: bool = False,
        url: str = PENN_TREEBANK_URL,
        mode: Literal["stream", "lines"] = "stream",
        max_tokens: int = 128,
        overlap: int = 0,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        seed: int = 0,
        cache: str | os.PathLike | None = None,
    ) -> None:
        super().__init__()
        check_positive(max_tokens=max_tokens, batch_size=batch_size)
        if eval_batch_size is not None:
            check_positive(eval_batch_size=eval_batch_size)
        check_choice("mode", mode, ("stream", "lines"))
        if not 0 <= overlap < max_tokens:
            raise ValueError(f"overlap must be at least 0 and below max_tokens={max_tokens}; got overlap={overlap}.")
        if mode == "lines" and (overlap or max_tokens > LONGEST_LINE + 1):
            raise ValueError(
                f"mode='lines' takes no overlap and max_tokens of at most {LONGEST_LINE + 1}, which is "
                f"{LONGEST_LINE} characters and the end; got overlap={overlap}, max_tokens={max_tokens}."
            )
        if download and path is None:
            raise ValueError("download=True needs a path, the folder that the Penn Treebank goes to.")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0; got seed={seed!r}.")
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.path = None if path is None else Path(path)
        self.download = download
        self.url = url
        self.mode = mode
        self.max_tokens = max_tokens
        self.overlap = overlap
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed = seed
        self.cache = _cache_folder() if cache is None else Path(cache)
        self._alphabet: str | None = None
        self._symbols: dict[str, np.ndarray] = {}

    def prepare_data(self) -> None:
        """Fetches the files and writes the symbols, in one process."""
        if self.download and self.path is not None and not self.path.is_file():
            fetch_penn_treebank(self.path, self.url)
        open_text(self.path, self.cache)

    def setup(self, stage: str | None = None) -> None:
        """Opens the symbols."""
        if self._alphabet is not None:
            return
        if self.trainer is None:
            self.prepare_data()
        self._alphabet, self._symbols = open_text(self.path, self.cache)
        for name in self._symbols:
            if len(self.split(name)) == 0:
                raise ValueError(f"max_tokens={self.max_tokens} is more than the split {name!r} has to give.")

    @property
    def alphabet(self) -> str:
        """The symbols, in order."""
        self.setup()
        assert self._alphabet is not None
        return self._alphabet

    def num_characters(self, name: str) -> int:
        """How many characters a split has, in the standard count."""
        self.setup()
        return len(self._symbols[name])

    def split(self, name: str) -> StreamWindows | Lines:
        """The texts of "train", "val" or "test"."""
        check_choice("name", name, ("train", "val", "test"))
        self.setup()
        symbols, end = self._symbols[name], self.alphabet.find("\n")
        first = max(end, 0)
        if self.mode == "stream":
            return StreamWindows(symbols, self.max_tokens, first, None if name == "train" else self.overlap)
        lines = Lines(symbols, self.max_tokens, first, end)
        if lines.num_left_out:
            log.info(
                "%d of %d lines of %s are over %d characters and left out; state is reset at each line: not the "
                "standard count.",
                lines.num_left_out, lines.num_left_out + len(lines), name, self.max_tokens - 1,
            )  # fmt: skip
        return lines

    def encode(self, text: str) -> Int[Tensor, " characters"]:
        """The numbers of the characters of a text."""
        return torch.from_numpy(encode(text, self.alphabet).astype(np.int64))

    def decode(self, numbers: Int[Tensor, " characters"]) -> str:
        """The text of such numbers."""
        return decode(numbers.numpy(), self.alphabet)

    def train_dataloader(self) -> CharLoader:
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader("train", self.batch_size, shuffle=not overfit)

    def val_dataloader(self) -> CharLoader:
        return self._loader("val", self.eval_batch_size)

    def test_dataloader(self) -> CharLoader:
        return self._loader("test", self.eval_batch_size)

    def predict_dataloader(self) -> CharLoader:
        return self._loader("test", self.eval_batch_size)

    def _loader(self, name: str, batch_size: int, shuffle: bool = False) -> CharLoader:
        rank, num_ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return CharLoader(self.split(name), batch_size, shuffle, self.seed, rank, num_ranks)  # type: ignore[arg-type]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowattn"
