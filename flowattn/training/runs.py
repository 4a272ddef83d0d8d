"""The folder of a run: what is kept in it when a training starts, and what was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.cli import SaveConfigCallback
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from rich.console import Console


class SaveConfig(SaveConfigCallback):
    """Keeps the whole config of a training as `config.yaml` in the run's folder, once it has all it needs to start."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        pass

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, folder / "config.yaml", skip_none=False, overwrite=True, multifile=False)


class NewRun(Callback):
    """Leaves an earlier run of the same name in its place until the new one has its batches and its optimiser.

    Loggers write as soon as there is a model, so they are kept away until then.

    Args:
        trainer: of the new run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.loggers = trainer.loggers
        trainer.loggers = [_Waiting(trainer.default_root_dir) for _ in self.loggers]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.setup_data()  # would be next, and may fail
        move_aside(Path(trainer.default_root_dir))
        trainer.loggers = self.loggers


class _Waiting(DummyLogger):
    """In the place of a logger: writes nothing, and says in which folder that one will."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return self.folder


@rank_zero_only
def move_aside(folder: Path) -> None:
    """Keeps an earlier run of the same name, with a number behind it."""
    if not (folder / "checkpoints").is_dir():
        return
    number = 1
    while (other := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    folder.rename(other)
    Console().print(
        f"An earlier run is now {other}; --ckpt_path last would have gone on with it.", highlight=False, soft_wrap=True
    )
