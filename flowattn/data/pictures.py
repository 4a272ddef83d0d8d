"""Pictures of sequences beside samples, on no screen and without matplotlib's global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.context import split_context
from flowattn.data.batch import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sequences(
    data: Batch, samples: Float[Tensor, "samples tokens features"], num_sequences: int = 5, num_features: int = 6
) -> Figure:
    """Some sequences over time, a row for each feature: data on the left, samples on the right, on one scale.

    Padding is left out, and so are values that are not finite.
    """
    from matplotlib.figure import Figure

    _, mask = split_context(data.context, data.inputs)
    inputs = data.inputs if mask is None else data.inputs.masked_fill(~mask.unsqueeze(-1), torch.nan)
    columns = {"data": inputs, "samples": samples}
    rows = min(inputs.shape[2], num_features)
    figure = Figure(figsize=(8, 1.2 + 1.3 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, sharex=True, sharey="row", squeeze=False)
    for column, (name, sequences) in enumerate(columns.items()):
        values = sequences[:num_sequences].detach().float().cpu()
        for feature in range(rows):
            axes[feature, column].plot(values[:, :, feature].T.numpy(), linewidth=0.9)
        axes[0, column].set_title(name)
        axes[-1, column].set_xlabel("token")
    for feature in range(rows):
        axes[feature, 0].set_ylabel(f"feature {feature}")
    return figure
