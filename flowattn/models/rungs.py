"""The names of the ladder, from the usual Transformer to the invertible one."""

from typing import Literal

Rung = Literal["dot_product", "l2_untied", "l2_tied", "l2_tied_A", "contractive_inf", "contractive_token", "invertible"]

#: The ladder, from the usual Transformer to the invertible one: what each rung changes.
RUNGS: dict[str, str] = {
    "dot_product": "queries, keys and values by three matrices, weights by products",
    "l2_untied": "weights by distances",
    "l2_tied": "keys are the queries",
    "l2_tied_A": "values by the matrix of the queries, too: now attention is Lipschitz",
    "contractive_inf": "attention divided by the published bound, in the infinity norm",
    "contractive_token": "the token bound, with position bias, balls and a learned norm",
    "invertible": "a trunk of invertible transforms only",
}
