"""How far a run is, and what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import TQDMProgressBar
from rich.console import Console


class Bar(TQDMProgressBar):
    """Lightning's bar without the version of a logger, which is none of the user's concern."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


def tell(paths: list[Path]) -> None:
    """Says what was written."""
    for path in paths:
        Console().print(f"wrote {path}", highlight=False, soft_wrap=True)
