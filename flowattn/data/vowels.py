"""Two vowels said by nine people: sequences of variable length, and people to tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from flowattn.data.base import SequenceData, Sequences, Split, generator
from flowattn.data.packages import require

LENGTH, COEFFICIENTS = 29, 12
SPEAKERS = tuple(range(1, 10))
HELD_OUT = 0.2


class JapaneseVowels(SequenceData):
    """Cepstra of two Japanese vowels in a row, said by nine men: 7 to 29 tokens of 12 coefficients.

    640 utterances come with the package `aeon`, 30 of each speaker for training and 24 to 88 for the test. A fifth of
    each speaker's training utterances, drawn by the seed, is for validation.

    With `normal_speakers` the task is to notice strangers: training and validation keep the utterances of these
    speakers only; the test has their test utterances, labelled 0, and every utterance of all other speakers,
    labelled 1.

    References:
        | Multidimensional Curve Classification Using Passing-Through Regions (Kudo et al., 1999)

    Args:
        normal_speakers: numbers from 1 to 9; None for all, and no labels.
        kwargs: those of `SequenceData`.
    """

    def __init__(self, normal_speakers: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if normal_speakers is not None:
            chosen = set(normal_speakers)
            if not chosen or len(chosen) != len(list(normal_speakers)) or not chosen < set(SPEAKERS):
                raise ValueError(
                    "normal_speakers must be different numbers from 1 to 9, at least one and not all of them; got "
                    f"normal_speakers={list(normal_speakers)}."
                )
        self.normal_speakers = SPEAKERS if normal_speakers is None else tuple(sorted(normal_speakers))
        self.has_labels = normal_speakers is not None
        self._speakers: dict[str, Tensor] = {}

    @property
    def event_shape(self) -> tuple[int, int]:
        return LENGTH, COEFFICIENTS

    def load(self) -> dict[str, Sequences]:
        """Reads the utterances and sorts them into splits, padded with zeros to 29 tokens."""
        signals, speakers, is_test = _utterances()
        is_normal = torch.isin(speakers, torch.tensor(self.normal_speakers))
        is_val = torch.zeros_like(is_test)
        random = generator(self.seed, 1)
        for speaker in SPEAKERS:
            rows = ((speakers == speaker) & ~is_test).nonzero().squeeze(1)
            is_val[rows[torch.randperm(len(rows), generator=random)[: round(HELD_OUT * len(rows))]]] = True
        members = {
            "train": is_normal & ~is_test & ~is_val,
            "val": is_normal & is_val,
            "test": is_test | ~is_normal,
        }
        self._speakers = {name: speakers[rows] for name, rows in members.items()}
        return {name: _pad([signals[i] for i in rows.nonzero()]) for name, rows in members.items()}

    def speakers(self, split: Split) -> Int[Tensor, " sequences"]:
        """Who said each utterance of a split."""
        self.split(split)
        return self._speakers[split]

    def labels(self, split: Split) -> Int[Tensor, " sequences"] | None:
        """1 for each utterance of a stranger, if there are `normal_speakers`."""
        if not self.has_labels:
            return None
        return (~torch.isin(self.speakers(split), torch.tensor(self.normal_speakers))).long()


def _utterances() -> tuple[list[np.ndarray], Tensor, Tensor]:
    """All utterances [12, tokens], who said them, and whether they are for the test."""
    datasets = require("aeon.datasets", "JapaneseVowels")
    folder = Path(datasets.__file__).parent / "data" / "JapaneseVowels"
    signals: list[np.ndarray] = []
    speakers: list[int] = []
    is_test: list[bool] = []
    for part in ("TRAIN", "TEST"):
        path = folder / f"JapaneseVowels_{part}.ts"
        if not path.is_file():
            raise FileNotFoundError(
                f"JapaneseVowels reads {path}, which should have come with aeon: pip install --force-reinstall "
                "--no-deps aeon."
            )
        some, labels = datasets.load_from_ts_file(str(path))
        signals += list(some)
        speakers += [int(label) for label in labels]
        is_test += [part == "TEST"] * len(labels)
    return signals, torch.tensor(speakers), torch.tensor(is_test)


def _pad(signals: list[np.ndarray]) -> Sequences:
    inputs = torch.zeros(len(signals), LENGTH, COEFFICIENTS)
    mask = torch.zeros(len(signals), LENGTH, dtype=torch.bool)
    for row, signal in enumerate(signals):
        inputs[row, : signal.shape[1]] = torch.from_numpy(signal.T).float()
        mask[row, : signal.shape[1]] = True
    return Sequences(inputs, mask)
