"""Maps of tokens that are certified to be contractions, whatever their parameters are.

The one that is not is `DotProductSelfAttention`, the baseline: it has no bound, and says so when asked for one.
"""

from flowattn.contractions.attention import DotProductSelfAttention, L2SelfAttention
from flowattn.contractions.base import Contraction, Push, Structure
from flowattn.contractions.blocks import DenseBlocks, HeadBlocks, TokenBlocks
from flowattn.contractions.centred import Centred
from flowattn.contractions.compose import Compose
from flowattn.contractions.declared import Declared
from flowattn.contractions.feed_forward import FeedForward, TokenLinear
from flowattn.contractions.radial import CentralForces, PairForces

__all__ = [
    "CentralForces",
    "Centred",
    "Compose",
    "Contraction",
    "Declared",
    "DenseBlocks",
    "DotProductSelfAttention",
    "FeedForward",
    "HeadBlocks",
    "L2SelfAttention",
    "PairForces",
    "Push",
    "Structure",
    "TokenBlocks",
    "TokenLinear",
]
