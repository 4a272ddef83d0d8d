"""What several transforms are made of: attention with a bound and without."""

from __future__ import annotations

from typing import Any, Literal

from flowattn.checks import check_choice, check_positive
from flowattn.contractions import Compose, Contraction, DotProductSelfAttention, L2SelfAttention, TokenLinear


def contractive_attention(
    features: int, num_heads: int, *, lift: int | None, coefficient: float, **options: Any
) -> Contraction:
    """L2 attention with a Lipschitz constant, on tokens as they are or lifted to another width and brought back."""
    if lift is None:
        return L2SelfAttention(features, num_heads, coefficient=coefficient, **options)
    norm = options.get("norm", "token")
    if norm != "token":
        raise ValueError(f"norm must be 'token' with a lift, since bounds in other norms do not chain; got {norm=}.")
    attention = L2SelfAttention(lift, num_heads, coefficient=None, **options)
    return Compose(TokenLinear(features, lift), attention, TokenLinear(lift, features), coefficient=coefficient)


def free_attention(
    attention: Literal["l2", "dot-product"], hidden: int, num_heads: int, **options: Any
) -> L2SelfAttention | DotProductSelfAttention:
    """Attention for a network that needs no bound."""
    check_choice("attention", attention, ("l2", "dot-product"))
    check_positive(num_heads=num_heads, hidden=hidden)
    if hidden % num_heads:
        raise ValueError(f"num_heads must divide hidden; got num_heads={num_heads}, hidden={hidden}.")
    if attention == "l2":
        return L2SelfAttention(hidden, num_heads, coefficient=None, **options)
    return DotProductSelfAttention(hidden, num_heads, **options)
