r"""Measured lower bounds of Lipschitz constants: how far a map stretches at a given input.

.. math:: \|J(X)\| = \sup_{\|V\| \le 1} \|J(X) V\|, \qquad \operatorname{Lip}(f) = \sup_X \|J(X)\|

A proven bound says that no input is stretched more. What is measured here says that some input is stretched this
much, so the two enclose the constant. A map is any callable of tokens [B, N, D] that treats the sequences of a batch
one by one and that `torch.func` can differentiate.

References:
    | Estimating the matrix p-norm (Higham, 1992)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowattn.checks import check_finite, check_positive
from flowattn.lipschitz.norms import Norm, check_norm

Map = Callable[[Tensor], Tensor]
Measure = TypeVar("Measure", bound=Callable[..., Any])

_DENSE = 2**20  # entries of a Jacobian that is small enough to be written down
_AT_ONCE = 2**15  # numbers in a stack of gradients that is small enough for a cache


def in_differentiable_steps(measure: Measure) -> Measure:
    """Measures f, or, where torch fused its attention and left out derivatives, f in steps."""

    @functools.wraps(measure)
    def measured(f: Map, *args: Any, **kwargs: Any) -> Any:
        try:
            return measure(f, *args, **kwargs)
        except NotImplementedError:
            pass

        def in_steps(x: Tensor) -> Tensor:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # under no_grad torch fuses its encoders as a whole
                return f(x)

        try:
            return measure(in_steps, *args, **kwargs)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"f must be made of operations that torch.func.jvp can differentiate; got {type(f).__name__}, "
                f"of which torch says: {str(error).splitlines()[0]}"
            ) from error

    return measured  # type: ignore[return-value]


@torch.no_grad()
@in_differentiable_steps
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
    Turns end when what is still to be gained, judged by the last gains, is below `tolerance` of the value for every
    sequence, or after `max_steps`. `generator` draws the starts; without it they are always the same.

    A contraction with a closed form of its Jacobian is asked for it, while it is small.

    Cost: the gradients of all outputs; for larger J of N + num_starts D, or of 2 num_starts a turn for "2".

    Example:
        >>> local_lipschitz(lambda x: 3 * x.flip(-2), torch.zeros(1, 4, 2)).round(decimals=4)
        tensor([3.])
    """
    check_norm(norm)
    check_positive(num_starts=num_starts, max_steps=max_steps)
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1; got tolerance={tolerance}.")
    if x.ndim != 3 or not x.numel():
        raise ValueError(f"x must have shape [batch, tokens, features] and not be empty; got {list(x.shape)}.")
    check_finite("x", x)
    return operator_norm(f, x.detach(), norm, Effort(seeded(generator), num_starts, max_steps, tolerance))


class Effort(NamedTuple):
    generator: torch.Generator
    num_starts: int = 8
    max_steps: int = 200
    tolerance: float = 1e-6

    def is_enough(self, best: Tensor, gain: Tensor, last: Tensor) -> bool:
        # Gains shrink like a geometric series, whose rest is gain / (1 - gain / last).
        return bool((gain * last <= self.tolerance * best * (last - gain)).all())


