"""Lightning's Trainer with a `sample`, checkpoints by name, and results where one expects them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningDataModule, LightningModule, Trainer
from pytorch_lightning.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from flowattn.training.checkpoint_io import CheckpointError, read_checkpoint
from flowattn.training.predictions import PredictionWriter
from flowattn.training.progress import tell


class SequenceTrainer(Trainer):
    """Runs everything in one folder, `default_root_dir`: checkpoints, logs, tables and pictures.

    A checkpoint is a path, or "last" or "best" of the run.
    """

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = True,
    ) -> None:
        """Trains the model.

        Args:
            model: what is trained.
            train_dataloaders: what it is trained on, without a data module.
            val_dataloaders: what it is validated on, without a data module.
            datamodule: the data.
            ckpt_path: a checkpoint to go on from: a path, or "last", which is the beginning while there is none.
            weights_only: checkpoints never run code; any other value is ignored.
        """
        path = self._find(ckpt_path) if ckpt_path != "last" or self._path("last").is_file() else None
        if ckpt_path is not None and path is None:
            rank_zero_info(f"There is no last checkpoint of this run yet, {self._path('last')}: it begins.")
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, path, True)

    def validate(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = "best",
        verbose: bool = True,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = True,
    ) -> Any:
        """Evaluates the model on the validation split.

        Args:
            model: what is evaluated.
            dataloaders: what it is evaluated on, without a data module.
            ckpt_path: a path, "best" or "last".
            verbose: whether to print the metrics.
            datamodule: the data.
            weights_only: checkpoints never run code; any other value is ignored.
        """
        return super().validate(model, dataloaders, self._find(ckpt_path), verbose, datamodule, True)

    def test(
        self,
        model: Any = None,
        dataloaders: Any = None,
        ckpt_path: str | Path | None = "best",
        verbose: bool = False,
        datamodule: LightningDataModule | None = None,
        weights_only: bool | None = True,
    ) -> Any:
        """Evaluates the model on the test split, beside references, in one table.

        Args:
            model: what is evaluated.
            dataloaders: what it is evaluated on, without a data module.
            ckpt_path: a path, "best" or "last".
            verbose: whether to print Lightning's table of metrics too.
            datamodule: the data.
            weights_only: checkpoints never run code; any other value is ignored.
        """
        return super().test(model, dataloaders, self._find(ckpt_path), verbose, datamodule, True)

    def predict(
        self,
        model: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | Path | None = "best",
        weights_only: bool | None = True,
        out: Path | None = None,
    ) -> Any:
        """Writes the log-density of every sequence, and a histogram.

        Args:
            model: what is evaluated.
            dataloaders: what it is evaluated on, without a data module.
            datamodule: the data.
            return_predictions: as of Lightning's Trainer.
            ckpt_path: a path, "best" or "last".
            weights_only: checkpoints never run code; any other value is ignored.
            out: a .csv, .parquet or .npz; predictions.csv in the run's folder unless given.
        """
        out = Path(self.default_root_dir) / "predictions.csv" if out is None else Path(out)
        writer, callbacks = PredictionWriter(out), self.callbacks  # type: ignore[has-type]
        self.callbacks = [*callbacks, writer]
        try:
            return super().predict(model, dataloaders, datamodule, return_predictions, self._find(ckpt_path), True)
        finally:
            self.callbacks = callbacks

    def sample(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = "best",
        num_samples: int = 64,
        batch_size: int = 64,
        out: Path | None = None,
        prompt: str | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        num_characters: int | None = None,
    ) -> list[Path]:
        """Writes samples of the model, and a picture of them beside data.

        Args:
            model: what is sampled: it has a method `write_samples`.
            datamodule: the data.
            ckpt_path: a path, "best" or "last".
            num_samples: the number of samples.
            batch_size: how many at a time.
            out: the file they go to, a .npz, .npy or .csv, of a language model a .txt; samples.npz or samples.txt in
                the run's folder unless given.
            prompt: of a language model: what samples begin with.
            temperature: of a language model: below one for likelier characters.
            top_k: of a language model: how many of the likeliest characters are considered.
            num_characters: of a language model: how long samples are beyond the prompt; 400 unless given.
        """
        if not self.is_global_zero:
            return []
        write = getattr(model, "write_samples", None)
        if write is None:
            raise ValueError(f"sample needs a model with a method write_samples; {type(model).__name__} has none.")
        options = {"prompt": prompt, "temperature": temperature, "top_k": top_k, "num_characters": num_characters}
        options = {name: value for name, value in options.items() if value is not None}
        unknown = [name for name in options if name not in inspect.signature(write).parameters]
        if unknown:
            raise ValueError(f"{type(model).__name__} samples without {', '.join(unknown)}.")
        path = self._find(ckpt_path)
        if path is not None:
            load_weights(model, path)
        if datamodule is not None:
            datamodule.prepare_data()
            datamodule.setup("test")
        model.to(self.strategy.root_device).eval()
        out = Path(self.default_root_dir) / "samples" if out is None else Path(out)
        with torch.no_grad():
            paths = write(out, num_samples=num_samples, batch_size=batch_size, datamodule=datamodule, **options)
        tell(paths)
        return paths

    def find_checkpoint(self, name: str | Path) -> str:
        """The path of a checkpoint: "last" and "best" are those of the run's folder."""
        if str(name) in ("last", "best"):
            path = self._path(str(name))
            if not path.is_file():
                raise CheckpointError(
                    f"There is no {name} checkpoint of this run: {path} does not exist. Run fit first."
                )
            return str(path)
        return str(name)

    def _path(self, name: str) -> Path:
        return Path(self.default_root_dir) / "checkpoints" / f"{name}.ckpt"

    def _find(self, name: str | Path | None) -> str | None:
        return None if name is None else self.find_checkpoint(name)


def load_weights(model: LightningModule, path: str) -> None:
    """Loads the weights that a checkpoint evaluates with."""
    model.load_state_dict(read_checkpoint(path)["state_dict"])
    rank_zero_info(f"Loaded the weights of {path}")
