"""Invertible attention against `normflows.flows.Residual` around the very same contraction.

    python -m benchmarks.residual

prints the time of a training step (forward, log-determinant, backward) with the exact log-determinant over that of
normflows' default, the unbiased estimator with its memory saving; then the time of the inverse to a certified error of
1e-5 over that of normflows' inverse: the call `inverse` of each, which gives the point and its log-determinant, and the
point alone, theirs as it comes and asked for as small a step, with the true error of each; then how both steps grow
with the number of tokens.
"""

from __future__ import annotations

import copy

import normflows
import numpy as np
import torch
from torch import Tensor

from benchmarks.timing import medians
from flowattn.contractions import Contraction, L2SelfAttention
from flowattn.inverse import Solver
from flowattn.lipschitz import token_norm
from flowattn.logdet import ExactLogDet
from flowattn.transforms import ResidualTransform
from flowattn.transforms.parts import contractive_attention

CAUSAL = [(32, 64, 16, 4), (16, 128, 32, 4), (8, 256, 64, 8)]
DENSE = [(64, 4, 2, 1), (64, 13, 3, 1)]
LIFTED = (64, 13, 3, 4)
LARGE = (128, 64, 64, 8)  # to be inverted, too
GROWTH = [(8, tokens, 32, 4) for tokens in (32, 64, 128, 256, 512)]


def rivals(contraction: Contraction, x: Tensor) -> dict:
    """A training step of each."""
    ours = ResidualTransform(copy.deepcopy(contraction), ExactLogDet())
    theirs = normflows.flows.Residual(copy.deepcopy(contraction), reverse=False)
    weight = torch.randn_like(x)

    def step(block):
        def run():
            block.zero_grad()
            y, logabsdet = block(x.clone().requires_grad_())
            ((y * weight).sum() + logabsdet.sum()).backward()

        return run

    return {"flowattn": step(ours), "normflows": step(theirs)}


def inverses(contraction: Contraction, x: Tensor) -> tuple[dict, dict]:
    """The inverse of each, with and without its log-determinant, and the true error of each point."""
    ours = ResidualTransform(contraction, solver=Solver(tolerance=1e-5)).eval()
    theirs = normflows.flows.Residual(contraction, reverse=False).eval()
    precise = copy.deepcopy(contraction).double()
    with torch.no_grad():
        y = x + contraction(x)
        truth = Solver(tolerance=1e-12).solve(precise, y.double()).x

    def run(function, **options):
        def call() -> Tensor:
            with torch.no_grad():
                return function(y, **options)

        return call

    calls = {"flowattn": run(ours.inverse), "normflows": run(theirs.inverse)}
    fixed_point = theirs.iresblock._inverse_fixed_point
    points = {
        "point of flowattn": lambda: ours.solver.solve(contraction, y).x,
        "point of normflows": run(fixed_point),
        # It compares squares of its steps with its tolerance.
        "point of normflows to 1e-5": run(fixed_point, atol=1e-10, rtol=0.0),
    }
    errors = {name: token_norm(point().double() - truth).max().item() for name, point in points.items()}
    return calls | points, errors


def main(rounds: int = 25) -> None:
    """Prints the tables."""
    torch.manual_seed(0)
    np.random.seed(0)  # normflows draws the number of terms from numpy
    print("Training step with the exact log-determinant, over normflows' unbiased estimator.")
    print("| B x N x D x H | structure | flowattn, ms | normflows, ms | ratio |")
    print("|---|---|---|---|---|")
    for shape, causal in [*((s, True) for s in CAUSAL), *((s, False) for s in DENSE)]:
        batch, tokens, features, heads = shape
        x = torch.randn(batch, tokens, features)
        times = rounds if causal else 8 * rounds  # short ones differ more from round to round
        t = medians(rivals(L2SelfAttention(features, heads, causal=causal), x), times, str(shape))
        print(_row(shape, "causal" if causal else "dense", t), flush=True)
    batch, tokens, features, heads = LIFTED
    lifted = contractive_attention(features, heads, lift=32, coefficient=0.97)
    t = medians(rivals(lifted, torch.randn(batch, tokens, features)), rounds, str(LIFTED))
    print(_row(LIFTED, "dense, lifted to 32", t), flush=True)
    print("\nInverse to a certified error of 1e-5, over normflows': point and log-determinant, then the point alone,")
    print("and the largest true errors of a sample: ours, theirs, theirs to 1e-5.")
    print("| B x N x D x H | structure | ms | ratio | point, ms | ratio | ratio, theirs to 1e-5 | errors of these |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, causal in [*((s, True) for s in CAUSAL), *((s, False) for s in DENSE), (LARGE, False)]:
        batch, tokens, features, heads = shape
        runs, errors = inverses(
            L2SelfAttention(features, heads, causal=causal, coefficient=0.9), torch.randn(batch, tokens, features)
        )
        whole, of_whole, point, *of_point = medians(runs, rounds, str(shape)).values()
        name, structure = "x".join(map(str, shape)), "causal" if causal else "dense"
        ratios = " | ".join(f"{point / other:.2f}" for other in of_point)
        print(
            f"| {name} | {structure} | {whole:.1f} | {whole / of_whole:.2f} | {point:.1f} | {ratios} | "
            f"{', '.join(f'{error:.0e}' for error in errors.values())} |",
            flush=True,
        )
    print("\nGrowth of the training step with the number of tokens.")
    print("| B x N x D x H | structure | flowattn, ms | normflows, ms | ratio |")
    print("|---|---|---|---|---|")
    for shape in GROWTH:
        x = torch.randn(shape[0], shape[1], shape[2])
        t = medians(rivals(L2SelfAttention(shape[2], shape[3], causal=True), x), max(5, rounds // 2), str(shape))
        print(_row(shape, "causal", t), flush=True)


def _row(shape: tuple[int, ...], structure: str, t: dict[str, float]) -> str:
    ratio = t["flowattn"] / t["normflows"]
    name = "x".join(map(str, shape))
    return f"| {name} | {structure} | {t['flowattn']:.1f} | {t['normflows']:.1f} | {ratio:.2f} |"


if __name__ == "__main__":
    main()
