"""What all ranks have, on all ranks."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def gather(own: T) -> list[T]:
    """What each rank gave, in the order of the ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return [own]
    everything: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, own)
    return everything  # type: ignore[return-value]


def gather_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all batches of all ranks, on the CPU, sorted by their `index`."""
    own = [{name: value.detach().cpu() for name, value in part.items()} for part in parts]
    together = [part for rank in gather(own) for part in rank]
    if not together:
        return {}
    rows = {name: torch.cat([part[name] for part in together]) for name in together[0]}
    order = rows["index"].argsort(stable=True)
    return {name: value[order] for name, value in rows.items()}
