r"""Which attention is Lipschitz? The local constant of six kinds along input families that grow without end.

.. math:: P_{ij} = \operatorname{softmax}_j(\ell_{ij}), \qquad f(X)_i = \sum_h \sum_j P^h_{ij}\, v^h_j W^{O,h}

| kind | logits l_ij | values v_j |
|---|---|---|
| dot product | q_i . k_j / s | x_j W^V |
| L2, untied keys | -\|q_i - k_j\|^2 / s | x_j A W^V, with A = W^Q W^{Q,T} / s |
| L2 without A | -\|q_i - q_j\|^2 / s | x_j W^V |
| unsquared without A | -\|q_i - q_j\| / s | x_j W^V |
| unsquared | -\|q_i - q_j\| / s | x_j A W^V |
| L2 | -\|q_i - q_j\|^2 / s | x_j A W^V |

Each of the first four fails at a family of inputs of its own (`FAMILIES`). L2 attention has its bound. Unsquared
distances with the matrix A have the same one: a logit then moves by at most 2/s, and
:math:`\sum_j P_{ij} |z_j - m_i| \le 2 \sum_j P_{ij} |z_j - z_i| \le 2 s W_0(S_i / e)`. They fail otherwise: where two
tokens meet they have a kink, at which the Jacobian jumps and has no determinant (`kink`).

    python -m flowattn.experiments unbounded [--quick] [--out DIR]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from flowattn.contractions import L2SelfAttention
from flowattn.experiments._lab import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, Lab, Row, column, fitted_exponent, where
from flowattn.lipschitz import local_lipschitz

TOKENS, FEATURES, HEADS = 8, 4, 2
Weights = dict[str, Tensor]


def attention(w: Weights, logits: str, keys: str, matrix_a: bool, x: Tensor) -> Tensor:
    """Attention [B, N, D] of the kind that the table above describes, written as it stands there."""
    q, k = (torch.einsum("bnd,hde->bhne", x, w[name]) for name in ("q", keys))
    s = math.sqrt(q.shape[-1])
    if logits == "dot product":
        P = (q @ k.mT / s).softmax(-1)
    else:
        square = (q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)
        if logits == "distance":
            apart = square > 0  # the root has no derivative at 0, where the distance of a token to itself is
            square = torch.where(apart, square, 1.0).sqrt() * apart
        P = (-square / s).softmax(-1)
    values = torch.einsum("bnd,hde->bhne", x, w["q"] @ w["q"].mT @ w["v"] / s if matrix_a else w["v"])
    return torch.einsum("bhne,hed->bnd", P @ values, w["o"])


KINDS: dict[str, tuple[str, str, bool]] = {
    "dot product": ("dot product", "k", False),
    "L2, untied keys": ("square", "k", True),
    "L2 without A": ("square", "q", False),
    "unsquared without A": ("distance", "q", False),
    "unsquared": ("distance", "q", True),
    "L2": ("square", "q", True),
}


def zero_and_far(w: Weights, generator: torch.Generator) -> Tensor:
    """One token at 0, all others far: of Kim et al., who show by it that dot products are not Lipschitz.

    The token at 0 attends to all alike, so its derivative is the variance of the others. In L2 attention it attends
    to itself.
    """
    x = _normal((TOKENS, FEATURES), generator)
    x[0] = 0
    return x


def between_keys(w: Weights, generator: torch.Generator) -> Tensor:
    """One token whose query lies midway between its own key and that of all others, far from both.

    It attends to two far places alike, and turns from one to the other at a touch. With tied keys its own key is
    where its query is.
    """
    x = _normal((1, FEATURES), generator).expand(TOKENS, -1).clone()
    q, k = w["q"][0], w["k"][0]
    x[1:] = (2 * x[:1] @ q - x[:1] @ k) @ torch.linalg.pinv(k)
    return x


def unseen(w: Weights, generator: torch.Generator) -> Tensor:
    """All tokens far apart along a direction that the queries of the first head do not see.

    It goes on attending to all, as if they were close. The matrix A takes this direction out of the values too.
    """
    null = torch.linalg.svd(w["q"][0].T).Vh[w["q"].shape[-1]]
    return _normal((TOKENS, 1), generator) * null


def cloud(w: Weights, generator: torch.Generator) -> Tensor:
    """Tokens drawn at random, for comparison."""
    return _normal((TOKENS, FEATURES), generator)


FAMILIES: dict[str, Callable[[Weights, torch.Generator], Tensor]] = {
    "a token at 0, the others far": zero_and_far,
    "query midway between far keys": between_keys,
    "far where queries are blind": unseen,
    "random tokens": cloud,
}


def measure(lab: Lab, draw: int, scales: Sequence[float]) -> list[Row]:
    """The local constant of every kind on every family at every scale, for one draw of the weights."""
    generator = lab.generator("weights", draw)
    width = FEATURES // HEADS
    shapes = {"q": (FEATURES, width), "k": (FEATURES, width), "v": (FEATURES, width), "o": (width, FEATURES)}
    w = {name: _normal((HEADS, *shape), generator) / math.sqrt(shape[0]) for name, shape in shapes.items()}
    bound = L2SelfAttention.from_paper_weights(w["q"], w["v"], w["o"]).lipschitz_bound(TOKENS).item()
    rows: list[Row] = []
    for family, shape in FAMILIES.items():
        far = shape(w, generator)
        near = 0.3 * _normal((TOKENS, FEATURES), generator) * (family == "far where queries are blind")
        x = torch.tensor(scales, dtype=far.dtype)[:, None, None] * far + near
        for kind, (logits, keys, matrix_a) in KINDS.items():
            constants = local_lipschitz(partial(attention, w, logits, keys, matrix_a), x)
            for scale, constant in zip(scales, constants.tolist(), strict=True):
                row: Row = {"draw": draw, "family": family, "kind": kind, "scale": scale, "constant": constant}
                rows.append(row | {"bound": bound} if kind == "L2" else row)
    return rows


def kink(lab: Lab) -> list[Row]:
    """How much the Jacobian changes when a token passes another at a small distance: by nothing, if it is smooth."""
    generator = lab.generator("kink")
    w = {name: torch.eye(2, dtype=torch.float64).unsqueeze(0) for name in "qkvo"}
    x = _normal((1, 4, 2), generator)
    step = torch.zeros_like(x)
    step[:, 1, 0] = 1e-6
    x[:, 1] = x[:, 0]
    rows: list[Row] = []
    for kind in ("L2", "unsquared"):
        f = partial(attention, w, *KINDS[kind])
        before, after = (torch.func.jacrev(f)(x + side * step)[0, :, :, 0] for side in (-1, 1))
        rows.append({"kind": kind, "jump": (after - before).abs().amax().item()})
    return rows


def exponents(rows: Sequence[Row]) -> list[Row]:
    """How the median constant grows, as a power of the scale, over the last two decades."""
    table: list[Row] = []
    for kind in KINDS:
        row: Row = {"kind": kind}
        for family in FAMILIES:
            scales, medians = curve(where(rows, kind=kind, family=family))
            far = [k for k, scale in enumerate(scales) if scale >= scales[-1] / 101]
            row[family] = fitted_exponent([scales[k] for k in far], [max(medians[k], 1e-12) for k in far])
        table.append(row)
    return table


def curve(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """The scales, and the median over draws of the constant at each."""
    scales = sorted(set(column(rows, "scale")))
    return scales, [statistics.median(column(where(rows, scale=scale), "constant")) for scale in scales]


def plot(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.05))
    families = list(FAMILIES)
    styles = {
        "dot product": (families[0], RED, "o"),
        "L2, untied keys": (families[1], ORANGE, "s"),
        "L2 without A": (families[2], PURPLE, "^"),
        "unsquared without A": (families[2], GREEN, "v"),
    }
    for turn, (kind, (family, color, marker)) in enumerate(styles.items()):
        line = curve(where(rows, kind=kind, family=family))
        left.plot(*line, marker + "-", color=color, label=kind, markevery=(turn % 2, 2))  # two of them coincide
    for kind, color, label in (
        ("unsquared", SKY, "unsquared, worst of all four"),
        ("L2", BLUE, "L2, worst of all four"),
    ):
        curves = [curve(where(rows, kind=kind, family=family)) for family in families]
        worst = [max(values) for values in zip(*(medians for _, medians in curves), strict=True)]
        left.plot(curves[0][0], worst, "-", color=color, label=label, linewidth=2.2)
    bound = statistics.median({float(row["bound"]) for row in where(rows, kind="L2")})
    left.axhline(bound, color=BLUE, linestyle="--", label="bound of L2")
    left.set(xscale="log", yscale="log", xlabel="scale t of the inputs", ylabel="local Lipschitz constant")
    left.set(title="each kind on the inputs at which it fails")
    left.legend(loc="upper left")

    table = exponents(rows)
    grid = [[float(row[family]) for family in families] for row in table]
    colors = ListedColormap(["#DCE9F2", "#F6D5B8", "#E8A37A"])
    right.imshow(grid, cmap=colors, norm=BoundaryNorm([-math.inf, 0.5, 1.5, math.inf], 3), aspect="auto")
    for i, values in enumerate(grid):
        for j, value in enumerate(values):
            text = "flat" if value < 0.1 else f"$t^{{{value:.1f}}}$"
            right.text(j, i, text, ha="center", va="center", fontsize=8 if value < 0.1 else 11)
    labels = [
        "a token at 0,\nothers far",
        "query midway\nbetween keys",
        "far, where\nqueries are\nblind",
        "random\ntokens",
    ]
    right.set_xticks(range(len(families)), labels, fontsize=7)
    right.set_yticks(range(len(table)), [str(row["kind"]) for row in table])
    for k in range(1, len(table)):
        right.axhline(k - 0.5, color="white")
    for k in range(1, len(families)):
        right.axvline(k - 0.5, color="white")
    right.tick_params(length=0)
    right.spines[:].set_visible(False)
    right.set(title="growth of the constant with t")
    return figure


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def main(arguments: Sequence[str] = ()) -> None:
    lab = Lab.from_arguments("unbounded", "Which attention is Lipschitz?", arguments)
    scales = [10 ** (k / (1 if lab.quick else 4)) for k in range(-1 if lab.quick else -4, 4 if lab.quick else 13)]
    draws = 2 if lab.quick else 9
    rows = lab.run({f"weights {draw}": partial(measure, lab, draw, scales) for draw in range(draws)})
    lab.save(partial(plot, rows))
    lab.show("growth of the local constant, as a power of the scale of the inputs", exponents(rows))
    l2 = where(rows, kind="L2")
    lab.say(f"L2: at most {max(float(row['constant']) / float(row['bound']) for row in l2):.3f} of its bound")
    lab.show("change of the Jacobian where a token passes another", kink(lab))
    lab.close()
