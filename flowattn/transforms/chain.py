"""One transform after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from nflows.transforms import CompositeTransform
from torch import Tensor


class Chain(CompositeTransform):
    r"""Transforms in a row, with their log-determinants added up in at least float32, which nflows' own does not do.

    .. math:: y = T_K(\dots T_1(x)), \qquad \log|\det J| = \sum_k \log|\det J_k|

    Example:
        >>> from flowattn.transforms import FeedForwardCoupling, TokenActNorm
        >>> chain = Chain([TokenActNorm(4), FeedForwardCoupling(4, hidden=8)]).bfloat16()
        >>> chain(torch.randn(2, 5, 4, dtype=torch.bfloat16))[1].dtype
        torch.float32
    """

    @staticmethod
    def _cascade(inputs: Tensor, funcs: Iterable[Callable[..., Any]], context: Tensor | None) -> tuple[Tensor, Tensor]:
        outputs = inputs
        total = inputs.new_zeros(len(inputs), dtype=torch.promote_types(inputs.dtype, torch.float32))
        for func in funcs:
            outputs, logabsdet = func(outputs, context)
            total = total + logabsdet
        return outputs, total
