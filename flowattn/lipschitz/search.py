"""Searches for the input that a map stretches most: a lower bound of its Lipschitz constant.

References:
    | Shampoo: Preconditioned Stochastic Tensor Optimization (Gupta, Koren, Singer, 2018)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp

from flowattn.checks import check_positive
from flowattn.lipschitz.measure import (
    Effort,
    Map,
    attaining,
    directions,
    in_differentiable_steps,
    noise,
    operator_norm,
    seeded,
    tiny,
    unit,
)
from flowattn.lipschitz.norms import Norm, check_norm, sequence_norm, token_norm

_SMALL = 256  # numbers in an input whose Jacobian is worth being written down


class LipschitzSearch(NamedTuple):
    """What `search_lipschitz` found: a lower bound, the input that attains it, and the best after each step."""

    constant: float
    x: Float[Tensor, "tokens features"]
    history: list[float]


@torch.no_grad()
@in_differentiable_steps
def search_lipschitz(
    f: Map,
    shape: tuple[int, int],
    norm: Norm = "token",
    *,
    num_restarts: int = 32,
    num_steps: int = 200,
    learning_rate: float = 0.15,
    scales: Sequence[float] = tuple(10 ** (k / 4) for k in range(-12, 13)),
    start: Float[Tensor, "*starts tokens features"] | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> LipschitzSearch:
    r"""Looks for the input [N, D] = `shape` that f stretches most.

    .. math:: \max_{X, V} \log \|J(X) V\|, \qquad \|V\| \le 1, \quad \|X\| \le 2 \max(\text{scales})

    Candidates are drawn at all `scales`: clouds, and what is worst for attention, a token at the origin with the
    others in one or two clusters around it. The best of them and those in `start`, `num_restarts` in all, are brought
    to the size that suits them. Then they ascend in X by gradients and in V by the turns of `local_lipschitz`; the
    weaker ones drop out on the way. Steps are relative to the size of X and whitened over features, so neither the
    scale of f nor a linear map before it matters. A restart that meets an infinite derivative goes back to its best
    point. A map without second derivatives, such as a ReLU network, has no way up: of it the candidates are measured.
    Search in float64 where f allows it, for far from the origin rounding can pass for stretch.

    Cost: about 16 num_restarts + 4 num_steps derivatives of derivatives.

    Example:
        >>> found = search_lipschitz(torch.sin, (3, 2))
        >>> f"{found.constant:.3f}"
        '1.000'
    """
    check_norm(norm)
    shape = tuple(shape)  # type: ignore[assignment]
    if len(shape) != 2:
        raise ValueError(f"shape must be (tokens, features); got shape={shape}.")
    check_positive(tokens=shape[0], features=shape[1], num_restarts=num_restarts, num_steps=num_steps)
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(f"scales must be positive and finite, and at least one; got scales={tuple(scales)}.")
    if start is not None and start.shape[-2:] != shape:
        raise ValueError(f"start must have shape [..., {shape[0]}, {shape[1]}]; got {list(start.shape)}.")
    generator = seeded(generator)
    like = torch.empty(0, dtype=dtype, device=device) if start is None else start.detach().to(device, dtype)
    given = like.reshape(-1, *shape)
    x = torch.cat([given, _candidates(*shape, like.new_tensor(scales), generator)])
    v = directions(noise(x.shape, like, generator), norm)
    scan = [_turns(f, *part, norm) for part in zip(x.split(num_restarts), v.split(num_restarts), strict=True)]
    value, v = (torch.cat(parts) for parts in zip(*scan, strict=True))
    rank = value.clone()
    rank[: len(given)].masked_fill_(value[: len(given)].isfinite(), math.inf)
    chosen = rank.topk(min(num_restarts, len(rank))).indices
    chosen = chosen[value[chosen].isfinite()]
    if not len(chosen):
        raise ValueError(f"f must have finite derivatives somewhere; got none at {len(x)} inputs of all scales.")
    limit = 2 * max(scales)
    x, v, value = _resize(f, x[chosen], v[chosen], value[chosen], norm, limit)
    restarts = _Restarts(x, v, value, x, v, x * 0, x[..., :1] * 0, x.mT @ x * 0)
    history = []
    for step in range(num_steps):
        rate = learning_rate * (1 - step / num_steps)
        restarts = _ascend(f, restarts, norm, rate, limit, step).best_few(num_restarts * 8 // (9 + step))
        history.append(restarts.best[0].item())
        if progress and (step + 1) % max(1, num_steps // 10) == 0:
            print(f"step {step + 1}: {history[-1]:.6g}, {len(restarts.x)} restarts", file=sys.stderr)
    finalists = restarts.best_few(1)
    if math.prod(shape) <= _SMALL:
        best = operator_norm(f, finalists.best_x, norm, Effort(generator))
    else:  # the gradients of all outputs would cost more than the search did
        best = _turns(f, finalists.best_x, finalists.best_v, norm, num_turns=100, tolerance=1e-6)[0]
    best = finalists.best.fmax(best)
    return LipschitzSearch(best.amax().item(), finalists.best_x[best.argmax()], history)


class _Restarts(NamedTuple):
    """Inputs on their way up, with their directions, their best so far, and the moments of their gradients."""

    x: Tensor
    v: Tensor
    best: Tensor
    best_x: Tensor
    best_v: Tensor
    mean: Tensor
    lengths: Tensor
    spread: Tensor

    def best_few(self, num: int) -> _Restarts:
        """The best of the restarts, in order, and never fewer than four."""
        keep = self.best.topk(min(len(self.x), max(4, num))).indices
        return _Restarts(*(part[keep] for part in self))


def _ascend(f: Map, restarts: _Restarts, norm: Norm, rate: float, limit: float, step: int) -> _Restarts:
    """One turn in v, and in x one step of Adam with second moments per token and, as a matrix, over features."""
    x, v, best, best_x, best_v, mean, lengths, spread = restarts
    y, pull, output = vjp(lambda x, v: jvp(f, (x,), (v,))[::-1], x, v, has_aux=True)  # type: ignore[misc]
    value = sequence_norm(y, norm)
    slope, w = pull(attaining(y, norm))
    size = torch.linalg.vector_norm(x, dim=-1).mean(-1)[:, None, None]
    slope = slope * size / value.clamp_min(tiny(x))[:, None, None]
    fine = (value + (slope + w).sum((-2, -1)) + output.sum((-2, -1))).isfinite()
    better, fine = fine & (value > best), fine[:, None, None]
    best, better = value.where(better, best), better[:, None, None]
    best_x, best_v = x.where(better, best_x), v.where(better, best_v)
    slope = slope.where(fine, 0)
    average = 1 / (step + 1)  # of all steps at first, so that the moments need not start from zero
    mean = mean.lerp(slope, max(0.2, average))
    lengths = lengths.lerp(slope.square().sum(-1, keepdim=True), max(0.05, average))
    scale = lengths.sqrt()
    scale = scale + 0.01 * scale.amax(1, keepdim=True) + tiny(x)  # a token that does not matter shall not wander
    spread = spread.lerp((slope / scale).mT @ (slope / scale), max(0.05, average))
    values, vectors = torch.linalg.eigh(spread * (x.shape[2] / x.shape[1]))
    whiten = vectors / (values.clamp_min(1e-4 * values[:, -1:]) + tiny(x)).sqrt().unsqueeze(-2) @ vectors.mT
    x = x + rate * size * (mean / scale) @ whiten
    x = _within(x, limit)
    x, v = x.where(fine, best_x), directions(w, norm).where(fine, v)
    return _Restarts(x, v, best, best_x, best_v, mean, lengths, spread)


def _resize(f: Map, x: Tensor, v: Tensor, value: Tensor, norm: Norm, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Makes each input longer or shorter as a whole, in ever smaller steps, where that stretches it more.

    Attention is far more sensitive to this than to anything that a single token does.
    """
    for power in (0.5, -0.5, 0.25, -0.25, 0.125, -0.125):
        resized = _within(x * 2**power, limit)
        new_value, new_v = _turns(f, resized, v, norm, num_turns=1)
        better = new_value > value
        value = new_value.where(better, value)
        x, v = resized.where(better[:, None, None], x), new_v.where(better[:, None, None], v)
    return x, v, value


