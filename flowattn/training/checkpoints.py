"""When checkpoints are written: the last steps, to go on from, and the best model, to use."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, Timer
from rich.console import Console
from torch import Tensor

from flowattn.checks import check_choice, check_positive


class Checkpoints(Checkpoint):
    """Writes `checkpoints/last.ckpt` every so many steps and after each validation, and `checkpoints/best.ckpt`.

    Both are in the run's folder and hold everything that training depends on, so that a run that was killed
    goes on from the last one as if nothing had happened. A step after which validation is due is written when that
    is over: Lightning, restarted in between, would leave the validation out.

    Args:
        every_n_steps: steps of the optimiser between two last ones; no more than these are computed again.
        monitor: the metric of the best one.
        mode: whether less or more of it is better.
    """

    def __init__(self, every_n_steps: int = 200, monitor: str = "val/nll", mode: Literal["min", "max"] = "min") -> None:
        check_positive(every_n_steps=every_n_steps)
        check_choice("mode", mode, ("min", "max"))
        self.every_n_steps = every_n_steps
        self.monitor = monitor
        self.mode = mode
        self.best_score: float | None = None
        self.last_step = 0
        self.best_model_path = ""  # where Lightning looks for what `SequenceTrainer` finds by name
        self._stop = False
        self._metrics: dict[str, Tensor] = {}

    @staticmethod
    def path(trainer: Trainer, name: str) -> Path:
        return Path(trainer.default_root_dir) / "checkpoints" / f"{name}.ckpt"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.last_step = trainer.global_step
        # What follows a validation goes by its metrics: early stops, and schedules that wait for a plateau.
        trainer._logger_connector._callback_metrics.update(self._metrics)
        if self._stop:
            trainer.should_stop = True
            if trainer.is_global_zero:
                Console().print(
                    f"This run had stopped by itself at step {trainer.global_step}: nothing is left to train."
                )
        has_best = trainer.strategy.broadcast(self.path(trainer, "best").exists())
        if not has_best:  # the score is that of a checkpoint in another folder
            self.best_score = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        due = step % self.every_n_steps == 0 or step == trainer.max_steps
        if due and step != self.last_step and not _validation_follows(trainer):
            self._save(trainer, "last")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not trainer.fit_loop.epoch_loop.global_step or trainer.state.fn != "fit":
            return
        if self._is_better(trainer):
            self._save(trainer, "best")
        if trainer.global_step != self.last_step:
            self._save(trainer, "last")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self.last_step:
            self._save(trainer, "last")
        if self.best_score is None:  # never validated: the last is the best we know
            self._save(trainer, "best")

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "stop": self._stop, "metrics": self._metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self._stop = state_dict["best_score"], state_dict["stop"]
        self._metrics = dict(state_dict["metrics"])

    def _is_better(self, trainer: Trainer) -> bool:
        score = trainer.callback_metrics.get(self.monitor)
        if score is None:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise ValueError(f"monitor must be a metric that was logged; got monitor={self.monitor!r} of {known}.")
        value = float(score)
        if not torch.isfinite(score):
            return False
        better = self.best_score is None or (value < self.best_score if self.mode == "min" else value > self.best_score)
        if better:
            self.best_score = value
        return better

    def _save(self, trainer: Trainer, name: str) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._stop = trainer.should_stop and not _is_out_of_time(trainer)
        self._metrics = {key: value.detach().cpu() for key, value in trainer.callback_metrics.items()}
        trainer.save_checkpoint(self.path(trainer, name), weights_only=False)
        if name == "last":
            self.last_step = trainer.global_step


def _is_out_of_time(trainer: Trainer) -> bool:
    """Whether `max_time` ended the training, which may be more the next time."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    left = [timer.time_remaining() for timer in timers]
    return any(seconds is not None and seconds <= 0 for seconds in left)


def _validation_follows(trainer: Trainer) -> bool:
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))
