r"""How tight are the bounds of L2 attention? Upper bounds against the best input found, from 2 to 1000 tokens.

.. math:: \text{best input found} \le \operatorname{Lip}(f) \le \text{bound} = 1 + 4 W_0\bigl(\tfrac{N-1}{e}\bigr)
    \qquad\text{for } W = B = I

The published bound (infinity norm, one head, tokens of one feature) is met by 50 starts of the search per N. The token
bound is met for tokens of 1, 2 and 4 features, with and without a position bias, with and without a ball; and by
the two-point construction, in which the proof is nearly an equality and which needs no search (`two_points`). For
weights that are not the identity the bound also pays for what W and B do not stretch alike; the case `random weights`
says how much.

    python -m flowattn.experiments tightness [--quick] [--out DIR]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.func import vjp

from flowattn.contractions import L2SelfAttention
from flowattn.experiments._lab import COLORS, MARKERS, Job, Lab, Row, column, plain_ticks, where
from flowattn.lipschitz import lambert_w0, published_infinity_bound, search_lipschitz, visible_weight

SLOPE = 0.125  # of the position bias, per token of distance
RATIO = 1.0  # R^2 / s of the ball
VARIANTS = ("plain", "bias", "ball", "bias and ball")


def layer(features: int, variant: str) -> L2SelfAttention:
    """One head with W = B = I."""
    radius = math.sqrt(RATIO * math.sqrt(features)) if "ball" in variant else None
    bias = "alibi" if "bias" in variant else None
    f = L2SelfAttention(features, 1, radius=radius, position_bias=bias, coefficient=None)  # type: ignore[arg-type]
    f = f.double().requires_grad_(False)
    f.W.copy_(torch.eye(features))
    f.B.copy_(torch.eye(features))
    if f.position_bias is not None:
        f.position_bias.slopes.fill_(SLOPE)
    return f


def two_points(f: L2SelfAttention, num_tokens: int) -> tuple[Tensor, int]:
    r"""The input of the proof, one token at 0 and the others in turn at two opposite points, and which token is at 0.

    .. math:: z_i = 0, \qquad z_j = \pm\delta\, a, \qquad \delta^2 = s\,\bigl(1 + W_0(S_i / e)\bigr)

    with :math:`z_j = W^T x_j` and a the `steepest` direction. There :math:`m_i = 0`, so that the covariance is the
    second moment about z_i, and all distances are those that maximise it. For W = B = I row i stretches by
    :math:`1 + 4w - 2w / (1 + w)` with :math:`w = W_0(S_i / e)`, where the bound is :math:`1 + 4w`: what is lost is
    that the two sums of the derivative then point in opposite directions.
    """
    row = num_tokens // 2  # under a bias the token in the middle sees most
    bias = torch.zeros(num_tokens, num_tokens) if f.position_bias is None else f.position_bias(num_tokens)[0]
    weight = visible_weight(bias.double())[row].exp()
    length = (math.sqrt(f.features) * (1 + lambert_w0(weight / math.e))).sqrt()
    index = torch.arange(num_tokens)
    turn = (index - (index > row).long()) % 2  # as many on either side, at every distance from the row
    z = length * (1 - 2 * turn).unsqueeze(-1) * steepest(f)
    z[row] = 0
    return torch.linalg.solve(f.W, z, left=False), row


def steepest(f: L2SelfAttention) -> Tensor:
    """The direction of z, among many, that W and B together stretch most."""
    z = torch.randn(1000, f.features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.cat([torch.eye(f.features, dtype=z.dtype)[:1], z / z.norm(dim=-1, keepdim=True)])
    product = (z @ f.W.T).norm(dim=-1) * (z @ f.B).norm(dim=-1)
    return z[(product > product.amax() * (1 - 1e-9)).long().argmax()]  # the first of equals


def stretch_of_row(f: L2SelfAttention, x: Tensor, row: int) -> float:
    """How far a row moves along what B makes of the steepest direction, when every token moves by 1: one gradient."""
    value, pull = vjp(f, x.unsqueeze(0))[:2]
    u = torch.zeros_like(value)
    u[0, row] = torch.nn.functional.normalize(steepest(f) @ f.B, dim=-1)
    return torch.linalg.vector_norm(pull(u)[0], dim=-1).sum().item()


def measure_published(lab: Lab, n: int, starts: int, steps: int) -> list[Row]:
    """The published bound at H = D = 1 against the best of so many starts."""
    f, one = layer(1, "plain"), torch.ones(1, 1, 1, dtype=torch.float64)
    found = search_lipschitz(
        f,
        (n, 1),
        "inf",
        num_restarts=starts,
        num_steps=steps if n <= 100 else steps // 4,
        learning_rate=0.15 if n <= 100 else 0.05,
        scales=[10 ** (k / 4) for k in range(-2, 5)],
        generator=lab.generator("published", n),
        dtype=torch.float64,
    )
    row: Row = {"case": "published, inf-norm", "features": 1, "tokens": n}
    row |= {"bound": published_infinity_bound(one, one, one, n).item(), "found": found.constant}
    return [row | {"two_points": stretch_of_row(f, *two_points(f, n))}]


def measure_token(lab: Lab, features: int, variant: str, tokens: Sequence[int], steps: int) -> list[Row]:
    """The token bound of one layer. The best of each length is a start of the next."""
    f = layer(features, variant)
    rows: list[Row] = []
    best: Tensor | None = None
    for n in tokens:
        known, row_at_zero = two_points(f, n)
        best, constant = search(lab, f, n, known if best is None else torch.stack([known, resized(best, n)]), steps)
        row: Row = {"case": variant, "features": features, "tokens": n, "bound": f.lipschitz_bound(n).item()}
        row["found"] = constant
        if f.radius is None:  # in a ball the worst input is another one
            row["two_points"] = stretch_of_row(f, known, row_at_zero)
        rows.append(row)
    return rows


def measure_random(lab: Lab, draw: int, tokens: Sequence[int], steps: int) -> list[Row]:
    """The token bound of one head with random W and B, for tokens of two features."""
    f = layer(2, "plain")
    generator = lab.generator("random weights", draw)
    for weight in (f.W, f.B):
        weight.copy_(torch.randn(2, 2, generator=generator, dtype=torch.float64) / math.sqrt(2))
    rows: list[Row] = []
    best: Tensor | None = None
    for n in tokens:
        known, row_at_zero = two_points(f, n)
        best, constant = search(lab, f, n, known if best is None else torch.stack([known, resized(best, n)]), steps)
        row: Row = {"case": "random weights", "features": 2, "tokens": n, "draw": draw}
        row |= {"bound": f.lipschitz_bound(n).item(), "found": constant}
        rows.append(row | {"two_points": stretch_of_row(f, known, row_at_zero)})
    return rows


def search(lab: Lab, f: L2SelfAttention, num_tokens: int, start: Tensor | None, steps: int) -> tuple[Tensor, float]:
    """The best input found and its constant; for long sequences a few steps from the starts have to do."""
    few = num_tokens > 100
    found = search_lipschitz(
        f,
        (num_tokens, f.features),
        num_restarts=2 if few else 16,
        num_steps=steps // 4 if few else steps,
        learning_rate=0.05 if few else 0.15,
        scales=[2.5] if few else [10 ** (k / 4) for k in range(-2, 5)],
        start=start,
        generator=lab.generator("search", num_tokens),
        dtype=torch.float64,
    )
    return found.x, found.constant


def resized(x: Tensor, num_tokens: int) -> Tensor:
    """A longer sequence with the same tokens in the same order, each repeated."""
    index = torch.arange(num_tokens) * len(x) // num_tokens
    return x[index]


def plot(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    draw_curves(first, where(rows, case="published, inf-norm"), "black", "o", "")
    first.set(title="published bound, $H = D = 1$", ylabel="Lipschitz constant", ylim=(0, None))
    for variant, color, marker in zip(VARIANTS, COLORS, MARKERS, strict=False):
        draw_curves(second, where(rows, case=variant, features=2), color, marker, variant)
    second.set(title="token bound, $D = 2$", ylim=(0, None))
    for features, color, marker in zip((1, 2, 4), COLORS, MARKERS, strict=False):
        for variant, line in (("plain", "-"), ("bias", "--"), ("ball", ":")):
            own = where(rows, case=variant, features=features)
            label = f"$D = {features}$" if variant == "plain" else None
            third.plot(column(own, "tokens"), ratios(own), marker + line, color=color, label=label)
    drawn = where(rows, case="random weights")
    lengths = sorted({int(row["tokens"]) for row in drawn})
    spread = [ratios(where(drawn, tokens=n)) for n in lengths]
    third.plot(lengths, list(map(statistics.median, spread)), "-", color="0.55", label="$D = 2$, random weights")
    third.fill_between(lengths, list(map(min, spread)), list(map(max, spread)), color="0.55", alpha=0.2, linewidth=0)
    for line, label in (("--", "with bias"), (":", "with ball")):
        third.plot([], [], line, color="0.3", label=label)
    third.axhline(1.2, color="0.7", linewidth=1, zorder=0)
    third.set(title="token bound / best input found", ylim=(1, 2.3))
    for ax in (first, second, third):
        ax.set(xscale="log", xlabel="number of tokens N")
        plain_ticks(ax, "x", [1, max(column(rows, "tokens"))])
    first.legend(loc="upper left")
    second.legend(loc="upper left")
    third.legend(loc="upper right", ncols=1)
    return figure


def draw_curves(ax: Axes, rows: Sequence[Row], color: str, marker: str, name: str) -> None:
    """The bound as a line, what was found as markers, and the construction as dots between them."""
    x = column(rows, "tokens")
    bound, found, known = (name, None, None) if name else ("bound", "best input found", "two points, no search")
    ax.plot(x, column(rows, "bound"), "-", color=color, label=bound)
    ax.plot(x, column(rows, "found"), marker, color=color, markerfacecolor="white", label=found)
    if all(row.get("two_points") for row in rows):
        ax.plot(x, column(rows, "two_points"), ":", color=color, label=known)


def ratios(rows: Sequence[Row]) -> list[float]:
    return [float(row["bound"]) / float(row["found"]) for row in rows]


def summary(rows: Sequence[Row]) -> list[Row]:
    """How far each bound is above what was found, and how much of it two points reach."""
    table: list[Row] = []
    for row in rows:
        line: Row = {"case": row["case"], "D": row["features"], "bound": row["bound"], "found": row["found"]}
        line["bound/found"] = float(row["bound"]) / float(row["found"])
        if "two_points" in row:
            line["two points/bound"] = float(row["two_points"]) / float(row["bound"])
        table.append(line)
    return table


def main(arguments: Sequence[str] = ()) -> None:
    lab = Lab.from_arguments("tightness", "How tight are the bounds of L2 attention?", arguments)
    tokens = (2, 8, 24) if lab.quick else (2, 4, 10, 30, 100, 300, 1000)
    starts, steps, draws = (16, 8, 1) if lab.quick else (50, 40, 3)
    jobs: dict[str, Job] = {
        f"published, N = {n}": partial(measure_published, lab, n, starts, steps // 2) for n in tokens
    }
    for features in (2,) if lab.quick else (1, 2, 4):
        for variant in VARIANTS:
            jobs[f"{variant}, D = {features}"] = partial(measure_token, lab, features, variant, tokens, steps)
    for draw in range(draws):
        jobs[f"random weights {draw}"] = partial(measure_random, lab, draw, tokens, steps)
    rows = lab.run(jobs)
    lab.save(partial(plot, rows))
    lab.show(f"N = {tokens[-1]}", summary(where(rows, tokens=tokens[-1])))
    lab.close()
