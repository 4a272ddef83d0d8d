"""The log-determinant itself, by the structure of the Jacobian."""

from __future__ import annotations

from torch import Tensor

from flowattn.contractions import Contraction
from flowattn.logdet.base import LogDet


class ExactLogDet(LogDet):
    r"""log|det(I + J)| without error.

    .. math:: \log|\det(I + J)| = \sum_i \log|\det(I + J_{ii})| \quad\text{if J is block-triangular over tokens}

    So causal attention and maps of each token need the diagonal blocks only; other Jacobians are assembled whole.

    Cost: O(N^2 D d + N D^3) time for causal attention, O(N D^2 h + N D^3) for feed-forward maps of h hidden units,
    O(N^3 D^3) dense.

    Example:
        >>> ExactLogDet()
        ExactLogDet()
    """

    def __call__(
        self, contraction: Contraction, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if contraction.structure != "dense":
            value, blocks = contraction.forward_and_diagonal(x, mask, context)
            return value, blocks.logabsdet()
        return contraction.forward_and_logabsdet(x, mask, context)

    def __repr__(self) -> str:
        return "ExactLogDet()"
