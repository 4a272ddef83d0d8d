"""Keeps what nobody would read from being dropped in silence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NoFeatures(nn.Module):
    """The embedding net of a flow in which nothing reads features: masks pass, features are refused.

    Example:
        >>> NoFeatures()(torch.tensor([[True, False]]))
        tensor([[ True, False]])
    """

    def forward(self, context: Tensor | None) -> Tensor | None:
        if context is not None and context.dtype != torch.bool:
            raise ValueError(
                "context must be None or a mask, which is boolean, because nothing in this flow reads features: it has "
                f"no context_features; got {context.dtype} of shape {list(context.shape)}."
            )
        return context
