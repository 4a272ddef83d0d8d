"""Exact log-determinants in place of estimates, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from flowattn.logdet import ExactLogDet
from flowattn.transforms import ResidualTransform


@contextmanager
def exact_logdets(module: nn.Module) -> Iterator[None]:
    """Lets every residual block of a module compute its log-determinant exactly, whatever it was trained with.

    Example:
        >>> from flowattn.flows import AttentionFlow
        >>> from flowattn.logdet import RussianRoulette
        >>> flow = AttentionFlow((3, 2), depth=1, num_heads=2, logdet=RussianRoulette())
        >>> with exact_logdets(flow):
        ...     print(flow._transform._transforms[2].logdet)
        ExactLogDet()
    """
    blocks = [part for part in module.modules() if isinstance(part, ResidualTransform)]
    before = [block.logdet for block in blocks]
    for block in blocks:
        block.logdet = ExactLogDet()
    try:
        yield
    finally:
        for block, logdet in zip(blocks, before, strict=True):
            block.logdet = logdet
