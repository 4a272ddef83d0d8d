"""Measured Lipschitz constants against the straightforward way, by the full Jacobian of autograd.

    python -m benchmarks.lipschitz

prints the time of `local_lipschitz` over that of `torch.func.jacrev` and the norm of what it gives, for a batch of two
inputs; then the time of `search_lipschitz` over that of as many steps of gradient ascent on this norm, from as many
starts. "deviation" is how far our constants are from those of the full Jacobian at the same inputs, relatively.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from benchmarks.timing import medians
from flowattn.contractions import DotProductSelfAttention, L2SelfAttention
from flowattn.lipschitz import LipschitzSearch, Norm, local_lipschitz, search_lipschitz

Map = Callable[[Tensor], Tensor]

SHAPES = [(16, 4, 1), (8, 8, 1), (64, 1, 1), (32, 8, 2), (64, 8, 2)]  # N, D, H with N D of 64 and more
NORMS: tuple[Norm, ...] = ("token", "inf", "2")
RESTARTS, STEPS = 4, 20


def straightforward(f: Map, x: Tensor, norm: Norm) -> Tensor:
    """The norm of the full Jacobian at each input; for "token" by alternating ascent from 8 starts in each row."""
    J = vmap(jacrev(lambda one: f(one[None])[0]))(x)
    if norm == "inf":
        return J.abs().sum((-2, -1)).flatten(1).amax(1)
    if norm == "2":
        return torch.linalg.matrix_norm(J.flatten(3).flatten(1, 2), 2)
    with torch.no_grad():
        u = torch.randn(*J.shape[:2], 8, J.shape[2], dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        value = torch.zeros(())
        for _ in range(200):
            u = u / u.norm(dim=-1, keepdim=True)
            w = torch.einsum("bisk,bikjd->bisjd", u, J)
            lengths = w.norm(dim=-1, keepdim=True)
            last, value = value, lengths.sum((-2, -1)).flatten(1).amax(1)
            if (value <= last * (1 + 1e-7)).all():
                break
            best, u = u, torch.einsum("bisjd,bikjd->bisk", w / lengths.clamp_min(1e-100), J)
    # A last turn that autograd sees, for the search.
    return torch.einsum("bisk,bikjd->bisjd", best, J).norm(dim=-1).sum(-1).flatten(1).amax(1)


def search(f: Map, shape: tuple[int, int]) -> LipschitzSearch:
    """Ours, with as many steps from as many starts as the other."""
    return search_lipschitz(f, shape, num_restarts=RESTARTS, num_steps=STEPS, scales=(1.0,), dtype=torch.float64)


def straightforward_search(f: Map, shape: tuple[int, int]) -> None:
    """Gradient ascent on the norm of the full Jacobian."""
    x = torch.randn(RESTARTS, *shape, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1, maximize=True)
    for _ in range(STEPS):
        optimizer.zero_grad()
        straightforward(f, x, "token").log().sum().backward()
        optimizer.step()


def main(rounds: int = 7) -> None:
    """Prints the tables."""
    torch.manual_seed(0)
    print("| attention | N x D x H | norm | local_lipschitz, ms | full Jacobian, ms | ratio | deviation |")
    print("|---|---|---|---|---|---|---|")
    for tokens, features, heads in SHAPES:
        for f in _maps(features, heads):
            x = torch.randn(2, tokens, features, dtype=torch.float64)
            for norm in NORMS:
                found, true = local_lipschitz(f, x, norm), straightforward(f, x, norm)
                title = f"| {_name(f)} | {tokens}x{features}x{heads} | {norm} |"
                t = medians(_rivals(local_lipschitz, straightforward, f, x, norm), rounds, title)
                print(title, _row(t, (found / true - 1).abs().amax().item()), flush=True)
    print(f"\n{STEPS} steps from {RESTARTS} starts, norm token.")
    print("| attention | N x D x H | search_lipschitz, ms | full Jacobian, ms | ratio | deviation |")
    print("|---|---|---|---|---|---|")
    for tokens, features, heads in SHAPES[:-1]:  # the last one takes minutes
        for f in _maps(features, heads):
            shape = tokens, features
            found = search(f, shape)
            true = straightforward(f, found.x[None], "token").item()
            title = f"| {_name(f)} | {tokens}x{features}x{heads} |"
            t = medians(_rivals(search, straightforward_search, f, shape), max(3, rounds // 3), title)
            print(title, _row(t, abs(found.constant / true - 1)), flush=True)


def _maps(features: int, heads: int) -> list[torch.nn.Module]:
    maps = L2SelfAttention(features, heads, coefficient=None), DotProductSelfAttention(features, heads)
    return [f.double().requires_grad_(False) for f in maps]


def _name(f: torch.nn.Module) -> str:
    return "L2" if isinstance(f, L2SelfAttention) else "dot product"


def _rivals(ours: Callable[..., Any], full: Callable[..., Any], *arguments: Any) -> dict[str, Callable[[], Any]]:
    return {"ours": partial(ours, *arguments), "full": partial(full, *arguments)}


def _row(t: dict[str, float], deviation: float) -> str:
    return f"{t['ours']:.1f} | {t['full']:.1f} | {t['ours'] / t['full']:.2f} | {deviation:.0e} |"


if __name__ == "__main__":
    main()
