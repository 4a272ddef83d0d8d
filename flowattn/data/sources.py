"""Sequences in files of the user's: their shapes at first sight, and all of them checked when they are read."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flowattn.data.batch import Sequences
from flowattn.data.tables import open_table

MEMBERS = ("inputs", "mask", "context")


class Shapes(NamedTuple):
    """What is known of a file before its numbers are read."""

    event: tuple[int, int]
    context_features: int | None


class Source(ABC):
    """A file of sequences."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    @abstractmethod
    def shapes(self) -> Shapes:
        """The shape of events and the width of the context."""

    @abstractmethod
    def read(self) -> Sequences:
        """All sequences of the file."""

    @abstractmethod
    def feature(self, number: int) -> str:
        """What the file calls a feature."""

    def _finish(self, inputs: np.ndarray, mask: np.ndarray | None, context: np.ndarray | None) -> Sequences:
        """Checks that every feature has a density that float32 can tell, and keeps the arrays in it."""
        tokens = (inputs.reshape(-1, inputs.shape[2]) if mask is None else inputs[mask]).astype(np.float64, copy=False)
        low, high = tokens.min(0), tokens.max(0)
        largest = np.maximum(abs(low), abs(high))
        deviation = (tokens / np.where(largest > 0, largest, 1)).std(0)  # over the largest, so that squares are safe
        for number in range(inputs.shape[2]):
            place = f"{self.path}, {self.feature(number)}"
            if low[number] == high[number]:
                raise ValueError(f"{place}: is {low[number]} in every token and has no density. Leave it out.")
            if largest[number] > 3e38 or deviation[number] < 1e3 * 2.0**-24:
                raise ValueError(
                    f"{place}: float32 cannot tell values from {low[number]:.9g} to {high[number]:.9g} apart. "
                    "Subtract an offset, or rescale."
                )
        if context is not None and abs(context).max() > 3e38:
            raise ValueError(f"{self.path}, context: must be in the range of float32; got {abs(context).max():.9g}.")
        return Sequences(
            torch.from_numpy(inputs.astype(np.float32)),
            None if mask is None else torch.from_numpy(mask),
            None if context is None else torch.from_numpy(context.astype(np.float32)),
        )


