"""A Transformer over characters, each step from dot-product attention to full invertibility a named choice."""

from __future__ import annotations

import copy
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowattn.checks import check_choice, check_finite, check_positive, check_tokens
from flowattn.contractions import L2SelfAttention
from flowattn.inverse import Solver
from flowattn.models.attention import PAIRS, ContractiveAttention, PairAttention, start_orthogonal
from flowattn.models.rungs import RUNGS, Rung
from flowattn.models.trunk import InvertibleTrunk, Kept, ResidualTrunk


class Inversion(NamedTuple):
    """What `CharTransformer.invert` finds.

    `certified_error` is the largest of any residual block's inverse, in the norm of that block, for each sequence.
    `residual` is how far the hidden tokens of the characters found are from those given, for each sequence.
    """

    embeddings: Float[Tensor, "batch tokens features"]
    characters: Int[Tensor, "batch tokens"]
    certified_error: Float[Tensor, " batch"]
    residual: Float[Tensor, " batch"]


class CharTransformer(nn.Module):
    r"""Logits of the next character after every character of a text.

    .. math:: h = T(E_{c_1}, \dots, E_{c_N}), \qquad p(c_{i+1} | c_1 \dots c_i) = \operatorname{softmax}(h_i U + u)

    The trunk T is causal. On the last rung it is a composite of invertible transforms, and `invert` finds the
    characters from the hidden tokens h.

    All rungs of one width and depth have about as many parameters, and none has more than dot-product attention with
    feed-forward branches of width 4D: unless given, `hidden` is the largest width for which that holds.

    Args:
        num_symbols: size of the alphabet.
        features: width D of a token.
        num_heads: heads of each attention.
        num_layers: pairs of attention and feed-forward.
        max_tokens: the longest text.
        rung: a name of `RUNGS`.
        position: how the order of characters is told: "relative", a learned bias per head and distance; "absolute",
            a learned embedding per position; or "both". None takes relative ones where the bound allows it, which is
            everywhere but in contractive_inf; they are the better ones for dot products, too.
        layer_norm: whether branches see normalised tokens; not on the invertible rung.
        hidden: width inside the feed-forward parts.
        feed_forward: of the invertible rung, "coupling" or "contractive".
        between: of the invertible rung, what surrounds attention: "actnorm", "linear" or "none".
        radius: of the last two rungs, the balls of `L2SelfAttention`.
        norm_start: of the last two rungs, the weight of half of the features in the learned norm, at the start;
            None leaves the norm as it is, and so does between="none", which has no place for one.
        coefficient: the Lipschitz constant of contractions.
        dropout: outside the trunk, of what is read out.

    Example:
        >>> model = CharTransformer(features=16, num_layers=1, max_tokens=8, rung="invertible")
        >>> text = torch.randint(50, (2, 8))
        >>> model(text).shape
        torch.Size([2, 8, 50])
        >>> bool((model.invert(model.hidden(text)).characters == text).all())
        True
    """

    def __init__(
        self,
        num_symbols: int = 50,
        features: int = 128,
        num_heads: int = 4,
        num_layers: int = 2,
        max_tokens: int = 128,
        *,
        rung: Rung = "invertible",
        position: Literal["absolute", "relative", "both"] | None = None,
        layer_norm: bool = False,
        hidden: int | None = None,
        feed_forward: Literal["coupling", "contractive"] = "coupling",
        between: Literal["linear", "actnorm", "none"] = "actnorm",
        radius: float | Literal["learned"] | None = "learned",
        norm_start: float | None = 0.03,
        coefficient: float = 0.97,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_positive(
            num_symbols=num_symbols,
            features=features,
            num_heads=num_heads,
            num_layers=num_layers,
            max_tokens=max_tokens,
        )
        check_choice("rung", rung, tuple(RUNGS))
        check_choice("position", position, (None, "absolute", "relative", "both"))
        if features % num_heads:
            raise ValueError(f"num_heads must divide features; got num_heads={num_heads}, features={features}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1; got dropout={dropout}.")
        if norm_start is not None and not 0 < norm_start <= 1:
            raise ValueError(f"norm_start must be None or above 0 and at most 1; got norm_start={norm_start}.")
        if rung == "invertible" and layer_norm:
            raise ValueError("layer_norm must be False for rung='invertible': a LayerNorm cannot be inverted.")
        if rung == "contractive_inf" and position in ("relative", "both"):
            raise ValueError("position must be 'absolute' for rung='contractive_inf': its bound knows no bias.")
        if position is None:
            position = "absolute" if rung == "contractive_inf" else "relative"
        self.rung = rung
        self.num_symbols = num_symbols
        self.features = features
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        given: dict[str, Any] = {
            "num_symbols": num_symbols,
            "features": features,
            "num_heads": num_heads,
            "num_layers": num_layers,
            "max_tokens": max_tokens,
            "position": position,
            "layer_norm": layer_norm,
        }
        if hidden is None:
            own = {
                "feed_forward": feed_forward,
                "between": between,
                "radius": radius,
                "norm_start": norm_start,
                "coefficient": coefficient,
            }
            hidden = 4 * features if rung == "dot_product" else _matching_width(rung, given, own)
        check_positive(hidden=hidden)
        self.hidden_width = hidden
        self.embedding = nn.Embedding(num_symbols, features)
        self.positions = nn.Parameter(0.02 * torch.randn(max_tokens, features)) if position != "relative" else None
        self.dropout = nn.Dropout(dropout)
        self.readout = nn.Linear(features, num_symbols)

        def contraction() -> L2SelfAttention:
            attention = L2SelfAttention(
                features,
                num_heads,
                causal=True,
                position_bias="learned" if position != "absolute" else None,
                radius=radius,
                coefficient=coefficient,
                max_tokens=max_tokens,
            )
            start_orthogonal(attention)
            return attention

        self.trunk: ResidualTrunk | InvertibleTrunk
        if rung == "invertible":
            self.trunk = InvertibleTrunk(
                features,
                hidden,
                [contraction() for _ in range(num_layers)],
                feed_forward=feed_forward,
                between=between,
                start=1.0 if norm_start is None else norm_start,
                coefficient=coefficient,
            )
            return
        branches: list[nn.Module] = []
        for _ in range(num_layers):
            if rung in PAIRS:
                branches.append(
                    PairAttention(
                        features,
                        num_heads,
                        kind=rung,  # type: ignore[arg-type]
                        max_tokens=max_tokens,
                        position_bias=position != "absolute",
                        coefficient=coefficient,
                    )
                )
            else:
                branches.append(ContractiveAttention(contraction(), start=norm_start))
        self.trunk = ResidualTrunk(features, hidden, branches, layer_norm=layer_norm)

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned."""
        return sum(p.numel() for p in self.parameters())

    def forward(self, characters: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens symbols"]:
        return self.readout(self.dropout(self.hidden(characters)))

    def hidden(self, characters: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens features"]:
        """What the trunk makes of the characters."""
        x = self._embed(characters, first=0)
        return self.trunk.map(x) if isinstance(self.trunk, InvertibleTrunk) else self.trunk(x)

    def extend(
        self, characters: Int[Tensor, "batch new"], kept: Kept | None = None
    ) -> tuple[Float[Tensor, "batch new symbols"], Kept]:
        """The logits after new characters only, and what is to be kept for those that follow.

        `kept` is what the call before gave: one entry for the number of characters so far, then one per layer.
        """
        first, *layers = kept or [0]
        x, layers = self.trunk.extend(self._embed(characters, first), layers)
        return self.readout(x), [first + characters.shape[1], *layers]

    @torch.no_grad()
    def invert(self, hidden: Float[Tensor, "batch tokens features"], tolerance: float = 1e-10) -> Inversion:
        """The embeddings and the characters that these hidden tokens came from, computed in double precision.

        The characters are those of the nearest embeddings. They are sure to be right where the `residual` is no more
        than rounding: the trunk takes no two texts to the same hidden tokens.

        Raises:
            ValueError: unless this is the invertible rung.
            InverseNotConverged: where a block's inverse is not certified to `tolerance`, times the length of its
                longest token where rounding allows for no less.
        """
        if not isinstance(self.trunk, InvertibleTrunk):
            raise ValueError(f"invert needs rung='invertible'; got rung={self.rung!r}, whose trunk has no inverse.")
        check_tokens("hidden", hidden, self.features)
        check_finite("hidden", hidden)
        fine = copy.deepcopy(self).double()
        assert isinstance(fine.trunk, InvertibleTrunk)
        x, error = fine.trunk.unmap(hidden.double(), Solver(tolerance=tolerance))
        if fine.positions is not None:
            x = x - fine.positions[: x.shape[1]]
        characters = torch.cdist(x, fine.embedding.weight.expand(len(x), -1, -1)).argmin(-1)
        residual = (self.hidden(characters) - hidden).abs().amax((1, 2))
        return Inversion(x.to(hidden.dtype), characters, error, residual)

    def _embed(self, characters: Tensor, first: int) -> Tensor:
        if characters.ndim != 2 or characters.dtype != torch.long:
            raise ValueError(
                f"characters must be whole numbers (torch.long) of shape [batch, tokens]; got {characters.dtype} of "
                f"shape {list(characters.shape)}."
            )
        last = first + characters.shape[1]
        if not first < last <= self.max_tokens:
            raise ValueError(f"a text must have 1 to max_tokens={self.max_tokens} characters; got {last}.")
        x = self.embedding(characters)
        return x if self.positions is None else x + self.positions[first:last]

    def extra_repr(self) -> str:
        return f"rung={self.rung!r}, hidden_width={self.hidden_width}, parameters={self.num_parameters}"


def _matching_width(rung: Rung, given: dict[str, Any], own: dict[str, Any]) -> int:
    """The widest feed-forward parts with which a rung has no more parameters than dot-product attention.

    The number of parameters is linear in the width, so two narrow models tell all.
    """
    baseline = {**given, "position": "relative"}
    with torch.random.fork_rng(devices=[]):  # counting must not change what is drawn next
        most = CharTransformer(rung="dot_product", **baseline).num_parameters
        one, two = (CharTransformer(rung=rung, hidden=width, **given, **own).num_parameters for width in (1, 2))
    widest = 1 + (most - one) // (two - one)
    if widest < 1:
        raise ValueError(
            f"hidden must be given, because no width gives rung={rung!r} as few parameters as dot-product attention "
            f"with relative positions; got {one} > {most} at width 1 with features={given['features']}, max_tokens="
            f"{given['max_tokens']}, position={given['position']!r}. Embeddings of positions are max_tokens * features "
            "numbers."
        )
    return widest
