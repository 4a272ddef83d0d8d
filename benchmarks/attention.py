"""Contractive L2 attention against torch's attention and against L2 attention through torch.cdist.

    python -m benchmarks.attention

prints, for each shape, the time of `L2SelfAttention` (the token bound included) over that of
`torch.nn.MultiheadAttention(bias=False)` and over that of the textbook formula with `torch.cdist`: forward after a
change of the weights, so that the bound is computed anew; forward with the weights of the call before, which finds so
and takes the bound from there; forward and backward. Then the peak memory at 16,384 tokens.
"""

from __future__ import annotations

import math
import subprocess
import sys

import torch
from torch import Tensor, nn

from benchmarks.timing import medians
from flowattn.contractions import L2SelfAttention

SHAPES = [(32, 64, 64, 8), (8, 256, 256, 8), (2, 1024, 512, 8), (1, 4096, 512, 8)]
LENGTHS = [4096, 8192, 16384]  # whose peak memory is measured


class CdistAttention(nn.Module):
    """The same function written with `torch.cdist`, without any bound."""

    def __init__(self, attention: L2SelfAttention) -> None:
        super().__init__()
        self.heads = attention.num_heads
        self.W, self.B = nn.Parameter(attention.W.detach().clone()), nn.Parameter(attention.B.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.W).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        P = (-torch.cdist(y, y).square() / math.sqrt(y.shape[-1])).softmax(-1)
        return (P @ y).transpose(1, 2).flatten(2) @ self.B


def compare(batch: int, tokens: int, features: int, heads: int, rounds: int) -> dict[str, float]:
    """Medians in milliseconds of the three rivals, forward only and with backward."""
    torch.manual_seed(0)
    ours = L2SelfAttention(features, heads)
    theirs = nn.MultiheadAttention(features, heads, bias=False, batch_first=True)
    textbook = CdistAttention(ours)
    x = torch.randn(batch, tokens, features)
    leaf, weight = x.clone().requires_grad_(), torch.randn_like(x)
    modules = {
        "flowattn": ours,
        "torch": lambda x: theirs(x, x, x, need_weights=False)[0],
        "cdist": textbook,
    }

    def forward(module):
        def run():
            with torch.no_grad():
                module(x)

        return run

    def forward_with_new_weights():
        with torch.no_grad():
            ours.W *= 1 - 1e-6
            ours.B *= 1 - 1e-6
            ours(x)

    def backward(module):
        def run():
            leaf.grad = None
            for rival in (ours, theirs, textbook):
                rival.zero_grad()
            (module(leaf) * weight).sum().backward()

        return run

    title = f"{batch}x{tokens}x{features}x{heads}"
    forwards = {f"{name} forward": forward(module) for name, module in modules.items()}
    forwards["flowattn new weights"] = forward_with_new_weights
    backwards = {f"{name} backward": backward(module) for name, module in modules.items()}
    return medians(forwards, rounds, title) | medians(backwards, rounds, title)


def peak_memory(tokens: int) -> float:
    """Peak memory in MiB that forward and backward with so many tokens add, in a process of its own. Linux only."""
    code = f"""
import re, torch
from flowattn.contractions import L2SelfAttention

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

f = L2SelfAttention(64, 1)
f(torch.randn(1, 64, 64).requires_grad_()).sum().backward()
x = torch.randn(1, {tokens}, 64).requires_grad_()
open("/proc/self/clear_refs", "w").write("5")  # starts the peak anew
before = status("VmRSS")
f(x).sum().backward()
print(status("VmHWM") - before)
"""
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout) / 2**10


def main(rounds: int = 25) -> None:
    """Prints the tables."""
    print("Time of contractive L2 attention over a rival's, medians of interleaved runs.")
    columns = [
        f"{passes}, of {rival}"
        for rival in ("torch", "cdist")
        for passes in ("new weights", "forward", "with backward")
    ]
    print(f"| B x N x D x H | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
    for shape in SHAPES:
        t = compare(*shape, rounds=rounds if shape[1] < 4096 else max(3, rounds // 3))
        ratios = [
            t[f"flowattn {of_ours}"] / t[f"{rival} {of_theirs}"]
            for rival in ("torch", "cdist")
            for of_ours, of_theirs in (("new weights", "forward"), ("forward", "forward"), ("backward", "backward"))
        ]
        print(f"| {'x'.join(map(str, shape))} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |", flush=True)
    print("\nPeak memory of forward and backward, D = 64, H = 1.")
    print("| N | MiB | an N x N tensor would take |")
    print("|---|---|---|")
    for tokens in LENGTHS:
        print(f"| {tokens} | {peak_memory(tokens):.0f} | {tokens**2 * 4 / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main()
