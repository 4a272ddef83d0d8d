"""What transforms that are written once for both directions share."""

from __future__ import annotations

import itertools

import torch
from jaxtyping import Float
from nflows.transforms.base import InverseTransform, Transform
from torch import Tensor
from torch.func import functional_call


class TwoWayTransform(Transform):
    """A transform of tokens whose two directions are one method of the subclass, `_map`.

    In a model of half precision all is computed in float32, with the parameters taken there: in half precision there
    are no determinants, and the two directions would not see the same tokens.
    """

    #: Width of the features in the context that are read; None where none are.
    context_features: int | None = None

    #: Whether forward passes may set parameters. They then run in the type of these, since copies would be set instead.
    learns_from_first_batch: bool = False

    def forward(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        if _is_half(inputs) and not self.learns_from_first_batch:
            return _in_single(self, inputs, context)
        return self._map(inputs, context, inverse=False)

    def inverse(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        if _is_half(inputs):
            return _in_single(InverseTransform(self), inputs, context)
        return self._map(inputs, context, inverse=True)

    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        """The outputs, and the log-determinant of the direction taken."""
        raise NotImplementedError


def _is_half(inputs: Tensor) -> bool:
    """Whether the model was moved to half precision; autocast is dealt with by `full_precision`."""
    return inputs.dtype in (torch.float16, torch.bfloat16) and not torch.is_autocast_enabled(inputs.device.type)


def _in_single(transform: Transform, inputs: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """Calls a transform with all its numbers in single precision, such that gradients reach the originals."""
    named = itertools.chain(transform.named_parameters(), transform.named_buffers())
    single = {name: tensor.float() for name, tensor in named if tensor.is_floating_point()}
    if context is not None and context.is_floating_point():
        context = context.float()
    outputs, logabsdet = functional_call(transform, single, (inputs.float(), context))
    return outputs.to(inputs.dtype), logabsdet
