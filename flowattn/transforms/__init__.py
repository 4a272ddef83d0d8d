"""Transforms of sequences of tokens for nflows. What they read in a context is told in `flowattn.context`."""

from flowattn.transforms.actnorm import TokenActNorm
from flowattn.transforms.autoregressive import AutoregressiveAttention
from flowattn.transforms.centred import CentredAttention, CentredFeedForward, CentredLinear, MovingResidual
from flowattn.transforms.chain import Chain
from flowattn.transforms.coupling import AttentionCoupling, FeedForwardCoupling
from flowattn.transforms.residual import InvertibleAttention, InvertibleFeedForward, ResidualTransform
from flowattn.transforms.standardize import Standardize
from flowattn.transforms.tokenwise import Tokenwise

__all__ = [
    "AttentionCoupling",
    "AutoregressiveAttention",
    "CentredAttention",
    "CentredFeedForward",
    "CentredLinear",
    "Chain",
    "FeedForwardCoupling",
    "InvertibleAttention",
    "InvertibleFeedForward",
    "MovingResidual",
    "ResidualTransform",
    "Standardize",
    "TokenActNorm",
    "Tokenwise",
]
