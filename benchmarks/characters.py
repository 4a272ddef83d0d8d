"""The training step of every rung of the character ladder against the dot-product Transformer's.

    python -m benchmarks.characters [--layers 2 4] [--threads 2]

The models are those of the ladder: 128 features, 4 heads, 128 characters, batches of 32, and no rung has more
parameters than dot-product attention. A step is forward, cross-entropy, backward, clipping and Adam.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import medians
from flowattn.models import RUNGS, CharTransformer


def step(model: CharTransformer, text: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rungs", nargs="+", choices=list(RUNGS), default=list(RUNGS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="all cores unless given")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rungs = list(dict.fromkeys(["dot_product", *options.rungs]))
    for layers in options.layers:
        torch.manual_seed(0)
        models = {rung: CharTransformer(50, 128, 4, layers, 128, rung=rung) for rung in rungs}
        text = torch.randint(50, (32, 129))
        times = medians({rung: step(model, text) for rung, model in models.items()}, options.rounds, f"{layers} layers")
        table = Table("rung", "parameters", "ms per step", "over dot_product",
                      title=f"{layers} layers, {torch.get_num_threads()} threads")  # fmt: skip
        for rung, model in models.items():
            ratio = times[rung] / times["dot_product"]
            table.add_row(rung, str(model.num_parameters), f"{times[rung]:.0f}", f"{ratio:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main()