class ArraySource(Source):
    """An array in .npy, or arrays `inputs`, `mask` and `context` in .npz."""

    @cached_property
    def shapes(self) -> Shapes:
        heads = self._heads
        context = heads.get("context")
        tokens, features = heads["inputs"][0][1:]
        return Shapes((tokens, features), None if context is None else context[0][-1])

    def read(self) -> Sequences:
        heads = self._heads
        try:
            if self.path.suffix == ".npy":
                arrays = {"inputs": np.load(self.path)}
            else:
                with np.load(self.path) as file:
                    arrays = {name: file[name] for name in heads}
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} cannot be read: {str(error).rstrip('.')}.") from None
        mask = arrays.get("mask")
        if mask is not None and not mask.any(1).all():
            raise ValueError(f"{self.path}, mask: sequence {int((~mask.any(1)).argmax())} has no real token.")
        for name in ("inputs", "context"):
            if name in arrays:
                arrays[name] = self._only_finite(name, arrays[name], mask)
        return self._finish(arrays["inputs"], mask, arrays.get("context"))

    def feature(self, number: int) -> str:
        return f"feature {number} of inputs"

    @cached_property
    def _heads(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """The shape and type of each array, from its header."""
        try:
            if self.path.suffix == ".npy":
                with self.path.open("rb") as file:
                    heads = {"inputs": _read_head(file)}
            else:
                with zipfile.ZipFile(self.path) as archive:
                    heads = {}
                    for name in archive.namelist():
                        with archive.open(name) as file:
                            heads[name.removesuffix(".npy")] = _read_head(file)
        except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} is not a whole {self.path.suffix} file: {str(error).rstrip('.')}.") from None
        self._check_heads(heads)
        return heads

    def _check_heads(self, heads: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        unknown = sorted(set(heads) - set(MEMBERS))
        if "inputs" not in heads or unknown:
            raise ValueError(
                f"{self.path} must hold an array 'inputs' and nothing else but 'mask' and 'context'; got "
                f"{', '.join(map(repr, heads)) or 'no array'}."
            )
        for name, (_, dtype) in heads.items():
            if (name == "mask") != (dtype.kind == "b") or dtype.kind not in "buif":
                raise ValueError(f"{self.path}, {name}: must be {_wanted(name)}; got the type {dtype}.")
        shape = heads["inputs"][0]
        if len(shape) != 3 or 0 in shape:
            raise ValueError(
                f"{self.path}, inputs: must have shape [sequences, tokens, features], at least one of each; got "
                f"{list(shape)}."
            )
        if "mask" in heads and heads["mask"][0] != shape[:2]:
            raise ValueError(
                f"{self.path}, mask: must have shape [sequences, tokens] = {list(shape[:2])} as inputs; got "
                f"{list(heads['mask'][0])}."
            )
        context = heads["context"][0] if "context" in heads else (*shape[:2], 1)
        if len(context) not in (2, 3) or context[:-1] not in (shape[:1], shape[:2]) or context[-1] == 0:
            raise ValueError(
                f"{self.path}, context: must have shape [sequences, width] or [sequences, tokens, width] with "
                f"[sequences, tokens] = {list(shape[:2])} as inputs; got {list(context)}."
            )

    def _only_finite(self, name: str, array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """The array with zeros at padding, which may hold anything; an error at any other value that is not finite."""
        if mask is not None and array.ndim == 3:
            array = np.where(mask[..., None], array, 0)
        bad = ~np.isfinite(array)
        if bad.any():
            index = [int(i) for i in np.argwhere(bad)[0]]
            names = ("sequence", "token", "feature") if array.ndim == 3 else ("sequence", "feature")
            place = ", ".join(f"{kind} {i}" for kind, i in zip(names, index, strict=True))
            raise ValueError(f"{self.path}, {name}, {place}: must be finite; got {array[tuple(index)]}.")
        return array


class TableSource(Source):
    """A table with a row for each token, in .csv or .parquet."""

    def __init__(
        self,
        path: Path,
        sequence_column: str | None,
        length: int | None,
        feature_columns: Sequence[str] | None,
        context_columns: Sequence[str] | None,
    ) -> None:
        super().__init__(path)
        self.table = open_table(path)
        self.sequence_column, self.length = sequence_column, length
        self.feature_columns, self.context_columns = feature_columns, list(context_columns or [])

    @cached_property
    def columns(self) -> list[str]:
        """The columns to model, then those to condition on."""
        names = self.table.names
        taken = [*self.context_columns, *([] if self.sequence_column is None else [self.sequence_column])]
        features = (
            [name for name in names if name not in taken] if self.feature_columns is None else self.feature_columns
        )
        asked = [*features, *taken]
        missing = [name for name in asked if name not in names]
        if missing:
            raise ValueError(f"{self.path}: must have a column {missing[0]!r}; it has {', '.join(map(repr, names))}.")
        if not features or len(set(asked)) < len(asked):
            raise ValueError(
                f"{self.path}: every column has one role and at least one is a feature; got feature_columns="
                f"{list(features)}, context_columns={self.context_columns}, sequence_column={self.sequence_column!r}."
            )
        return [*features, *self.context_columns]

    @cached_property
    def shapes(self) -> Shapes:
        width = len(self.columns) - len(self.context_columns)
        tokens = self.length if self.length is not None else max(self._lengths)
        return Shapes((tokens, width), len(self.context_columns) or None)

    @cached_property
    def _lengths(self) -> list[int]:
        assert self.sequence_column is not None
        lengths = self.table.runs(self.sequence_column)
        if not lengths:
            raise ValueError(f"{self.path} has no rows below the names of its columns.")
        return lengths

    def read(self) -> Sequences:
        (tokens, width), _ = self.shapes
        values = self.table.numbers(self.columns)
        if self.length is None:
            lengths = np.array(self._lengths)
        else:
            if len(values) == 0 or len(values) % self.length:
                raise ValueError(f"{self.path} must have a multiple of length={self.length} rows; got {len(values)}.")
            lengths = np.full(len(values) // self.length, self.length)
        mask = np.arange(tokens) < lengths[:, None]
        padded = np.zeros((*mask.shape, values.shape[1]))
        padded[mask] = values
        context = padded[..., width:] if self.context_columns else None
        return self._finish(padded[..., :width], None if mask.all() else mask, context)

    def feature(self, number: int) -> str:
        return f"column {self.columns[number]!r}"


def _wanted(name: str) -> str:
    return "boolean, True at real tokens" if name == "mask" else "numbers"


def _read_head(file: Any) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    return shape, dtype
