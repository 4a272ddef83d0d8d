"""How far can a map stretch? Norms, proven upper bounds, and measured lower bounds of Lipschitz constants."""

from flowattn.lipschitz.bounds import (
    attention_stretch,
    ball_stretch,
    infinity_bound,
    published_infinity_bound,
    published_two_norm_bound,
    single_head_bound,
    token_bound,
    visible_weight,
)
from flowattn.lipschitz.lambert import lambert_w0, wright_omega
from flowattn.lipschitz.measure import local_lipschitz
from flowattn.lipschitz.norms import Norm, sequence_norm, spectral_norm_bound, token_norm
from flowattn.lipschitz.search import LipschitzSearch, search_lipschitz

__all__ = [
    "LipschitzSearch",
    "Norm",
    "attention_stretch",
    "ball_stretch",
    "infinity_bound",
    "lambert_w0",
    "local_lipschitz",
    "published_infinity_bound",
    "published_two_norm_bound",
    "search_lipschitz",
    "sequence_norm",
    "single_head_bound",
    "spectral_norm_bound",
    "token_bound",
    "token_norm",
    "visible_weight",
    "wright_omega",
]
