r"""Attention as a map of measures: is it stronger to split a token than to move it?

    python -m flowattn.experiments mass_splitting [--quick] [--out DIR] [--seed SEED]

Tokens with weights are a measure, and its distances are those of Wasserstein-2 ("How Smooth Is Attention?", Castin,
Ablin, Peyre, 2024). One attack moves the tokens. The other writes one of them twice, at half its weight, and moves the
copies apart. Both are measured to first order, by `transport_lipschitz`, and by attacks of a given size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from flowattn.experiments._lab import BLUE, GREEN, ORANGE, RED, Job, Lab, Row, column, where
from flowattn.lipschitz import DotProductHeads, split_token, transport_lipschitz, wasserstein2

FEATURES = 2
MATRICES = {"A = I": 1.0, "A = -I": -1.0}
BATCH_OF_ATTACKS = 16


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    tokens: Sequence[int] = (2, 3, 4, 8, 16)
    radii: Sequence[float] = (0.5, 1.0, 2.0, 3.0, 4.0)
    fixed_tokens: int = 4
    fixed_radius: float = 3.0
    starts: int = 24
    steps: int = 120
    sizes: Sequence[float] = (0.001, 0.01, 0.1, 0.3, 1.0)
    attack_steps: int = 150


QUICK = Size(tokens=(2, 3), radii=(1.0, 3.0), starts=8, steps=30, fixed_tokens=3, sizes=(0.01, 1.0), attack_steps=50)


# -- what is measured


def heads(sign: float) -> DotProductHeads:
    eye = torch.eye(FEATURES, dtype=torch.float64)
    return DotProductHeads.single(sign * eye, eye)


def draw(lab: Lab, num: int, tokens: int, radius: float) -> Tensor:
    """Tokens spread evenly over the ball."""
    generator = lab.generator("tokens", tokens, radius)
    x = torch.randn(num, tokens, FEATURES, generator=generator, dtype=torch.float64)
    lengths = torch.rand(num, tokens, 1, generator=generator, dtype=torch.float64) ** (1 / FEATURES)
    return radius * lengths * torch.nn.functional.normalize(x, dim=-1)


def at_random(lab: Lab, size: Size, matrix: str, tokens: int, radius: float) -> Row:
    """The ratio of both attacks at random tokens: the median, and the largest."""
    ratio = transport_lipschitz(heads(MATRICES[matrix]), draw(lab, 4 * size.starts, tokens, radius)).ratio
    return {"random_ratio": ratio.median().item(), "random_ratio_max": ratio.amax().item()}


def ascend(
    lab: Lab, size: Size, matrix: str, tokens: int, radius: float, goal: str, *, weighted: bool = False
) -> tuple[float, Tensor]:
    """The largest ratio, or constant of either attack, that gradients find in the ball, and its tokens."""
    f = heads(MATRICES[matrix])
    x = draw(lab, size.starts, tokens, radius).requires_grad_()
    logits = torch.zeros(x.shape[:2], dtype=x.dtype, requires_grad=True)
    optimizer = torch.optim.Adam([x, logits] if weighted else [x])
    best, found = 0.0, x.detach()[0]
    for step in range(size.steps):
        optimizer.param_groups[0]["lr"] = 0.05 * radius * (1 - step / size.steps)
        inside = x * (radius / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-9)).clamp_max(1)
        value = getattr(transport_lipschitz(f, inside, logits.softmax(-1)), goal)
        if value.amax().item() > best:
            best, found = value.amax().item(), inside.detach()[value.argmax()]
        optimizer.zero_grad()
        value.clamp_min(1e-12).log().sum().neg().backward()
        optimizer.step()
    return best, found


def local(lab: Lab, size: Size, matrix: str, tokens: int, radius: float) -> Iterator[Row]:
    """Everything of first order for so many tokens in a ball."""
    row: Row = {"part": "local", "matrix": matrix, "tokens": tokens, "radius": radius}
    row |= at_random(lab, size, matrix, tokens, radius)
    for goal in ("moving", "splitting", "ratio"):
        row[f"best_{goal}"] = ascend(lab, size, matrix, tokens, radius, goal)[0]
    yield row | {"best_ratio_weighted": ascend(lab, size, matrix, tokens, radius, "ratio", weighted=True)[0]}


def attacks(lab: Lab, size: Size) -> Iterator[Row]:
    r"""Attacks of a given size on the tokens of the best ratio, both found by gradients.

    The quotient is that of exact Wasserstein distances, so it is a lower bound of the Lipschitz constant.
    """
    f, n, radius = heads(MATRICES["A = -I"]), size.fixed_tokens, size.fixed_radius
    x = ascend(lab, size, "A = -I", n, radius, "ratio")[1]
    local = transport_lipschitz(f, x[None])
    weights = x.new_full((n,), 1 / n)
    splits = [split_token(x, weights, token) for token in range(n)]
    for distance in size.sizes:
        moved = attack(lab, size, f, x, weights, distance)
        split = max(attack(lab, size, f, *tokens, distance) for tokens in splits)
        row: Row = {"part": "attack", "matrix": "A = -I", "tokens": n, "radius": radius, "distance": distance}
        row |= {"moving": moved, "splitting": max(moved, split), "attack_ratio": max(moved, split) / moved}
        yield row | {"local_moving": local.moving.item(), "local_splitting": local.splitting.item()}


def attack(lab: Lab, size: Size, f: DotProductHeads, x: Tensor, weights: Tensor, distance: float) -> float:
    """The largest quotient that gradients find among moves whose cost is the given distance."""
    before = f(x[None], weights)[0]
    generator = lab.generator("attack", distance, len(x))
    move = torch.randn(BATCH_OF_ATTACKS, *x.shape, generator=generator, dtype=x.dtype).requires_grad_()
    optimizer = torch.optim.Adam([move], lr=0.05)

    def scaled() -> Tensor:
        cost = (weights[:, None] * move.square()).sum((-2, -1), keepdim=True).sqrt()
        return x + distance * move / cost

    for _ in range(size.attack_steps):
        gain = (weights[:, None] * (f(scaled(), weights) - before).square()).sum((-2, -1))
        optimizer.zero_grad()
        gain.log().sum().neg().backward()
        optimizer.step()
    moved = scaled().detach()
    after = f(moved, weights)
    pairs = zip(moved, after, strict=True)
    return max(wasserstein2(before, weights, b, weights) / wasserstein2(x, weights, a, weights) for a, b in pairs)


# -- what is drawn


def plot(rows: Sequence[Row], size: Size) -> Figure:
    figure = Figure(figsize=(7.4, 3.1), layout="constrained")
    axes = figure.subplots(1, 3)
    local = where(rows, part="local")
    by_radius = [row for row in local if row["tokens"] == size.fixed_tokens]
    by_tokens = [row for row in local if row["radius"] == size.fixed_radius]
    for ax, part, name, label in (
        (axes[0], by_radius, "radius", "radius of the ball $R$"),
        (axes[1], by_tokens, "tokens", "number of tokens $n$"),
    ):
        for matrix, color in zip(MATRICES, (BLUE, RED), strict=True):
            own = sorted(where(part, matrix=matrix), key=lambda row: float(row[name]))
            values = column(own, name)
            label_matrix = f"${matrix}$"
            ax.plot(
                values, column(own, "best_ratio_weighted"), "^--", color=color, label=f"{label_matrix}, free weights"
            )
            ax.plot(values, column(own, "best_ratio"), "o-", color=color, label=f"{label_matrix}, equal weights")
            ax.plot(values, column(own, "random_ratio"), "s:", color=color, label=f"{label_matrix}, random tokens")
        ax.axhline(1, color="0.6", linewidth=1, zorder=0)
        ax.set(xlabel=label, ylim=(0, None))
        if name == "tokens":
            ax.set_xscale("log")
        ax.set_xticks(sizes := sorted(set(column(part, name))), [f"{value:g}" for value in sizes])
        ax.set_xticks([], minor=True)
    axes[0].set(ylabel="splitting / moving", title=f"$n$ = {size.fixed_tokens} tokens")
    axes[1].set(title=f"$R$ = {size.fixed_radius:g}")
    plot_attacks(axes[2], where(rows, part="attack"))
    handles = axes[0].get_legend_handles_labels()[0]
    pairs = [handle for both in zip(handles[:3], handles[3:], strict=True) for handle in both]  # a column for each kind
    figure.legend(handles=pairs, loc="outside lower center", ncols=3)
    return figure


def plot_attacks(ax: Axes, rows: Sequence[Row]) -> None:
    distance = column(rows, "distance")
    for name, color, marker in (("splitting", GREEN, "D"), ("moving", ORANGE, "v")):
        ax.plot(distance, column(rows, name), marker + "-", color=color, label=f"{name}")
        ax.axhline(float(rows[0][f"local_{name}"]), color=color, linewidth=1, linestyle=":", zorder=0)
    ax.set(xscale="log", xlabel="size of the attack in $W_2$", ylabel="quotient of $W_2$ distances")
    ax.set(title="attacks, $A = -I$", ylim=(0, 1.08 * max(column(rows, "splitting"))))
    ax.legend(loc="lower left")


def jobs(lab: Lab, size: Size) -> dict[str, Job]:
    places = {(size.fixed_tokens, radius) for radius in size.radii} | {(n, size.fixed_radius) for n in size.tokens}
    todo: dict[str, Job] = {
        f"{matrix}, n = {n}, R = {radius:g}": partial(local, lab, size, matrix, n, radius)
        for matrix in MATRICES
        for n, radius in sorted(places)
    }
    return todo | {"attacks": partial(attacks, lab, size)}


def table(rows: Sequence[Row]) -> list[Row]:
    """The columns of first order that say most, without those of the attacks."""
    names = ("matrix", "tokens", "radius", "best_moving", "best_splitting", "random_ratio", "best_ratio")
    return [{name: row[name] for name in (*names, "best_ratio_weighted")} for row in where(rows, part="local")]


def main(arguments: Sequence[str] = ()) -> None:
    description = "Attacks that split tokens against attacks that move them."
    lab = Lab.from_arguments("mass_splitting", description, arguments)
    size = QUICK if lab.quick else Size()
    rows = lab.run(jobs(lab, size))
    lab.save(lambda: plot(rows, size))
    lab.show("the local constants, and splitting over moving", table(rows))
    attacked = where(rows, part="attack")
    lab.show("attacks on the tokens of the best ratio", [{k: row[k] for k in list(row)[4:]} for row in attacked])
    largest = max(column(where(rows, part="local"), "best_ratio_weighted"))
    lab.say(f"Splitting is better than moving by a factor of up to {largest:.3g}.")
    lab.close()
