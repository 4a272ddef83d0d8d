"""Position biases: what attention adds to its logits for the distance of two tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PositionBias(nn.Module):
    r"""One bias per head and relative position, :math:`b_{ij} = t_h(i - j)`.

    Learned tables start as ALiBi-like slopes :math:`-2^{-h} |i - j|` with -1 on the token itself: tied queries and
    keys cannot look one step back by themselves. Fixed ones are ALiBi's, with slopes :math:`2^{-8 h / H}`, which
    know no longest sequence.

    References:
        | Train Short, Test Long: Attention with Linear Biases (Press, Smith, Lewis, 2022)
    """

    slopes: Tensor

    def __init__(self, num_heads: int, *, max_tokens: int | None = None, learned: bool = False) -> None:
        super().__init__()
        heads = torch.arange(1, num_heads + 1)
        self.table: nn.Parameter | None = None
        if learned:
            if max_tokens is None:
                raise ValueError("position_bias='learned' needs max_tokens, the longest sequence it has a table for.")
            distance = torch.arange(1 - max_tokens, max_tokens).abs()
            start = -distance * 2.0 ** (-heads.unsqueeze(1).to(torch.get_default_dtype()))
            start[:, max_tokens - 1] = -1.0
            self.table = nn.Parameter(start)
        else:
            self.register_buffer("slopes", 2.0 ** (-8 * heads / num_heads), persistent=False)

    def forward(self, num_tokens: int) -> Tensor:
        """The biases [H, N, N]."""
        if self.table is None:
            position = torch.arange(num_tokens, device=self.slopes.device)
            return -self.slopes[:, None, None] * (position.unsqueeze(1) - position).abs()
        position = torch.arange(num_tokens, device=self.table.device)
        middle = self.table.shape[1] // 2
        return self.table[:, position.unsqueeze(1) - position + middle]
