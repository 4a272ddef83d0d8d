"""A user's own map, whose Lipschitz constant is declared rather than derived."""

from __future__ import annotations

from torch import Tensor, nn

from flowattn.checks import check_choice
from flowattn.contractions.base import Contraction, Structure
from flowattn.lipschitz.norms import Norm, check_norm


class Declared(Contraction):
    """Any module [B, N, D] -> [B, N, D] with a Lipschitz constant that its author vouches for.

    Derivatives are automatic. Certificates of inverses are as good as the declaration. Where a solver sees the map
    stretch more than that it raises, but it sees few points. A module that mixes tokens must take the mask as its
    second argument, or it cannot be used with one.

    Args:
        module: the map; it must treat the sequences of a batch independently.
        features: width of a token.
        bound: the Lipschitz constant, between 0 and 1.
        structure: "tokenwise", "causal" or "dense": which tokens the rows of the map depend on.
        norm: the norm that the constant holds in.
        takes_mask: whether the module is called with the mask too.

    Example:
        >>> half = nn.Linear(3, 3)
        >>> _ = nn.init.eye_(half.weight).data.mul_(0.5)
        >>> Declared(half, features=3, bound=0.5, structure="tokenwise").lipschitz_bound(7)
        tensor(0.5000)
    """

    def __init__(
        self,
        module: nn.Module,
        features: int,
        bound: float,
        *,
        structure: Structure = "dense",
        norm: Norm = "token",
        takes_mask: bool = False,
    ) -> None:
        super().__init__(features, coefficient=None)
        check_choice("structure", structure, ("tokenwise", "causal", "dense"))
        check_norm(norm)
        if not 0 < bound < 1:
            raise ValueError(f"bound must be between 0 and 1; got bound={bound}.")
        self.module = module
        self.bound = bound
        self.structure = structure
        self.norm = norm
        self.takes_mask = takes_mask

    def free(self, x: Tensor, mask: Tensor | None, context: Tensor | None) -> Tensor:
        if self.takes_mask:
            return self.module(x, mask)
        if mask is not None and self.structure != "tokenwise":
            raise ValueError("mask needs a module that takes it, takes_mask=True, because this one mixes tokens.")
        return self.module(x)

    def row_bounds(self, num_tokens: int, mask: Tensor | None = None, norm: Norm = "token") -> Tensor:
        if norm != self.norm:
            raise ValueError(f"the bound is declared in norm={self.norm!r} only; got norm={norm!r}.")
        return self._like().new_full((1,), self.bound)
