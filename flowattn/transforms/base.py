"""What transforms that are written once for both directions share."""

from __future__ import annotations

from jaxtyping import Float
from nflows.transforms.base import Transform
from torch import Tensor


class TwoWayTransform(Transform):
    """A transform of tokens whose two directions are one method of the subclass, `_map`."""

    def forward(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        return self._map(inputs, context, inverse=False)

    def inverse(
        self, inputs: Float[Tensor, "batch tokens features"], context: Tensor | None = None
    ) -> tuple[Float[Tensor, "batch tokens features"], Float[Tensor, " batch"]]:
        return self._map(inputs, context, inverse=True)

    def _map(self, inputs: Tensor, context: Tensor | None, *, inverse: bool) -> tuple[Tensor, Tensor]:
        """The outputs, and the log-determinant of the direction taken."""
        raise NotImplementedError
