"""Lightning data modules of sequences, each with the shape of its events known before any data is read."""

from flowattn.data.arrays import ArraySequences
from flowattn.data.autoregression import NonlinearAutoregression
from flowattn.data.base import Batch, Loader, SequenceData, Sequences
from flowattn.data.vowels import JapaneseVowels
from flowattn.data.watch import Smartwatch

__all__ = [
    "ArraySequences",
    "Batch",
    "JapaneseVowels",
    "Loader",
    "NonlinearAutoregression",
    "SequenceData",
    "Sequences",
    "Smartwatch",
]