def _within(x: Tensor, limit: float) -> Tensor:
    return x * (limit / token_norm(x).clamp_min(tiny(x))).clamp_max(1)[:, None, None]


def _candidates(tokens: int, features: int, scales: Tensor, generator: torch.Generator) -> Tensor:
    """Twice at every scale: two equal clusters, two unequal ones, a single one, and a cloud."""
    index = torch.arange(tokens, device=scales.device)
    signs = torch.stack([1 - 2 * (index % 2), 1 - 2 * (index % 3 == 0).long(), index * 0 + 1, index * 0])
    signs[:, -1] = 0  # the token at the origin is the last one, which sees the others under a causal mask too
    blur = scales.new_tensor([0.01, 0.01, 0.01, 1 / math.sqrt(features)])[:, None, None]
    draws = noise((2, len(scales), 4, tokens + 1, features), scales, generator)
    x = signs.unsqueeze(-1) * unit(draws[..., :1, :]) + blur * draws[..., 1:, :]
    return (x * scales[:, None, None, None]).flatten(0, 2)


def _turns(
    f: Map, x: Tensor, v: Tensor, norm: Norm, num_turns: int = 2, tolerance: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The stretch of each x along a direction that has had so many turns, or all that gain, and this direction."""
    output, pull = vjp(f, x)[:2]
    value = x.new_zeros(len(x))
    for _ in range(num_turns):
        (w,) = pull(attaining(jvp(f, (x,), (v,))[1], norm))
        v = directions(w, norm)
        last, value = value, (v * w).sum((-2, -1))
        if tolerance and (value <= last * (1 + tolerance)).all():
            break
    fine = (value + output.sum((-2, -1))).isfinite()
    return value.where(fine, -math.inf), v
