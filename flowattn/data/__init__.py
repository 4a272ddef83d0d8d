"""Lightning data modules: sequences, particles and text; the shape of events is known before any data is read."""

from flowattn.data.arrays import ArraySequences
from flowattn.data.autoregression import NonlinearAutoregression
from flowattn.data.base import Batch, Loader, SequenceData, Sequences
from flowattn.data.corpus import CharCorpus
from flowattn.data.particles import DoubleWell, LennardJones
from flowattn.data.vowels import JapaneseVowels
from flowattn.data.watch import Smartwatch

__all__ = [
    "ArraySequences",
    "Batch",
    "CharCorpus",
    "DoubleWell",
    "JapaneseVowels",
    "LennardJones",
    "Loader",
    "NonlinearAutoregression",
    "SequenceData",
    "Sequences",
    "Smartwatch",
]
