"""Exact where that is cheap, estimated where it is not."""

from __future__ import annotations

from torch import Tensor

from flowattn.checks import check_positive
from flowattn.contractions import Contraction
from flowattn.logdet.base import LogDet
from flowattn.logdet.exact import ExactLogDet
from flowattn.logdet.series import RussianRoulette


class AutoLogDet(LogDet):
    """Exact for Jacobians that are block-triangular over tokens, and for dense ones while they are small.

    Args:
        max_dense: largest N * D whose dense Jacobian is assembled. Near the default the estimate of a training step
            becomes the faster one, as measured in docs/guide.md.
        max_width: widest token whose diagonal blocks are factorised.
        otherwise: the estimator for all the rest, `RussianRoulette` unless given.

    Example:
        >>> AutoLogDet(max_dense=100)
        AutoLogDet(exact if causal or tokenwise up to D = 256, if dense up to N * D = 100, else
            RussianRoulette(num_exact_terms=4, survival=L^2, num_probes=1))
    """

    def __init__(self, max_dense: int = 192, max_width: int = 256, otherwise: LogDet | None = None) -> None:
        check_positive(max_dense=max_dense, max_width=max_width)
        self.max_dense = max_dense
        self.max_width = max_width
        self.exact = ExactLogDet()
        self.otherwise = RussianRoulette() if otherwise is None else otherwise

    def choose(self, contraction: Contraction, num_tokens: int) -> LogDet:
        """What is used for sequences of so many tokens."""
        if contraction.structure == "dense":
            cheap = num_tokens * contraction.features <= self.max_dense
        else:
            cheap = contraction.features <= self.max_width
        return self.exact if cheap else self.otherwise

    def __call__(
        self, contraction: Contraction, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.choose(contraction, x.shape[1])(contraction, x, mask, context)

    def __repr__(self) -> str:
        return (
            f"AutoLogDet(exact if causal or tokenwise up to D = {self.max_width}, "
            f"if dense up to N * D = {self.max_dense}, else {self.otherwise})"
        )
