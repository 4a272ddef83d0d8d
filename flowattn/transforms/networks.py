"""Networks of vectors, for what has no bound to keep."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForwardNetwork(nn.Sequential):
    """Linear layers and activations in turn, computed at inner widths that are multiples of eight.

    Products of matrices of other widths take up to a fifth longer. So zeros are appended to the weights in each call;
    what activations make of them is multiplied by zeros in the next layer.

    Example:
        >>> import torch
        >>> FeedForwardNetwork(nn.Linear(2, 99), nn.GELU(), nn.Linear(99, 3))(torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """

    def forward(self, x: Tensor) -> Tensor:
        before = 0
        for layer in self:
            if not isinstance(layer, nn.Linear):
                x = layer(x)
                continue
            inner = layer is not self[-1] and layer.out_features > 64  # narrow ones are not worth it
            after = -layer.out_features % 8 if inner else 0
            if before or after:
                x = F.linear(x, F.pad(layer.weight, (0, before, 0, after)), F.pad(layer.bias, (0, after)))
            else:
                x = layer(x)
            before = after
        return x
