"""Memory for what a function needs on its way only, kept from call to call.

Fresh memory costs more than much of what is computed in it: the system clears it page by page when it is first touched.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flowattn.checks import can_look, is_traced

#: How many numbers to keep at most, of each type, for each user and thread. Larger calls compute for so long that fresh
#: memory does not matter.
KEPT = 2**22

#: Tensors start at multiples of so many numbers, where vector instructions like them.
ALIGNED = 16


Layout = TypeVar("Layout")


def as_they_are(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Lays out nothing."""
    return tensors


class Scratch(threading.local, Generic[Layout]):
    """Gives out tensors whose contents are whatever was there, good until the next call. Each thread has its own.

    Memory is kept on CPU only; elsewhere torch keeps it.

    Args:
        lay_out: takes tensors to whatever holds them and views of them, which is kept, too.

    Example:
        >>> scratch = Scratch(lambda *tensors: [t.shape for t in tensors])
        >>> scratch(torch.zeros(1), (2, 3), (4,))
        [torch.Size([2, 3]), torch.Size([4])]
    """

    def __init__(self, lay_out: Callable[..., Layout]) -> None:
        self.lay_out = lay_out
        self.kept: dict[torch.dtype, Tensor] = {}
        self.last: tuple[Any, Layout] | None = None

    def __call__(self, like: Tensor, *shapes: tuple[int, ...]) -> Layout:
        """Tensors of these shapes, of the type and on the device of the one that is given."""
        if like.device.type != "cpu" or not can_look(like) or is_traced():
            return self.lay_out(*(like.new_empty(shape) for shape in shapes))
        wanted = (like.dtype, shapes)
        if self.last is not None and self.last[0] == wanted:
            return self.last[1]
        self.last = None
        sizes = [math.prod(shape) for shape in shapes]
        *starts, total = itertools.accumulate((ALIGNED * math.ceil(size / ALIGNED) for size in sizes), initial=0)
        with torch.inference_mode(False):  # or it could not be written to outside
            memory, places = self._memory(total, like.dtype), zip(starts, sizes, shapes, strict=True)
            found = self.lay_out(*(memory[start : start + size].view(shape) for start, size, shape in places))
        if total <= KEPT:
            self.last = wanted, found
        return found

    def _memory(self, size: int, dtype: torch.dtype) -> Tensor:
        if dtype in self.kept and len(self.kept[dtype]) >= size:
            return self.kept[dtype]
        self.kept.pop(dtype, None)  # before there is more
        memory = torch.empty(size, dtype=dtype, device="cpu")
        if size <= KEPT:
            self.kept[dtype] = memory
        return memory


def shaped(room: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first numbers of a room in a shape.

    Example:
        >>> shaped(torch.zeros(3, 4), (2, 5)).shape
        torch.Size([2, 5])
    """
    return room.view(-1)[: math.prod(shape)].view(shape)
