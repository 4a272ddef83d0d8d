"""Ready-made flows of sequences, sets and particles."""

from flowattn.distributions import SequenceNormal
from flowattn.flows.attention import AttentionFlow
from flowattn.flows.listed import TransformFlow
from flowattn.flows.particles import MeanFreeNormal, ParticleFlow

__all__ = ["AttentionFlow", "MeanFreeNormal", "ParticleFlow", "SequenceNormal", "TransformFlow"]
