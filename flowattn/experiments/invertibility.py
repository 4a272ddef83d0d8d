r"""Can attention be inverted? The error of fixed-point iterations for y = x + c f(x), L2 against dot products.

.. math:: x_{k+1} = y - c f(x_k), \qquad \|x_k - x\| \le \frac{\|y - x_k - c f(x_k)\|}{1 - c}
    \quad\text{if } \operatorname{Lip}(f) \le 1

L2 attention is divided by its bound, so that the iteration must converge and every error has a certificate.
Dot-product attention has no bound to be divided by. It is tried as it is, and divided by the best stand-in there is:
the largest local constant measured at inputs like those it is to invert. The stand-in holds where it was measured
and fails at the inputs by which Kim et al. show that there is no bound: one token at 0, the others far.

    python -m flowattn.experiments invertibility [--quick] [--out DIR]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from flowattn.contractions import DotProductSelfAttention, L2SelfAttention
from flowattn.experiments._lab import BLUE, GREEN, RED, Job, Lab, Row, column, where
from flowattn.lipschitz import local_lipschitz, token_norm

COEFFICIENTS = {0.5: GREEN, 0.7: BLUE, 0.9: RED}
KINDS = ("L2 / bound", "dot product", "dot product / measured")
INPUTS = ("normal", "one token at 0")
FAR = 10.0  # how much longer than normal the tokens are that lie far from the one at 0
FLOOR = 1e-14  # errors below are rounding


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    tokens: int = 64
    features: int = 64
    heads: int = 8
    inputs: int = 128
    steps: int = 50
    measured: int = 8


QUICK = Size(tokens=8, features=8, heads=2, inputs=16, steps=30, measured=4)


def draw_inputs(lab: Lab, size: Size, kind: str, num: int) -> Tensor:
    """Sequences of standard normal tokens; or all of them ten times as long but the first, which is 0."""
    shape = (num, size.tokens, size.features)
    x = torch.randn(shape, generator=lab.generator("inputs", kind), dtype=torch.float64)
    if kind == "one token at 0":
        x = FAR * x
        x[:, 0] = 0
    return x


def draw_weights(lab: Lab, module: nn.Module) -> None:
    """Normal weights that neither grow nor shrink what they are given, on average."""
    generator = lab.generator("weights", type(module).__name__)
    for weight in module.parameters():
        draws = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.copy_(draws / math.sqrt(len(weight)))


def attention(lab: Lab, size: Size, kind: str) -> tuple[Callable[[Tensor], Tensor], float]:
    """The map, and what it is divided by."""
    if kind == KINDS[0]:
        l2 = L2SelfAttention(size.features, size.heads, coefficient=None).double().requires_grad_(False)
        draw_weights(lab, l2)
        return l2, l2.lipschitz_bound(size.tokens).item()
    dot = DotProductSelfAttention(size.features, size.heads).double().requires_grad_(False)
    draw_weights(lab, dot)
    if kind == KINDS[1]:
        return dot, 1.0
    return dot, local_lipschitz(dot, draw_inputs(lab, size, "normal", size.measured)).amax().item()


@torch.no_grad()
def measure(lab: Lab, size: Size, kind: str) -> list[Row]:
    """The largest and the median error of the inputs after each step, and the largest certified one."""
    f, divisor = attention(lab, size, kind)
    rows: list[Row] = []
    for inputs in INPUTS:
        x = draw_inputs(lab, size, inputs, size.inputs)
        change = f(x) / divisor
        for c in COEFFICIENTS:
            y = guess = x + c * change
            for step in range(size.steps + 1):
                following = y - c / divisor * f(guess)
                error, residual = token_norm(guess - x), token_norm(following - guess)
                row: Row = {"kind": kind, "inputs": inputs, "coefficient": c, "steps": step, "divisor": divisor}
                row |= {"largest_error": error.amax().item(), "median_error": error.median().item()}
                if kind == KINDS[0]:
                    row["certified_error"] = (residual.amax() / (1 - c)).item()
                rows.append(row)
                guess = following
    return rows


def plot(rows: Sequence[Row]) -> Figure:
    figure = Figure(figsize=(7.4, 5), layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey=True, width_ratios=(2, 3))
    titles = {"normal": "normal inputs", "one token at 0": "one token at 0, others far"}
    for line, inputs in zip(axes, INPUTS, strict=True):
        for ax, name in zip(line, ("L2", "dot product"), strict=True):
            ax.set(yscale="log", ylim=(FLOOR, 1e4), title=f"{name}, {titles[inputs]}")
            ax.axhline(1e-6, color="0.7", linewidth=1, zorder=0)
        for c, color in COEFFICIENTS.items():
            own = where(rows, inputs=inputs, coefficient=c)
            draw(line[0], where(own, kind=KINDS[0]), "largest_error", color, "-")
            draw(line[0], where(own, kind=KINDS[0]), "certified_error", color, "--")
            draw(line[1], where(own, kind=KINDS[1]), "largest_error", color, ":")
            draw(line[1], where(own, kind=KINDS[2]), "largest_error", color, "-")
        line[0].set_ylabel("largest error of a token")
    for ax in axes[1]:
        ax.set_xlabel("fixed-point iterations")
    axes[0][0].set_xlim(0, 12)
    axes[0][1].set_xlim(0, max(column(rows, "steps")))
    divisor = where(rows, kind=KINDS[2])[0]["divisor"]
    names = (
        {"-": "true error, $f$ by its bound", "--": "certified error"},
        {
            "-": f"true error, $f / {divisor:.1f}$",
            ":": "true error, $f$ as it is",
        },
    )
    for ax, texts, place in zip((axes[0][0], axes[1][1]), names, ("upper right", "lower right"), strict=True):
        handles = [Line2D([], [], color="0.3", ls=style, label=text) for style, text in texts.items()]
        ax.legend(handles=handles, loc=place)
    colors = [Line2D([], [], color=color, label=f"$c = {c}$") for c, color in COEFFICIENTS.items()]
    figure.legend(handles=colors, loc="outside lower center", ncols=3)
    return figure


def draw(ax: Axes, rows: Sequence[Row], name: str, color: str, line: str) -> None:
    errors = [max(value, FLOOR) for value in column(rows, name)]
    ax.plot(column(rows, "steps"), errors, line, color=color)


def summary(rows: Sequence[Row]) -> list[Row]:
    """The steps to an error of 1e-6 for all inputs, and the error at the end."""
    table: list[Row] = []
    for kind in KINDS:
        for inputs in INPUTS:
            for c in COEFFICIENTS:
                own = where(rows, kind=kind, inputs=inputs, coefficient=c)
                reached = [int(row["steps"]) for row in own if float(row["largest_error"]) <= 1e-6]
                row: Row = {"kind": kind, "inputs": inputs, "c": c, "steps to 1e-6": reached[0] if reached else "never"}
                row["error at the end"] = float(own[-1]["largest_error"])
                table.append(row | {"certified": own[-1].get("certified_error", "")})
    return table


def main(arguments: Sequence[str] = ()) -> None:
    lab = Lab.from_arguments("invertibility", "Can attention be inverted?", arguments)
    size = QUICK if lab.quick else Size()
    jobs: dict[str, Job] = {kind: partial(measure, lab, size, kind) for kind in KINDS}
    rows = lab.run(jobs)
    lab.save(partial(plot, rows))
    lab.show(f"largest error of {size.inputs} inputs after {size.steps} iterations", summary(rows))
    lab.close()
