"""The character Transformer: from dot-product attention to a fully invertible trunk, one change at a time."""

from flowattn.models.generation import generate
from flowattn.models.rungs import RUNGS
from flowattn.models.transformer import CharTransformer, Inversion

__all__ = ["RUNGS", "CharTransformer", "Inversion", "generate"]