def operator_norm(f: Map, x: Tensor, norm: Norm, effort: Effort) -> Tensor:
    square = x[0].numel() ** 2
    if square <= _DENSE < len(x) * square / 4:
        return torch.cat([operator_norm(f, part, norm, effort) for part in x.split(4 * _DENSE // square)])
    jacobian = _Jacobian(f, x, norm)
    small = x[0].numel() * jacobian.value[0].numel() <= _DENSE
    if norm == "2" and not small:
        return _subspace_norm(jacobian, effort)
    rows = jacobian.all_rows() if small else jacobian.rows(_promising_rows(jacobian, effort))
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
        self._whole: Tensor | None = None
        # The general form that every contraction inherits is one of autograd, and larger than ours.
        if x[0].numel() ** 2 <= _DENSE and "free_jacobian" in vars(type(f)):
            y, self._whole = f.forward_and_jacobian(x)  # type: ignore[attr-defined]
        else:
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
        u = u.reshape(-1, *self.shape)
        w = vmap(self._pull, chunk_size=self.at_once if len(u) > self.at_once else None)(u)[0]
        check_finite("the derivative of f", w)
        return _as_tokens(w, self.norm)

    def all_rows(self) -> Tensor:
        """The blocks of all tokens, as `rows` has them."""
        if self._whole is None:
            return self.rows(torch.arange(self.value.shape[1], device=self.x.device)[:, None].expand(-1, len(self.x)))
        check_finite("the derivative of f", self._whole)
        return self._whole.to(self.x.dtype).reshape(*self.value.shape, -1)

    def rows(self, index: Tensor) -> Tensor:
        """The blocks J_i of the tokens i in `index` [rows, batch], as [batch, rows, features, inputs]."""
        tokens, features = self.value.shape[1:]
        u = F.one_hot(index, tokens)[:, None, :, :, None] * torch.eye(features, device=index.device)[:, None, None]
        return self.pull(u.to(self.x.dtype)).unflatten(0, u.shape[:2]).movedim(2, 0).flatten(-2)


def _rows_norm(J: Tensor, effort: Effort) -> Tensor:
    """The largest norm of the blocks J_i of rows, [batch, rows, features, tokens, inputs]."""
    tokens, J = J.shape[-2:], J.flatten(-2)
    scalar = J.shape[2] == 1  # then u is 1 or -1, and there is nothing to ascend
    u = unit(noise((*J.shape[:2], 1 if scalar else effort.num_starts, J.shape[2]), J, effort.generator))
    best = gain = J.new_zeros(len(J))
    for step in range(effort.max_steps):
        w = (u @ J).unflatten(-1, tokens)
        lengths = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
        if step % 4 == 0 or step == effort.max_steps - 1:  # a look costs as much as a turn
            value = lengths.sum((-2, -1))
            last, gain = gain, value.amax((1, 2)) - best
            best = best + gain.clamp_min(0)
            if scalar or (step > 4 and effort.is_enough(best, gain, last)):
                break
        u = unit((w / lengths.clamp_min(tiny(w))).flatten(-2) @ J.mT)
        if step == 4:  # the best rows stay
            top = value.amax(2).topk(min(J.shape[1], effort.num_starts)).indices[..., None, None]
            J, u = J.take_along_dim(top, 1), u.take_along_dim(top, 1)
        if step == 8:  # and in each of them its best start
            u = u.take_along_dim(value.argmax(2)[..., None, None], 2)
    return best


def _promising_rows(jacobian: _Jacobian, effort: Effort) -> Tensor:
    """The tokens of the largest outputs, [rows, batch], each having its best of a few random directions."""
    x = _as_tokens(jacobian.x, jacobian.norm)
    y = jacobian.push(unit(noise((effort.num_starts, *x.shape), x, effort.generator)))
    longest = torch.linalg.vector_norm(y, dim=-1, keepdim=True).argmax(0, keepdim=True)
    u = unit(y.take_along_dim(longest, 0))
    one_hot = torch.eye(u.shape[2], dtype=x.dtype, device=x.device)[:, None, :, None]
    value = [
        torch.linalg.vector_norm(jacobian.pull(here * u), dim=-1).sum(-1) for here in one_hot.split(jacobian.at_once)
    ]
    return torch.cat(value).topk(min(u.shape[2], effort.num_starts), 0).indices


def _subspace_norm(jacobian: _Jacobian, effort: Effort) -> Tensor:
    """The spectral norm, from a subspace that takes in, turn by turn, the gradients of its most stretched axes."""
    x = _as_tokens(jacobian.x, "2")
    basis = _orthonormal(noise((effort.num_starts, *x.shape), x, effort.generator))
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


def attaining(y: Tensor, norm: Norm) -> Tensor:
    """The functional u of norm 1 with <u, y> = |y|."""
    rows = _as_tokens(y, norm)
    longest = torch.linalg.vector_norm(rows, dim=-1).argmax(-1)
    return (unit(rows) * F.one_hot(longest, rows.shape[-2]).unsqueeze(-1)).reshape(y.shape)


def directions(w: Tensor, norm: Norm) -> Tensor:
    """The v of norm 1 with the largest <w, v>."""
    return unit(_as_tokens(w, norm)).reshape(w.shape)


def unit(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=tiny(x))


def tiny(x: Tensor) -> float:
    """The smallest length whose square is not rounded to zero."""
    return math.sqrt(torch.finfo(x.dtype).tiny)


def noise(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def seeded(generator: torch.Generator | None) -> torch.Generator:
    return torch.Generator().manual_seed(0) if generator is None else generator
