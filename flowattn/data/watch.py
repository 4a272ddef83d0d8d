"""Motion of a smartwatch during shoulder exercises: windows of fixed length, split by person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowattn.checks import check_positive
from flowattn.data.base import SequenceData, Sequences
from flowattn.data.packages import require

LENGTH, CHANNELS = 32, 6
SUBJECTS = {"train": (1, 2, 3, 4, 5, 6, 7), "val": (8,), "test": (9, 10)}


class Smartwatch(SequenceData):
    """Windows of 32 samples from six channels of a smartwatch, split by the person who wore it.

    Ten people did sets of seven shoulder exercises while a watch recorded acceleration (ax, ay, az) and rotation
    (wx, wy, wz) at 50 Hz: 140 recordings of 947 to 2,618 samples, which come with the package `seglearn`. A window is
    32 consecutive samples, 0.64 s. People 1 to 7 are for training, 8 for validation, 9 and 10 for the test.
    Windows of validation and test do not overlap.

    The full-covariance Gaussian of train has a test NLL of -0.73 nats per dimension in the units of the recordings;
    -0.70 when every channel is divided by its standard deviation over train. Differences between models are the same
    in both.

    References:
        | Shoulder Physiotherapy Exercise Recognition: Machine Learning the Inertial Signals from a Smartwatch
        | (Burns et al., 2018), https://arxiv.org/abs/1802.01489

    Args:
        step: how many samples after one another windows of training start; below 32 they overlap.
        kwargs: those of `SequenceData`.
    """

    def __init__(self, step: int = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_positive(step=step)
        self.step = step

    @property
    def event_shape(self) -> tuple[int, int]:
        return LENGTH, CHANNELS

    def load(self) -> dict[str, Sequences]:
        """Cuts the recordings into windows."""
        recordings = _recordings()
        splits = {}
        for split, people in SUBJECTS.items():
            step = self.step if split == "train" else LENGTH
            windows = [
                signal[start : start + LENGTH]
                for signal, person in zip(recordings["X"], recordings["subject"], strict=True)
                if person in people
                for start in range(0, len(signal) - LENGTH + 1, step)
            ]
            splits[split] = Sequences(torch.from_numpy(np.stack(windows)).float())
        return splits


def _recordings() -> dict[str, Any]:
    datasets = require("seglearn.datasets", "Smartwatch")
    path = Path(datasets.__file__).parent / "data" / "watch_dataset.npy"
    if not path.is_file():
        raise FileNotFoundError(
            f"Smartwatch reads {path}, which should have come with seglearn: pip install --force-reinstall "
            "--no-deps seglearn."
        )
    return datasets.load_watch()
