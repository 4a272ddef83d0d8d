"""The user's own sequences, from .npy, .npz, .csv and .parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowattn.checks import check_positive
from flowattn.data.base import SequenceData, Sequences, generator
from flowattn.data.sources import ArraySource, Source, TableSource

ARRAYS, TABLES = (".npy", ".npz"), (".csv", ".parquet")


class ArraySequences(SequenceData):
    """Sequences of one file, shared out over the splits by chance.

    - .npy: an array [sequences, tokens, features], of fixed length.
    - .npz: such an array `inputs`; where lengths vary `mask`, boolean [sequences, tokens] and True at real tokens;
      to condition on something `context`, [sequences, width] or [sequences, tokens, width].
    - .csv and .parquet: a row for each token, in named columns. Either a column says which sequence a token belongs
      to, or all sequences have the same `length`.

    The shape of events is read from the headers of arrays. A table with a `sequence_column` is gone through once for
    it, that column only, because the longest sequence must be known. Rows of a sequence must follow one another, in
    the order of its tokens.

    Predictions are numbered by the rows of the file, whatever split they are of.

    Values are kept in float32 and in the units of the file. A file with a value that is missing, infinite, no number
    or out of the range of float32 is refused, and so is a feature that never changes, or that float32 cannot resolve.

    Args:
        path: the file.
        sequence_column: the column of a table that says which sequence a row belongs to.
        length: the number of tokens of every sequence of a table without such a column.
        feature_columns: the columns to model; None for all that have no other role.
        context_columns: the columns to condition on, token by token; None for none.
        val_fraction: how many of the sequences are for validation.
        test_fraction: how many are for the test.
        kwargs: those of `SequenceData`; the seed is that of the split, too.
    """

    def __init__(
        self,
        path: str,
        sequence_column: str | None = None,
        length: int | None = None,
        feature_columns: Sequence[str] | None = None,
        context_columns: Sequence[str] | None = None,
        val_fraction: float = 0.1,
        test_fraction: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = Path(path).expanduser()
        if self.path.suffix not in ARRAYS + TABLES:
            raise ValueError(f"path must end in {', '.join(ARRAYS + TABLES)}; got path={str(path)!r}.")
        if not self.path.is_file():
            raise FileNotFoundError(f"path must be a file; there is none at {self.path}.")
        if not (0 < val_fraction < 1 and 0 < test_fraction < 1 and val_fraction + test_fraction < 1):
            raise ValueError(
                "val_fraction and test_fraction must be above 0 and leave something to train on; got "
                f"val_fraction={val_fraction}, test_fraction={test_fraction}."
            )
        of_tables = {
            "sequence_column": sequence_column,
            "length": length,
            "feature_columns": feature_columns,
            "context_columns": context_columns,
        }
        if length is not None:
            check_positive(length=length)
        self.fractions = {"val": val_fraction, "test": test_fraction}
        self.source: Source
        if self.path.suffix in ARRAYS:
            for name, value in of_tables.items():
                if value is not None:
                    raise ValueError(f"{name} is for {' and '.join(TABLES)}; got {name}={value!r} for {self.path}.")
            self.source = ArraySource(self.path)
        else:
            if (sequence_column is None) == (length is None):
                raise ValueError(
                    "Either sequence_column or length must say where sequences begin in a table; got "
                    f"sequence_column={sequence_column!r}, length={length!r}."
                )
            self.source = TableSource(self.path, sequence_column, length, feature_columns, context_columns)

    @property
    def event_shape(self) -> tuple[int, int]:
        return self.source.shapes.event

    @property
    def context_features(self) -> int | None:
        return self.source.shapes.context_features

    def load(self) -> dict[str, Sequences]:
        """Reads the file and shares its sequences out."""
        whole = self.source.read()
        sizes = {name: max(1, round(fraction * len(whole))) for name, fraction in self.fractions.items()}
        sizes = {"train": len(whole) - sum(sizes.values()), **sizes}
        if sizes["train"] < 1:
            raise ValueError(
                f"val_fraction and test_fraction must leave a sequence to train on of the {len(whole)} in {self.path}; "
                f"got val_fraction={self.fractions['val']}, which is {sizes['val']} of them, and test_fraction="
                f"{self.fractions['test']}, which is {sizes['test']}."
            )
        order = torch.randperm(len(whole), generator=generator(self.seed)).split(list(sizes.values()))
        return {name: whole.subset(rows) for name, rows in zip(sizes, order, strict=True)}
