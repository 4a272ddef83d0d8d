"""Context: which tokens are real, and what a flow is conditioned on, in the one tensor that nflows hands around.

nflows passes the same `context` to every transform and to the base distribution, and wants one tensor or None. All
of ours read it by this table, and only through this module:

| context | type | meaning |
|---|---|---|
| None | | every token is real; nothing to condition on |
| [B, N] | bool | the mask: True at real tokens, False at padding |
| [B, C] | float | features of each sequence; every token is real |
| [B, N, C] | float | features of each token; a row that is -inf throughout marks padding |

So `pack_context(features, mask)` says both in a plain tensor, which survives indexing, repeating, stacking and moves
between devices. `split_context` undoes it. Padding may hold any value, NaN included: it is never read, passes through
every transform unchanged, and counts in no log-determinant and no log-probability. A transform that was not made for
features leaves them to others; a flow of ours in which nothing reads them refuses them. An `embedding_net` of an nflows
Flow sees the packed tensor; it must leave the -inf rows as they are, so embed the features first and pack then.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from flowattn.checks import can_look, check_finite, check_mask

__all__ = [
    "keep_padding",
    "pack_context",
    "per_token",
    "refuse_mask",
    "split_context",
    "sum_over_tokens",
    "zero_padding",
]


def pack_context(
    features: Float[Tensor, "batch *tokens width"] | None = None,
    mask: Bool[Tensor, "batch tokens"] | None = None,
) -> Tensor | None:
    """The context that says both: features of each sequence or token, and which tokens are real.

    Example:
        >>> mask = torch.tensor([[True, True, False]])
        >>> pack_context(torch.tensor([[5.0, 7.0]]), mask)
        tensor([[[5., 7.],
                 [5., 7.],
                 [-inf, -inf]]])
    """
    if mask is not None:
        if mask.dtype != torch.bool or mask.ndim != 2:
            raise ValueError(
                f"mask must be boolean of shape [batch, tokens]; got {mask.dtype} of shape {list(mask.shape)}."
            )
        if features is None:
            return mask
    if features is None:
        return None
    _check_type("features", features)
    if mask is None:
        check_finite("features", features)
        return features
    if features.shape[:-1] not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"features must have shape [batch, width] or [batch, tokens, width] with "
            f"[batch, tokens] = {list(mask.shape)} as in the mask; got {list(features.shape)}."
        )
    if features.ndim == 2:
        features = features.unsqueeze(1).expand(-1, mask.shape[1], -1)
    padding = ~mask.unsqueeze(-1)
    check_finite("features", features.masked_fill(padding, 0))
    return features.masked_fill(padding, -torch.inf)


def split_context(
    context: Tensor | None, inputs: Shaped[Tensor, "batch tokens _"]
) -> tuple[Float[Tensor, "batch *tokens width"] | None, Bool[Tensor, "batch tokens"] | None]:
    """The features and the mask in the context of so many inputs.

    Features of padding are zero. The mask is None when nothing is padded, unless it was given as a mask; while
    torch.compile or torch.func traces, features of tokens always come with a mask, because nobody may look.

    Example:
        >>> context = torch.tensor([[[5.0], [-torch.inf]]])
        >>> split_context(context, torch.zeros(1, 2, 3))
        (tensor([[[5.],
                 [0.]]]), tensor([[ True, False]]))
    """
    if inputs.ndim != 3:
        raise ValueError(f"inputs must have shape [batch, tokens, features]; got {list(inputs.shape)}.")
    if context is None:
        return None, None
    if context.dtype == torch.bool:
        check_mask(context, inputs)
        return None, context
    _check_type("context", context)
    if context.shape[:-1] not in (inputs.shape[:1], inputs.shape[:2]):
        raise ValueError(
            f"context must be a mask [batch, tokens], or features [batch, width] or [batch, tokens, width], with "
            f"[batch, tokens] = {list(inputs.shape[:2])}; got {list(context.shape)}."
        )
    if context.ndim == 2:
        check_finite("context", context)
        return context, None
    if can_look() and torch.isfinite(context.detach().sum()):  # the usual case, in one pass
        return context, None
    padding = (context == -torch.inf).all(-1)
    features = context.masked_fill(padding.unsqueeze(-1), 0)
    if can_look():
        bad = ~torch.isfinite(features.detach())
        if bad.any():
            index = bad.nonzero()[0].tolist()
            raise ValueError(
                f"context must be finite, or -inf throughout the row of a padded token; "
                f"got {features[tuple(index)].item()} at index {index}."
            )
        if not padding.any():  # finite all along, but for its sum
            return context, None
    return features, ~padding


def refuse_mask(mask: Bool[Tensor, "batch tokens"] | None, context: Tensor | None) -> None:
    """Raises at the mask of a context, on behalf of what has no use for padding.

    Where values cannot be looked at, features of tokens have a mask always, and may have no padding all the same.
    """
    if mask is not None and context is not None and (can_look() or context.dtype == torch.bool):
        raise ValueError(f"context must hold no mask, since there is no padding here; got one of {list(mask.shape)}.")


def per_token(
    features: Float[Tensor, "batch *tokens width"], inputs: Shaped[Tensor, "batch tokens _"]
) -> Float[Tensor, "batch tokens width"]:
    """The features of each token: those of the sequence for all of its tokens, unless they have their own."""
    return features if features.ndim == 3 else features.unsqueeze(1).expand(-1, inputs.shape[1], -1)


def zero_padding(
    x: Shaped[Tensor, "batch tokens *rest"], mask: Bool[Tensor, "batch tokens"] | None
) -> Shaped[Tensor, "batch tokens *rest"]:
    """Zeros in place of padding, whatever it held, and no gradient to it."""
    return x if mask is None else x.masked_fill(_broadcast(~mask, x), 0)


def keep_padding(
    outputs: Shaped[Tensor, "batch tokens *rest"],
    inputs: Shaped[Tensor, "batch tokens *rest"],
    mask: Bool[Tensor, "batch tokens"] | None,
) -> Shaped[Tensor, "batch tokens *rest"]:
    """The outputs at real tokens, the inputs at padding."""
    return outputs if mask is None else torch.where(_broadcast(mask, outputs), outputs, inputs)


def sum_over_tokens(
    values: Float[Tensor, "batch tokens *rest"], mask: Bool[Tensor, "batch tokens"] | None
) -> Float[Tensor, " batch"]:
    """The sum of all values of the real tokens, added up in at least float32.

    Example:
        >>> sum_over_tokens(torch.tensor([[1.0, 2.0, torch.nan]]), torch.tensor([[True, True, False]]))
        tensor([3.])
    """
    return zero_padding(values, mask).flatten(1).sum(1, dtype=torch.promote_types(values.dtype, torch.float32))


def _broadcast(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(mask.shape + (1,) * (x.ndim - 2))


def _check_type(name: str, features: Tensor) -> None:
    if not features.is_floating_point():
        raise ValueError(
            f"{name} must be floating-point features or a boolean mask; got {features.dtype} of shape "
            f"{list(features.shape)}."
        )
    if features.ndim not in (2, 3) or features.shape[-1] == 0:
        raise ValueError(
            f"{name} must have shape [batch, width] or [batch, tokens, width], at least one wide; "
            f"got {list(features.shape)}."
        )
