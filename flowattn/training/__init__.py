"""Trains flows of sequences and models of language: LightningModules, the Trainer, and callbacks."""

from flowattn.training.checkpoint_io import CheckpointError, SafeCheckpointIO
from flowattn.training.checkpoints import Checkpoints
from flowattn.training.density import DensityModule
from flowattn.training.ema import EMA
from flowattn.training.guards import FiniteGradients, NotFinite
from flowattn.training.language import LanguageModule
from flowattn.training.monitors import InverseMonitor, LipschitzMonitor, SamplePlots
from flowattn.training.noise import NoisyInputs
from flowattn.training.random_state import RandomState
from flowattn.training.schedules import WarmupCosine
from flowattn.training.trainer import SequenceTrainer

__all__ = [
    "EMA",
    "CheckpointError",
    "Checkpoints",
    "DensityModule",
    "FiniteGradients",
    "InverseMonitor",
    "LanguageModule",
    "LipschitzMonitor",
    "NoisyInputs",
    "NotFinite",
    "RandomState",
    "SafeCheckpointIO",
    "SamplePlots",
    "SequenceTrainer",
    "WarmupCosine",
]
