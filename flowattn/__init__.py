"""Attention inside normalizing flows: L2 self-attention with certified Lipschitz bounds, as nflows transforms."""

__version__ = "0.1.0"
