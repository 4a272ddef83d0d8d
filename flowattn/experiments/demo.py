r"""Inverts y = x + f(x) for an L2 attention layer f, and checks the certified error against the true one.

.. math:: x_{k+1} = y - f(x_k), \qquad \|x_k - x\| \le \frac{\|y - x_k - f(x_k)\|}{1 - L}
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flowattn.contractions import L2SelfAttention
from flowattn.lipschitz.norms import token_norm


class Stage(NamedTuple):
    """The worst sample after a number of steps."""

    steps: int
    certified: float
    true: float


@torch.no_grad()
def invert(samples: int, tokens: int, max_steps: int, tolerance: float) -> tuple[float, list[Stage]]:
    """Returns the bound L and the stages at 0, 1, 2, 4, ... steps, up to the tolerance."""
    f = L2SelfAttention(features=64, num_heads=8).double()
    lipschitz = f.lipschitz_bound(tokens).item()
    x = torch.randn(samples, tokens, 64, dtype=torch.float64)
    y = x + f(x)
    guess = y
    stages = []
    with Progress(transient=True) as progress:
        bar = progress.add_task("inverting", total=None)
        for step in range(max_steps + 1):
            f_guess = f(guess)
            certified = (token_norm(y - guess - f_guess).amax() / (1 - lipschitz)).item()
            done = certified <= tolerance or step == max_steps
            if done or step & (step - 1) == 0:
                stages.append(Stage(step, certified, token_norm(guess - x).amax().item()))
            if done:
                break
            guess = y - f_guess
            progress.update(bar, advance=1, description=f"inverting, error at most {certified:.0e}")
    return lipschitz, stages


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flowattn.experiments demo", description="Inverts an L2 attention layer."
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--tolerance", type=float, default=1e-10)
    options = vars(parser.parse_args(arguments))

    torch.manual_seed(0)
    lipschitz, stages = invert(**options)
    title = f"x from y = x + f(x), Lip(f) <= {lipschitz:.4f}"
    table = Table("steps", "certified error", "true error", title=title)
    for stage in stages:
        table.add_row(str(stage.steps), f"{stage.certified:.1e}", f"{stage.true:.1e}")
    Console().print(table)
    if stages[-1].certified > options["tolerance"]:
        raise SystemExit(
            f"not inverted after max_steps={options['max_steps']}: certified error "
            f"{stages[-1].certified:.1e} > tolerance {options['tolerance']:.1e}. Raise --max_steps."
        )
