"""Tables of numbers in .csv and .parquet files, read with the place of whatever is wrong in them."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from flowattn.data.packages import require


class Table(ABC):
    """A file with named columns, each of which is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def names(self) -> list[str]:
        """The names of the columns; reads the head of the file only."""
        names = self._names()
        for number, name in enumerate(names):
            if not name.strip() or name in names[:number]:
                raise ValueError(
                    f"{self.path}: column {number + 1} must have a name, and one of its own; got {name!r}."
                )
        return names

    @abstractmethod
    def _names(self) -> list[str]: ...

    @abstractmethod
    def read(self, columns: Sequence[str]) -> dict[str, list[Any] | np.ndarray]:
        """The cells of these columns, as they are."""

    @abstractmethod
    def where(self, row: int) -> str:
        """How to find a row of the last reading, counted from 0, in the file."""

    def numbers(self, columns: Sequence[str]) -> Float[np.ndarray, "rows columns"]:
        """These columns as finite numbers."""
        return np.stack([self._parse(name, cells) for name, cells in self.read(columns).items()], 1)

    def runs(self, column: str) -> list[int]:
        """How many rows after one another have the same entry in this column; an entry may not come back."""
        cells = self.read([column])[column]
        ids = cells.tolist() if isinstance(cells, np.ndarray) else cells
        lengths: list[int] = []
        seen: set[Any] = set()
        previous = None
        for row, entry in enumerate(ids):
            if entry is None or entry == "" or entry != entry:
                raise ValueError(f"{self.where(row)}, column {column!r}: the sequence must have an id; got {entry!r}.")
            if row and entry == previous:
                lengths[-1] += 1
                continue
            if entry in seen:
                raise ValueError(
                    f"{self.where(row)}, column {column!r}: the rows of a sequence must follow one another; got "
                    f"{entry!r} again, after others. Sort the file by {column!r}."
                )
            seen.add(entry)
            lengths.append(1)
            previous = entry
        return lengths

    def _parse(self, name: str, cells: list[Any] | np.ndarray) -> np.ndarray:
        try:
            numeric = isinstance(cells, np.ndarray)
            values = np.asarray(cells if numeric else [float(cell) for cell in cells], dtype=np.float64)
        except (TypeError, ValueError):
            row = next(row for row, cell in enumerate(cells) if not _is_number(cell))
            raise ValueError(f"{self.where(row)}, column {name!r}: must be a number; got {cells[row]!r}.") from None
        if not np.isfinite(values).all():
            row = int((~np.isfinite(values)).argmax())
            raise ValueError(f"{self.where(row)}, column {name!r}: must be finite; got {values[row]}.")
        return values


class CsvTable(Table):
    """Comma-separated text in UTF-8 whose first line names the columns."""

    def _names(self) -> list[str]:
        names = next(self._lines(), (0, []))[1]
        if not names:
            raise ValueError(f"{self.path} is empty: its first line must name the columns.")
        if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
            raise ValueError(f"{self.path}, line 1: columns must be separated by commas; got {names[0]!r}.")
        if all(_is_number(name) for name in names):
            raise ValueError(f"{self.path}, line 1: must name the columns; got the numbers {', '.join(names)}.")
        return [name.strip() for name in names]

    def read(self, columns: Sequence[str]) -> dict[str, list[Any] | np.ndarray]:
        places = [self.names.index(name) for name in columns]
        cells: list[list[Any]] = [[] for _ in columns]
        self._line_of: list[int] = []
        lines = self._lines()
        next(lines)
        for line, row in lines:
            if len(row) != len(self.names):
                raise ValueError(f"{self.path}, line {line}: must have {len(self.names)} columns; got {len(row)}.")
            self._line_of.append(line)
            for column, place in zip(cells, places, strict=True):
                column.append(row[place].strip())
        return dict(zip(columns, cells, strict=True))

    def where(self, row: int) -> str:
        return f"{self.path}, line {self._line_of[row]}"

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """The rows with their line numbers, without blank lines."""
        try:
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.reader(file, strict=True)
                for row in reader:
                    if row:
                        yield reader.line_num, row
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{self.path} is not comma-separated text in UTF-8: {error}.") from None


class ParquetTable(Table):
    """A Parquet file with columns of numbers."""

    @cached_property
    def _file(self) -> Any:
        parquet = require("pyarrow.parquet", "ArraySequences with a .parquet file")
        arrow = require("pyarrow", "ArraySequences with a .parquet file")
        try:
            return parquet.ParquetFile(self.path)
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} is not a Parquet file: {str(error).strip().rstrip('.')}.") from None

    def _names(self) -> list[str]:
        return list(self._file.schema_arrow.names)

    def read(self, columns: Sequence[str]) -> dict[str, list[Any] | np.ndarray]:
        arrow = require("pyarrow", "ArraySequences with a .parquet file")
        try:
            table = self._file.read(columns=list(columns))
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self.path} cannot be read: {str(error).strip().rstrip('.')}.") from None
        return {name: _cells(arrow, table.column(name)) for name in columns}

    def where(self, row: int) -> str:
        return f"{self.path}, row {row}"


def open_table(path: Path) -> Table:
    """The table in a file, by the ending of its name."""
    return CsvTable(path) if path.suffix == ".csv" else ParquetTable(path)


def _cells(arrow: Any, column: Any) -> list[Any] | np.ndarray:
    """The cells of a Parquet column: an array where all are numbers, else a list of Python objects."""
    plain = arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)
    return column.to_numpy() if plain and column.null_count == 0 else column.to_pylist()


def _is_number(cell: Any) -> bool:
    try:
        float(cell)
    except (TypeError, ValueError):
        return False
    return True
