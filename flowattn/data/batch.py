"""What data modules yield: batches of sequences, in the user's own units, and the splits they are drawn from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.data import Dataset

from flowattn.checks import check_mask
from flowattn.context import pack_context, zero_padding


class Batch(NamedTuple):
    """Sequences, what a flow needs to know beside them, and their rows in the file or the split they come from."""

    inputs: Float[Tensor, "batch tokens features"]
    context: Tensor | None  # packed as `flowattn.context` says
    index: Int[Tensor, " batch"]  # type: ignore[assignment]  # tuples have a method of this name


class Sequences(Dataset):
    """One split of a data set, in memory.

    Padding is zeroed. Every real token must be finite, and every sequence has at least one.

    Args:
        inputs: the sequences; padding may hold anything.
        mask: True at real tokens; None when all are.
        context: features to condition on, of each sequence or of each token; None for none.
        file_rows: which rows of a file the sequences are, where they come from one; None to count them.

    Example:
        >>> split = Sequences(torch.arange(6.0).reshape(3, 2, 1))
        >>> split.batch(torch.tensor([2, 0])).inputs[:, :, 0]
        tensor([[4., 5.],
                [0., 1.]])
    """

    def __init__(
        self,
        inputs: Float[Tensor, "sequences tokens features"],
        mask: Bool[Tensor, "sequences tokens"] | None = None,
        context: Float[Tensor, "sequences *tokens width"] | None = None,
        file_rows: Int[Tensor, " sequences"] | None = None,
    ) -> None:
        if inputs.ndim != 3 or not inputs.is_floating_point():
            raise ValueError(
                f"inputs must be floating-point of shape [sequences, tokens, features]; got {inputs.dtype} of shape "
                f"{list(inputs.shape)}."
            )
        if mask is not None:
            check_mask(mask, inputs)
            empty = ~mask.any(1)
            if empty.any():
                raise ValueError(
                    f"mask must have a real token in every sequence; sequence {_first(empty)[0]} has none."
                )
            inputs = zero_padding(inputs, mask)
        bad = ~torch.isfinite(inputs)
        if bad.any():
            index = _first(bad)
            raise ValueError(
                f"inputs must be finite at real tokens; got {inputs[tuple(index)].item()} at index {index}."
            )
        if context is not None and context.shape[:-1] not in (inputs.shape[:1], inputs.shape[:2]):
            raise ValueError(
                f"context must have shape [sequences, width] or [sequences, tokens, width] with "
                f"[sequences, tokens] = {list(inputs.shape[:2])}; got {list(context.shape)}."
            )
        pack_context(context, mask)  # refuses what no batch could carry
        self.inputs, self.mask, self.context, self.file_rows = inputs, mask, context, file_rows

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        """The batch of one sequence."""
        return self.batch(torch.tensor([range(len(self))[index]]))

    def batch(self, indices: Int[Tensor, " batch"]) -> Batch:
        """The sequences at these places of the split, by one indexing for all."""
        inputs, mask, context, rows = self._take(indices)
        return Batch(inputs, pack_context(context, mask), rows)

    def subset(self, indices: Int[Tensor, " places"]) -> Sequences:
        """The split of these only; they stay the rows that they were."""
        return Sequences(*self._take(indices))

    @classmethod
    def join(cls, parts: list[Sequences]) -> Sequences:
        """The sequences of several splits: in the order of the file they come from, or else one split after another."""
        inputs = torch.cat([part.inputs for part in parts])
        masks = [
            part.inputs.new_ones(part.inputs.shape[:2]).bool() if part.mask is None else part.mask for part in parts
        ]
        mask = None if all(part.mask is None for part in parts) else torch.cat(masks)
        contexts = [part.context for part in parts if part.context is not None]
        rows = [part.file_rows for part in parts if part.file_rows is not None]
        whole = cls(inputs, mask, torch.cat(contexts) if contexts else None, torch.cat(rows) if rows else None)
        return whole if whole.file_rows is None else whole.subset(whole.file_rows.argsort())

    def all(self) -> Batch:
        """The whole split as one batch."""
        return self.batch(torch.arange(len(self)))

    def tokens(self) -> Float[Tensor, "real features"]:
        """All real tokens of all sequences, in order."""
        return self.inputs.flatten(0, 1) if self.mask is None else self.inputs[self.mask]

    def _take(self, indices: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Inputs, mask, context and rows at these places."""
        mask = None if self.mask is None else self.mask[indices]
        context = None if self.context is None else self.context[indices]
        return self.inputs[indices], mask, context, indices if self.file_rows is None else self.file_rows[indices]


def generator(seed: int, *keys: int) -> torch.Generator:
    """A random stream of its own for each seed and keys, such as the epoch or the number of a split.

    torch's CPU generator reads the low 32 bits of its seed only, so that sums and shifts of seeds collide; numpy's
    SeedSequence mixes all of them.

    Example:
        >>> torch.randperm(4, generator=generator(0, 1))
        tensor([0, 2, 3, 1])
    """
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *keys)).generate_state(1)[0]))


def _first(found: Tensor) -> list[int]:
    return found.nonzero()[0].tolist()
