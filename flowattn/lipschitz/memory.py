"""A memory for bounds, which evaluations ask for again and again while weights stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowattn.checks import can_look, is_traced, nothing_is_recorded


class Remembered:
    """A function of matrices, computed once for those of the same values as long as no derivative is taken.

    An evaluation knows its weights from the call before. It compares every number, so there is nothing to reset: not
    after an optimiser's step, a loaded state or a change of `weight.data`. On CPU only, where comparing waits for
    nothing. Copies and saved modules start without a memory.

    Args:
        function: takes matrices to one tensor or a tuple of them.
        num_calls: how many calls to remember, with a copy of their matrices.

    Example:
        >>> trace, matrix = Remembered(torch.trace), torch.eye(2)
        >>> with torch.no_grad():
        ...     trace(matrix)
        tensor(2.)
    """

    def __init__(self, function: Callable[..., Any], num_calls: int = 1) -> None:
        self.function = function
        self.num_calls = num_calls
        self.known: tuple[tuple[tuple[Tensor, ...], Any], ...] = ()

    def __call__(self, *matrices: Tensor) -> Any:
        """What the function gives for the matrices."""
        if not (nothing_is_recorded() and can_look(*matrices)) or is_traced() or matrices[0].device.type != "cpu":
            return self.function(*matrices)
        for known, found in self.known:
            if all(map(_is_same, known, matrices)):
                return _copy(found)
        found = self.function(*matrices)
        # A new tuple, since another thread may be reading the old one.
        self.known = (*self.known, (tuple(t.clone() for t in matrices), found))[-self.num_calls :]
        return _copy(found)

    def __reduce__(self) -> tuple[type[Remembered], tuple[Callable[..., Any], int]]:
        return Remembered, (self.function, self.num_calls)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _copy(found: Any) -> Any:
    return found.clone() if isinstance(found, Tensor) else tuple(t.clone() for t in found)
