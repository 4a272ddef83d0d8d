r"""Measured lower bounds of Lipschitz constants: at an input, and searched for over all inputs.

.. math:: \|J(X)\| = \sup_{\|V\| \le 1} \|J(X) V\|, \qquad \operatorname{Lip}(f) = \sup_X \|J(X)\|

A proven bound says that no input is stretched more. What is measured here says that some input is stretched this
much, so the two enclose the constant. A map is any callable of tokens [B, N, D] that treats the sequences of a batch
one by one and that `torch.func` can differentiate.

References:
    | Estimating the matrix p-norm (Higham, 1992)
    | Shampoo: Preconditioned Stochastic Tensor Optimization (Gupta, Koren, Singer, 2018)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp, vmap

from flowattn.checks import check_finite, check_positive
from flowattn.lipschitz.norms import Norm, check_norm, sequence_norm, token_norm

Map = Callable[[Tensor], Tensor]

_DENSE = 2**20  # entries of a Jacobian that is small enough to be written down
_AT_ONCE = 2**15  # numbers in a stack of gradients that is small enough for a cache


@torch.no_grad()
def local_lipschitz(
    f: Map,
    x: Float[Tensor, "batch tokens features"],
    norm: Norm = "token",
    *,
    num_starts: int = 8,
    max_steps: int = 200,
    tolerance: float = 1e-6,
    generator: torch.Generator | None = None,
) -> Float[Tensor, " batch"]:
    r"""The operator norm of the Jacobian of f at each sequence of a batch.

    .. math:: \|J\| = \max_i \sup_{\|v_j\| \le 1} \Bigl\| \sum_j J_{ij} v_j \Bigr\|_2
        = \max_i \sup_{\|u\| = 1} \sum_j \| J_{ij}^T u \|_2 \qquad \text{for norm="token"}

    The two sides take turns: :math:`v_j \propto J_{ij}^T u` is best for u, :math:`u \propto \sum_j J_{ij} v_j` is
    best for v, and no turn loses. Every value is attained, so the result is never too large. It is exact for "inf",
    and for "2" up to a million entries of J, above which a subspace grows by `num_starts` a turn. For
    "token" so many u ascend in each of the best so many rows i; only these rows of a larger J are written down.
    `generator` draws the starts; without it they are always the same.

    Cost: the gradients of all outputs; for larger J of N + num_starts D, or of 2 num_starts a turn for "2".

    Example:
        >>> local_lipschitz(lambda x: 3 * x.flip(-2), torch.zeros(1, 4, 2)).round(decimals=4)
        tensor([3.])
    """
    check_norm(norm)
    check_positive(num_starts=num_starts, max_steps=max_steps)
    if x.ndim != 3 or not x.numel():
        raise ValueError(f"x must have shape [batch, tokens, features] and not be empty; got {list(x.shape)}.")
    check_finite("x", x)
    return _operator_norm(f, x.detach(), norm, _Effort(_seeded(generator), num_starts, max_steps, tolerance))


class _Effort(NamedTuple):
    generator: torch.Generator
    num_starts: int = 8
    max_steps: int = 200
    tolerance: float = 1e-6

    def is_enough(self, best: Tensor, gain: Tensor, last: Tensor) -> bool:
        # Gains shrink like a geometric series, whose rest is gain / (1 - gain / last).
        return bool((gain * last <= self.tolerance * best * (last - gain)).all())


def _operator_norm(f: Map, x: Tensor, norm: Norm, effort: _Effort) -> Tensor:
    jacobian = _Jacobian(f, x, norm)
    entries = x[0].numel() * jacobian.value[0].numel()
    if entries <= _DENSE < len(x) * entries / 4:
        return torch.cat([_operator_norm(f, part, norm, effort) for part in x.split(4 * _DENSE // entries)])
    if entries <= _DENSE:
        index = torch.arange(jacobian.value.shape[1], device=x.device)[:, None].expand(-1, len(x))
    elif norm == "2":
        return _subspace_norm(jacobian, effort)
    else:
        index = _promising_rows(jacobian, effort)
    rows = jacobian.rows(index)
    if norm == "2":
        J = rows[:, 0]
        gram = J @ J.mT if J.shape[1] < J.shape[2] else J.mT @ J
        return torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt()
    return _rows_norm(rows.unflatten(-1, _as_tokens(x, norm).shape[1:]), effort)


class _Jacobian:
    """The Jacobian of f at each sequence of a batch, times stacks of directions [stack, batch, tokens, features].

    The tokens are those of the norm: see `_as_tokens`.
    """

    def __init__(self, f: Map, x: Tensor, norm: Norm) -> None:
        y, self._pull = vjp(f, x)[:2]
        if y.ndim != 3 or len(y) != len(x):
            raise ValueError(f"f must map {list(x.shape)} to [{len(x)}, tokens, features]; got {list(y.shape)}.")
        check_finite("f(x)", y)
        self.f, self.x, self.norm, self.shape = f, x, norm, y.shape
        self.value = _as_tokens(y, norm)
        self.at_once = max(1, _AT_ONCE // x.numel())

    def push(self, v: Tensor) -> Tensor:
        """J v, the stack being folded into the batch."""
        x = self.x.repeat(len(v), 1, 1)
        y = jvp(self.f, (x,), (v.reshape(x.shape),))[1]
        check_finite("the derivative of f", y)
        return _as_tokens(y, self.norm).unflatten(0, v.shape[:2])

    def pull(self, u: Tensor) -> Tensor:
        """J^T u."""
        w = vmap(self._pull, chunk_size=self.at_once)(u.reshape(-1, *self.shape))[0]
        check_finite("the derivative of f", w)
        return _as_tokens(w, self.norm)

    def rows(self, index: Tensor) -> Tensor:
        """The blocks J_i of the tokens i in `index` [rows, batch], as [batch, rows, features, inputs]."""
        tokens, features = self.value.shape[1:]
        u = F.one_hot(index, tokens)[:, None, :, :, None] * torch.eye(features, device=index.device)[:, None, None]
        return self.pull(u.to(self.x.dtype)).unflatten(0, u.shape[:2]).movedim(2, 0).flatten(-2)


def _rows_norm(J: Tensor, effort: _Effort) -> Tensor:
    """The largest norm of the blocks J_i of rows, [batch, rows, features, tokens, inputs]."""
    tokens, J = J.shape[-2:], J.flatten(-2)
    scalar = J.shape[2] == 1  # then u is 1 or -1, and there is nothing to ascend
    u = _unit(_noise((*J.shape[:2], 1 if scalar else effort.num_starts, J.shape[2]), J, effort.generator))
    best = gain = J.new_zeros(len(J))
    for step in range(effort.max_steps):
        w = (u @ J).unflatten(-1, tokens)
        lengths = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        value = lengths.sum((-2, -1))
        last, gain = gain, value.amax((1, 2)) - best
        best = best + gain.clamp_min(0)
        if scalar or (step > 2 and effort.is_enough(best, gain, last)):
            break
        u = _unit((w / lengths.clamp_min(_tiny(w))).flatten(-2) @ J.mT)
        if step == 2:  # the best rows stay
            top = value.amax(2).topk(min(J.shape[1], effort.num_starts)).indices[..., None, None]
            J, u = J.take_along_dim(top, 1), u.take_along_dim(top, 1)
        if step == 8:  # and in each of them its best start
            u = u.take_along_dim(value.argmax(2)[..., None, None], 2)
    return best


def _promising_rows(jacobian: _Jacobian, effort: _Effort) -> Tensor:
    """The tokens of the largest outputs, [rows, batch], each having its best of a few random directions."""
    x = _as_tokens(jacobian.x, jacobian.norm)
    y = jacobian.push(_unit(_noise((effort.num_starts, *x.shape), x, effort.generator)))
    longest = torch.linalg.vector_norm(y, dim=-1, keepdim=True).argmax(0, keepdim=True)
    u = _unit(y.take_along_dim(longest, 0))
    one_hot = torch.eye(u.shape[2], dtype=x.dtype, device=x.device)[:, None, :, None]
    value = [
        torch.linalg.vector_norm(jacobian.pull(here * u), dim=-1).sum(-1) for here in one_hot.split(jacobian.at_once)
    ]
    return torch.cat(value).topk(min(u.shape[2], effort.num_starts), 0).indices


def _subspace_norm(jacobian: _Jacobian, effort: _Effort) -> Tensor:
    """The spectral norm, from a subspace that takes in, turn by turn, the gradients of its most stretched axes."""
    x = _as_tokens(jacobian.x, "2")
    basis = _orthonormal(_noise((effort.num_starts, *x.shape), x, effort.generator))
    images = jacobian.push(basis)
    best = gain = x.new_zeros(len(x))
    for _ in range(effort.max_steps):
        w = jacobian.pull(_orthonormal(images)[: effort.num_starts])
        last, gain = gain, torch.linalg.vector_norm(w, dim=(-2, -1)).amax(0) - best
        best = best + gain.clamp_min(0)
        if effort.is_enough(best, gain, last):
            break
        for _ in range(2):  # twice is enough against rounding
            known = torch.einsum("kbij,sbij->skb", basis, w)
            w = _orthonormal(w - torch.einsum("skb,kbij->sbij", known, basis))
        basis, images = torch.cat([basis, w]), torch.cat([images, jacobian.push(w)])
    return best


def _orthonormal(stack: Tensor) -> Tensor:
    """The principal axes of what a stack spans, in order, and zeros for those that it does not span."""
    _, lengths, axes = torch.linalg.svd(stack.squeeze(2).transpose(0, 1), full_matrices=False)
    spanned = lengths > math.sqrt(torch.finfo(stack.dtype).eps) * lengths[:, :1]
    return (axes * spanned.unsqueeze(-1)).transpose(0, 1).unsqueeze(2)


def _as_tokens(x: Tensor, norm: Norm) -> Tensor:
    """Makes each norm a token norm: for "inf" every entry is a token, for "2" all entries are one."""
    if norm == "token":
        return x
    return x.flatten(-2).unsqueeze(-1 if norm == "inf" else -2)


def _attaining(y: Tensor, norm: Norm) -> Tensor:
    """The functional u of norm 1 with <u, y> = |y|."""
    rows = _as_tokens(y, norm)
    longest = torch.linalg.vector_norm(rows, dim=-1).argmax(-1)
    return (_unit(rows) * F.one_hot(longest, rows.shape[-2]).unsqueeze(-1)).reshape(y.shape)


def _directions(w: Tensor, norm: Norm) -> Tensor:
    """The v of norm 1 with the largest <w, v>."""
    return _unit(_as_tokens(w, norm)).reshape(w.shape)


def _unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=_tiny(x))


def _tiny(x: Tensor) -> float:
    """The smallest length whose square is not rounded to zero."""
    return math.sqrt(torch.finfo(x.dtype).tiny)


def _noise(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def _seeded(generator: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(0) if generator is None else generator


class LipschitzSearch(NamedTuple):
    """What `search_lipschitz` found: a lower bound, the input that attains it, and the best after each step."""

    constant: float
    x: Float[Tensor, "tokens features"]
    history: list[float]


@torch.no_grad()
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
    others in one or two clusters around it. The best of them and those in `start`, `num_restarts` in all, ascend in
    X by gradients and in V by the turns of `local_lipschitz`; the weaker ones drop out on the way. Steps are relative
    to the size of X and whitened over features, so neither the scale of f nor a linear map before it matters. A
    restart that meets an infinite derivative goes back to its best point. A map without second derivatives, such as
    a ReLU network, has no way up: of it the candidates are measured. Search in float64 where f allows it, for far
    from the origin rounding can pass for stretch.

    Cost: about 8 num_restarts + 4 num_steps derivatives of derivatives.

    Example:
        >>> found = search_lipschitz(torch.sin, (3, 2))
        >>> f"{found.constant:.3f}"
        '1.000'
    """
    check_norm(norm)
    check_positive(tokens=shape[0], features=shape[1], num_restarts=num_restarts, num_steps=num_steps)
    if not scales or not all(0 < scale < math.inf for scale in scales):
        raise ValueError(f"scales must be positive and finite, and at least one; got scales={tuple(scales)}.")
    if start is not None and start.shape[-2:] != shape:
        raise ValueError(f"start must have shape [..., {shape[0]}, {shape[1]}]; got {list(start.shape)}.")
    generator = _seeded(generator)
    like = torch.empty(0, dtype=dtype, device=device) if start is None else start.detach().to(device, dtype)
    given = like.reshape(-1, *shape)
    x = torch.cat([given, _candidates(*shape, like.new_tensor(scales), generator)])
    v = _directions(_noise(x.shape, like, generator), norm)
    scan = [_two_turns(f, *part, norm) for part in zip(x.split(num_restarts), v.split(num_restarts), strict=True)]
    value, v = (torch.cat(parts) for parts in zip(*scan, strict=True))
    rank = value.clone()
    rank[: len(given)].masked_fill_(value[: len(given)].isfinite(), math.inf)
    chosen = rank.topk(min(num_restarts, len(rank))).indices
    chosen = chosen[value[chosen].isfinite()]
    if not len(chosen):
        raise ValueError(f"f must have finite derivatives somewhere; got none at {len(x)} inputs of all scales.")
    x = x[chosen]
    restarts = _Restarts(x, v[chosen], value[chosen], x, x * 0, x[..., :1] * 0, x.mT @ x * 0)
    history = []
    for step in range(num_steps):
        rate = learning_rate * (1 - step / num_steps)
        restarts = _ascend(f, restarts, norm, rate, 2 * max(scales), step).best_few(num_restarts * 8 // (9 + step))
        history.append(restarts.best[0].item())
        if progress and (step + 1) % max(1, num_steps // 10) == 0:
            print(f"step {step + 1}: {history[-1]:.6g}, {len(restarts.x)} restarts", file=sys.stderr)
    finalists = restarts.best_few(1)
    best = finalists.best.fmax(_operator_norm(f, finalists.best_x, norm, _Effort(generator)))
    return LipschitzSearch(best.amax().item(), finalists.best_x[best.argmax()], history)


class _Restarts(NamedTuple):
    """Inputs on their way up, with their directions, their best so far, and the moments of their gradients."""

    x: Tensor
    v: Tensor
    best: Tensor
    best_x: Tensor
    mean: Tensor
    lengths: Tensor
    spread: Tensor

    def best_few(self, num: int) -> _Restarts:
        """The best of the restarts, in order, and never fewer than four."""
        keep = self.best.topk(min(len(self.x), max(4, num))).indices
        return _Restarts(*(part[keep] for part in self))


def _ascend(f: Map, restarts: _Restarts, norm: Norm, rate: float, limit: float, step: int) -> _Restarts:
    """One turn in v, and in x one step of Adam with second moments per token and, as a matrix, over features."""
    x, v, best, best_x, mean, lengths, spread = restarts
    y, pull, output = vjp(lambda x, v: jvp(f, (x,), (v,))[::-1], x, v, has_aux=True)  # type: ignore[misc]
    value = sequence_norm(y, norm)
    slope, w = pull(_attaining(y, norm))
    size = torch.linalg.vector_norm(x, dim=-1).mean(-1)[:, None, None]
    slope = slope * size / value.clamp_min(_tiny(x))[:, None, None]
    fine = (value + (slope + w).sum((-2, -1)) + output.sum((-2, -1))).isfinite()
    better, fine = fine & (value > best), fine[:, None, None]
    best, best_x = value.where(better, best), x.where(better[:, None, None], best_x)
    slope = slope.where(fine, 0)
    average = 1 / (step + 1)  # of all steps at first, so that the moments need not start from zero
    mean = mean.lerp(slope, max(0.2, average))
    lengths = lengths.lerp(slope.square().sum(-1, keepdim=True), max(0.05, average))
    scale = lengths.sqrt()
    scale = scale + 0.01 * scale.amax(1, keepdim=True) + _tiny(x)  # a token that does not matter shall not wander
    spread = spread.lerp((slope / scale).mT @ (slope / scale), max(0.05, average))
    values, vectors = torch.linalg.eigh(spread * (x.shape[2] / x.shape[1]))
    whiten = vectors / (values.clamp_min(1e-4 * values[:, -1:]) + _tiny(x)).sqrt().unsqueeze(-2) @ vectors.mT
    x = x + rate * size * (mean / scale) @ whiten
    x = x * (limit / token_norm(x).clamp_min(_tiny(x))).clamp_max(1)[:, None, None]
    x, v = x.where(fine, best_x), _directions(w, norm).where(fine, v)
    return _Restarts(x, v, best, best_x, mean, lengths, spread)


def _candidates(tokens: int, features: int, scales: Tensor, generator: torch.Generator) -> Tensor:
    """Twice at every scale: two equal clusters, two unequal ones, a single one, and a cloud."""
    index = torch.arange(tokens, device=scales.device)
    signs = torch.stack([1 - 2 * (index % 2), 1 - 2 * (index % 3 == 0).long(), index * 0 + 1, index * 0])
    signs[:, -1] = 0  # the token at the origin is the last one, which sees the others under a causal mask too
    blur = scales.new_tensor([0.01, 0.01, 0.01, 1 / math.sqrt(features)])[:, None, None]
    noise = _noise((2, len(scales), 4, tokens + 1, features), scales, generator)
    x = signs.unsqueeze(-1) * _unit(noise[..., :1, :]) + blur * noise[..., 1:, :]
    return (x * scales[:, None, None, None]).flatten(0, 2)


def _two_turns(f: Map, x: Tensor, v: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    output, pull = vjp(f, x)[:2]
    for _ in range(2):
        (w,) = pull(_attaining(jvp(f, (x,), (v,))[1], norm))
        v = _directions(w, norm)
    value = (v * w).sum((-2, -1))
    fine = (value + output.sum((-2, -1))).isfinite()
    return value.where(fine, -math.inf), v
