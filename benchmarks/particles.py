"""The flow of configs/dw4.yaml against nflows' rational-quadratic coupling flow, on four particles in double wells.

    python -m benchmarks.particles --minutes 7

trains each for the same time, in turns of ten seconds, and prints the negative log-likelihood of fresh samples, exact
on the mean-free space, beside the entropy, which is the floor. The couplings see orthonormal coordinates of the
mean-free space, which change no volume, and training systems turned at random; there is one with about as many
parameters as our flow, and one as wide as is usual. The table goes to docs/results/dw4.csv too.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from nflows.distributions import StandardNormal
from nflows.flows import Flow
from nflows.nn.nets import ResidualNet
from nflows.transforms import CompositeTransform, LULinear, PiecewiseRationalQuadraticCouplingTransform
from torch import Tensor, nn

from flowattn.data.gaussian import helmert
from flowattn.data.particles import DoubleWell
from flowattn.flows.particles import ParticleFlow

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs/dw4.yaml"
TURN = 10.0  # seconds


class CouplingFlow(nn.Module):
    """nflows' couplings with rational-quadratic splines, in orthonormal coordinates of the mean-free space."""

    basis: Tensor

    def __init__(self, hidden: int, num_layers: int, scale: float, num_bins: int = 8, tail_bound: float = 4.0) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("basis", helmert(4).float())

        def network(inputs: int, outputs: int) -> nn.Module:
            return ResidualNet(inputs, outputs, hidden_features=hidden, num_blocks=2)

        layers = []
        for k in range(num_layers):
            mask = [(k + i) % 2 for i in range(6)]
            layers += [
                LULinear(6),
                PiecewiseRationalQuadraticCouplingTransform(
                    mask, network, num_bins=num_bins, tails="linear", tail_bound=tail_bound
                ),
            ]
        self.flow = Flow(CompositeTransform([*layers, LULinear(6)]), StandardNormal([6]))

    def log_prob(self, x: Tensor) -> Tensor:
        """The log-density on the mean-free space."""
        u = torch.einsum("kn,bnd->bkd", self.basis, x).flatten(1) / self.scale
        return self.flow.log_prob(u) - 6 * math.log(self.scale)


class Runner:
    """A flow in training, which stops and goes on."""

    def __init__(self, flow: nn.Module, batches: Iterator[Tensor], seconds: float, lr: float) -> None:
        self.flow, self.batches, self.seconds, self.lr = flow, batches, seconds, lr
        self.optimizer = torch.optim.Adam(flow.parameters(), lr=lr, betas=(0.9, 0.99))
        self.spent, self.steps = 0.0, 0

    def run(self, turn: float) -> None:
        """Trains for so many seconds, with a learning rate that falls along half a cosine over all turns."""
        end = min(self.seconds, self.spent + turn)
        while self.spent < end:
            start = time.perf_counter()
            rise = min(1.0, (self.steps + 1) / 100)
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * rise * 0.5 * (1 + math.cos(math.pi * self.spent / self.seconds))
            loss = -self.flow.log_prob(next(self.batches)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.flow.parameters(), 5.0)
            self.optimizer.step()
            self.steps += 1
            self.spent += time.perf_counter() - start

    @torch.no_grad()
    def test(self, x: Tensor) -> tuple[float, float]:
        """The mean negative log-likelihood and its standard error."""
        nll = -torch.cat([self.flow.log_prob(part) for part in x.split(2000)]).double()
        return nll.mean().item(), (nll.std() / math.sqrt(len(nll))).item()


def batches(data: DoubleWell) -> Iterator[Tensor]:
    """Training batches without end, every epoch in another order."""
    loader = data.train_dataloader()
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from (batch.inputs for batch in loader)
        epoch += 1


def size(flow: nn.Module) -> int:
    """The number of parameters."""
    return sum(parameter.numel() for parameter in flow.parameters())


def rivals(scale: float) -> dict[str, tuple[nn.Module, float]]:
    """The flows and their learning rates."""
    config = yaml.safe_load(CONFIG.read_text())["model"]["init_args"]
    ours = ParticleFlow((4, 2), **config["flow"]["init_args"])
    small = next(flow for hidden in range(1, 1000) if size(flow := CouplingFlow(hidden, 4, scale)) >= size(ours))
    return {
        "flowattn, ParticleFlow": (ours, config["optimizer"]["init_args"]["lr"]),
        "nflows, coupling, as many parameters": (small, 3e-3),
        "nflows, coupling, 64 wide": (CouplingFlow(64, 8, scale), 1e-3),
    }


def main(argv: list[str] | None = None) -> None:
    """Trains, prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0, help="training time of each flow")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/dw4.csv")
    options = parser.parse_args(argv)
    if not options.minutes > 0:
        parser.error(f"--minutes must be positive; got {options.minutes}.")
    torch.manual_seed(0)
    data = DoubleWell(rotate=True)
    scale = data.split("train").inputs.std().item()
    runners = {
        name: Runner(flow, batches(data), 60 * options.minutes, lr) for name, (flow, lr) in rivals(scale).items()
    }
    while any(runner.spent < runner.seconds for runner in runners.values()):
        for name, runner in runners.items():
            runner.run(TURN)
            print(f"\r{name}: {runner.spent / 60:.1f} of {options.minutes} minutes, {runner.steps} steps", end="  ")
    print()
    test = data.split("test").inputs
    entropy, entropy_error = data.entropy()
    rows = [["model", "parameters", "minutes", "steps", "test NLL in nats", "standard error"]]
    for name, runner in runners.items():
        nll, error = runner.test(test)
        rows.append([name, size(runner.flow), options.minutes, runner.steps, f"{nll:.3f}", f"{error:.3f}"])
    rows.append(["entropy, the floor", "", "", "", f"{entropy:.3f}", f"{entropy_error:.3f}"])
    for k, row in enumerate(rows):
        print(f"| {' | '.join(map(str, row))} |" + ("\n|" + "---|" * len(row) if k == 0 else ""))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
