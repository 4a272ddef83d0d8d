"""How far can a map stretch? Norms, proven upper bounds, and measured lower bounds of Lipschitz constants."""

from flowattn.lipschitz.adversarial import adversarial_tokens, logit_gap
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
from flowattn.lipschitz.dot_product import ball_bound, published_ball_bound, published_mean_field_bound
from flowattn.lipschitz.dot_product_at import attention_matrix_bound, local_bound, softmax_bound
from flowattn.lipschitz.heads import DotProductHeads
from flowattn.lipschitz.lambert import lambert_w0, wright_omega
from flowattn.lipschitz.measure import local_lipschitz
from flowattn.lipschitz.norms import Norm, sequence_norm, token_norm
from flowattn.lipschitz.report import LipschitzReport, report
from flowattn.lipschitz.search import LipschitzSearch, search_lipschitz
from flowattn.lipschitz.spectral import spectral_norm_bound
from flowattn.lipschitz.transport import wasserstein2
from flowattn.lipschitz.weighted import TransportLipschitz, split_token, transport_lipschitz

__all__ = [
    "DotProductHeads",
    "LipschitzReport",
    "LipschitzSearch",
    "Norm",
    "TransportLipschitz",
    "adversarial_tokens",
    "attention_matrix_bound",
    "attention_stretch",
    "ball_bound",
    "ball_stretch",
    "infinity_bound",
    "lambert_w0",
    "local_bound",
    "local_lipschitz",
    "logit_gap",
    "published_ball_bound",
    "published_infinity_bound",
    "published_mean_field_bound",
    "published_two_norm_bound",
    "report",
    "search_lipschitz",
    "sequence_norm",
    "single_head_bound",
    "softmax_bound",
    "spectral_norm_bound",
    "split_token",
    "token_bound",
    "token_norm",
    "transport_lipschitz",
    "visible_weight",
    "wasserstein2",
    "wright_omega",
]
