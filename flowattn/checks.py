"""Refuses wrong input, in words: the argument, the rule and the value. And keeps autocast out where it would harm."""

from __future__ import annotations

import contextlib
import math
import operator
from typing import Any

import torch
from torch import Tensor, nn


def can_look(*tensors: Tensor) -> bool:
    """Whether values may be looked at: not while torch.compile or a transform of torch.func is tracing.

    Of tensors that are given it also says whether they have values of their own, which neither those on no device have
    nor those that stand for many, in gradients that are taken with `is_grads_batched`.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(
        type(t) in (Tensor, nn.Parameter)
        and t.device.type != "meta"
        and not torch._C._functorch.is_legacy_batchedtensor(t)
        for t in tensors
    )


def is_traced() -> bool:
    """Whether operations are recorded together with the memory that they find, by torch.jit or make_fx."""
    return torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """Whether tensors may carry tangents of torch.autograd.forward_ad."""
    return torch.autograd.forward_ad._current_level >= 0


def nothing_is_recorded() -> bool:
    """Whether no derivative of any kind is being taken, so that a plain call does what an autograd Function would."""
    return not torch.is_grad_enabled() and can_look() and not in_forward_mode()


def without_autocast(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast on the device of a tensor: a bound that is rounded is none."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def check_positive(**sizes: int) -> None:
    """Raises unless every named size is a whole number of at least 1, of Python or of numpy."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or operator.index(size) < 1:
            raise ValueError(f"{name} must be a whole number of at least 1; got {name}={size!r}.")


def check_positive_number(**numbers: float) -> None:
    """Raises unless every named number is above zero and finite."""
    for name, number in numbers.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be a positive number; got {name}={number!r}.")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {name}={value!r}.")


def check_tokens(name: str, x: Tensor, features: int) -> None:
    """Raises unless x is a batch of sequences of tokens with so many features."""
    if x.ndim != 3 or x.shape[-1] != features:
        raise ValueError(f"{name} must have shape [batch, tokens, {features}]; got {list(x.shape)}.")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be of a floating-point type; got {x.dtype}.")


def check_mask(mask: Tensor, x: Tensor) -> None:
    """Raises unless the mask is boolean with one entry per token of x."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, True at real tokens; got dtype {mask.dtype}.")
    if mask.shape != x.shape[:2]:
        raise ValueError(f"mask must have shape [batch, tokens] = {list(x.shape[:2])}; got {list(mask.shape)}.")


def check_context(context: Tensor | None, x: Tensor, context_features: int | None) -> None:
    """Raises unless the context is as wide as was announced, one row per sequence or per token of x."""
    if context is None:
        if context_features is not None:
            raise ValueError(f"context is missing: it must have context_features={context_features} columns.")
        return
    if context_features is None:
        raise ValueError("context must be None, because context_features was not given; got a tensor.")
    fits = (
        context.ndim in (2, 3)
        and context.shape[-1] == context_features
        and context.shape[:-1] in (x.shape[:1], x.shape[:2], (len(x), 1))
    )
    if not fits:
        raise ValueError(
            f"context must have shape [batch, {context_features}] or [batch, tokens, {context_features}] with "
            f"[batch, tokens] = {list(x.shape[:2])}; got {list(context.shape)}."
        )


def check_finite(name: str, x: Tensor) -> None:
    """Raises at the first value that is infinite or not a number."""
    if not can_look():
        return
    if math.isfinite(x.detach().sum().item()):  # one pass; a sum that overflows is looked at again
        return
    bad = ~torch.isfinite(x.detach())
    if bad.any():
        index = bad.nonzero()[0].tolist()
        raise ValueError(f"{name} must be finite; got {x[tuple(index)].item()} at index {index}.")
