"""The flow of a config against nflows' flows of flattened sequences, trained alike.

    python -m benchmarks.sequences --data watch --minutes 3

takes data and flow from configs/watch.yaml, and trains the flow, nflows' masked autoregressive flow and nflows'
rational-quadratic coupling flow for so many minutes of processor time each, so that a busy machine is fair to all.
Batches, learning rate, gradient clipping and schedule are the same, those of the config where it says; nflows' flows
have more parameters. For the watch, a learning rate of 0.003 is also the one of 0.001, 0.003 and 0.01 that is best for
both of nflows' on the validation split. The weights that did best there are the ones tested. Prints the NLL per
dimension of standardised features, and writes it to docs/results/watch.csv after each rival: started again, the
command goes on with the rivals that are missing.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from nflows import transforms
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.nn.nets import ResidualNet
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from flowattn.cli import CONFIGS, SequenceCLI, keep_quiet
from flowattn.data.base import SequenceData

RIVALS = ("flowattn", "nflows-maf", "nflows-spline")
EVALUATIONS, WARMUP = 25, 100


@dataclass(frozen=True)
class Row:
    """One rival, in nats per dimension."""

    rival: str
    parameters: int
    minutes: float
    steps: int
    train: float
    val: float
    test: float
    error: float


class Flattened(Flow):
    """A flow of vectors as one of sequences [B, N, D]."""

    def _log_prob(self, inputs: Tensor, context: Tensor | None) -> Tensor:
        return super()._log_prob(inputs.flatten(1), context)


def autoregressive_flow(size: int, hidden: int = 256, depth: int = 5) -> Flow:
    """Masked affine autoregressive transforms, each of the reversed order of the one before."""
    parts: list[transforms.Transform] = []
    for _ in range(depth):
        parts += [
            transforms.MaskedAffineAutoregressiveTransform(size, hidden, use_residual_blocks=True),
            transforms.ReversePermutation(size),
        ]
    return Flattened(transforms.CompositeTransform(parts), StandardNormal([size]))


def spline_flow(size: int, hidden: int = 128, depth: int = 5) -> Flow:
    """Rational-quadratic couplings of alternating halves, with a linear map of everything before each."""
    parts: list[transforms.Transform] = []
    for number in range(depth):
        coupling = transforms.PiecewiseRationalQuadraticCouplingTransform(
            mask=(torch.arange(size) + number) % 2,
            transform_net_create_fn=lambda width, out: ResidualNet(width, out, hidden_features=hidden),
            num_bins=8,
            tails="linear",
            tail_bound=5.0,
        )
        parts += [transforms.LULinear(size, identity_init=True), coupling]
    return Flattened(transforms.CompositeTransform(parts), StandardNormal([size]))


def train(flow: Flow, splits: dict[str, Tensor], batch_size: int, rate: float, seconds: float, title: str) -> int:
    """Trains for so many seconds of processor time, and leaves the weights that were best on validation."""
    optimiser = torch.optim.Adam(flow.parameters(), lr=rate)
    random = torch.Generator().manual_seed(0)
    best, kept, step, evaluations = math.inf, {}, 0, 0
    start = time.process_time()
    with Progress(transient=True) as progress:
        bar = progress.add_task(title, total=1.0)
        while evaluations < EVALUATIONS:
            done = min(1.0, (time.process_time() - start) / seconds)
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1, (step + 1) / WARMUP) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
            batch = splits["train"][torch.randint(len(splits["train"]), (batch_size,), generator=random)]
            optimiser.zero_grad()
            loss = -flow.log_prob(batch).mean() / batch[0].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
            optimiser.step()
            step += 1
            progress.update(bar, completed=done)
            if done * EVALUATIONS >= evaluations + 1:
                evaluations += 1
                nll, _ = evaluate(flow, splits["val"])
                progress.update(bar, description=f"{title}, {nll:.3f} on validation")
                if nll < best:
                    best, kept = nll, copy.deepcopy(flow.state_dict())
    flow.load_state_dict(kept)
    return step


@torch.no_grad()
def evaluate(flow: Flow, split: Tensor) -> tuple[float, float]:
    """The mean NLL in nats per dimension, and its standard error."""
    flow.eval()
    nll = -torch.cat([flow.log_prob(part) for part in split.split(500)]).double() / split[0].numel()
    flow.train()
    return nll.mean().item(), nll.std().item() / len(nll) ** 0.5


def load(data: SequenceData) -> dict[str, Tensor]:
    """The splits in standardised features."""
    mean, scale = data.moments()
    if data.split("train").mask is not None or data.context_features is not None:
        raise SystemExit("error: nflows' flows of flattened sequences take neither masks nor contexts, which this has.")
    return {name: (data.split(name).inputs - mean) / scale for name in ("train", "val", "test")}


def gaussians(data: SequenceData) -> list[Row]:
    """The references of the data, in the same units."""
    change = data.moments()[1].log().mean().item()
    rows = []
    for name, log_prob in data.references().items():
        nll = []
        for split in (data.split("train"), data.split("val"), data.split("test")):
            batch = split.batch(some(len(split)))
            nll.append(-log_prob(batch).double() / batch.inputs[0].numel() - change)
        error = nll[-1].std().item() / len(nll[-1]) ** 0.5
        train_nll, val, test = (values.mean().item() for values in nll)
        rows.append(Row(name, 0, 0.0, 0, train_nll, val, test, error))
    return rows


def some(size: int, most: int = 5000) -> Tensor:
    """Rows to evaluate on: all of a small split, the same random ones of a large one."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:most]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequences", description="Flows of sequences compared.")
    parser.add_argument("--data", default="watch", help="a config in configs/ with data of fixed length")
    parser.add_argument("--minutes", type=float, default=3.0, help="of processor time, for each rival")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="where the table goes")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS, help="those to train; all unless given")
    parser.add_argument("--fresh", action="store_true", help="train all rivals again")
    options = parser.parse_args(arguments)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive; got {options.minutes}")

    torch.set_num_threads(1)
    # A config's own trainer is not used: all rivals go through the same loop.
    keep_quiet()
    cli = SequenceCLI(["--config", str(CONFIGS / f"{options.data}.yaml"), "--trainer.callbacks=[]"], run=False)
    data, module = cli.datamodule, cli.model
    size = math.prod(data.event_shape)
    rate = float(module.make_optimizer(module.parameters()).defaults["lr"])
    makers: dict[str, Callable[[], Flow]] = {
        "flowattn": lambda: module.flow,
        "nflows-maf": lambda: autoregressive_flow(size),
        "nflows-spline": lambda: spline_flow(size),
    }
    path = options.out / f"{options.data}.csv"
    rows = [] if options.fresh else read(path)
    rows = [row for row in rows if row.rival in RIVALS and row.minutes == options.minutes]
    splits = load(data)
    for name in options.rivals:
        if name in {row.rival for row in rows}:
            continue
        torch.manual_seed(0)
        flow = makers[name]()
        steps = train(flow, splits, data.batch_size, rate, 60 * options.minutes, name)
        train_nll, _ = evaluate(flow, splits["train"][some(len(splits["train"]))])
        count = sum(parameter.numel() for parameter in flow.parameters())
        test, error = evaluate(flow, splits["test"])
        row = Row(name, count, options.minutes, steps, train_nll, evaluate(flow, splits["val"])[0], test, error)
        rows.append(row)
        write(path, rows)
    rows = sorted(rows, key=lambda row: row.test) + gaussians(data)
    write(path, rows)
    show(rows, options.data)
    Console().print(f"wrote {path}", highlight=False)


def show(rows: list[Row], title: str) -> None:
    table = Table(title=f"{title}: NLL in nats per dimension of standardised features")
    for field in fields(Row):
        table.add_column(field.name, justify="left" if field.name == "rival" else "right")
    for row in rows:
        values = asdict(row).values()
        table.add_row(
            *(
                f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
                for value in values
            )
        )
    Console().print(table)


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        kinds = {"rival": str, "parameters": int, "steps": int}
        return [
            Row(**{name: kinds.get(name, float)(value) for name, value in line.items()})
            for line in csv.DictReader(file)
        ]


def write(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
