"""The command line behind train.py: fit, validate, test, predict and sample, by configs."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning import LightningDataModule, LightningModule
from pytorch_lightning.callbacks import ProgressBar
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from rich.table import Table

from flowattn.data.download import DownloadError
from flowattn.inverse import InverseNotConverged
from flowattn.training import (
    CheckpointError,
    FiniteGradients,
    NotFinite,
    RandomState,
    SafeCheckpointIO,
    SequenceTrainer,
)
from flowattn.training.checkpoint_io import is_full
from flowattn.training.parser import ShortParser
from flowattn.training.progress import Bar, tell
from flowattn.training.runs import NewRun, SaveConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DEFAULT = CONFIGS / "default.yaml"
DEBUG = "FLOWATTN_DEBUG"
#: What users cause, in files, configs and data; its own words say what is wrong.
ANSWERED = (
    ValueError,
    OSError,
    ModuleNotFoundError,
    MisconfigurationException,
    CheckpointError,
    DownloadError,
    InverseNotConverged,
    NotFinite,
)


class SequenceCLI(LightningCLI):
    """Lightning's command line with runs in folders of their own, and `sample`.

    A run is named after its first config, `runs/NAME`, unless `--run NAME` says otherwise; everything is in there.
    """

    def __init__(self, args: Sequence[str] | None = None, run: bool = True) -> None:
        defaults = {"default_config_files": [str(DEFAULT)]}
        super().__init__(
            LightningModule,
            LightningDataModule,
            SaveConfig,
            trainer_class=SequenceTrainer,
            seed_everything_default=0,
            parser_class=ShortParser,
            parser_kwargs={command: dict(defaults) for command in self.subcommands()} if run else defaults,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=None if args is None else list(args),
            run=run,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        data = {"model", "dataloaders", "datamodule", "weights_only"}
        return {
            "fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule", "weights_only"},
            "validate": data,
            "test": data,
            "predict": data | {"return_predictions"},
            "sample": {"model", "datamodule"},
        }

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run", type=str | None, default=None, help="Name of the run's folder below runs/.")
        parser.link_arguments("data", "model.init_args.event_shape", _event_shape, apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Nothing: a model is what its config says, and a checkpoint has weights."""

    def instantiate_trainer(self, **kwargs: Any) -> SequenceTrainer:
        config = self._get(self.config_init, "trainer")
        folder = Path(config.default_root_dir or Path("runs") / self.run_name()).absolute()
        kwargs["default_root_dir"] = str(folder)
        if config.logger in (None, True):
            kwargs["logger"] = False
            if self.subcommand == "fit" and not config.fast_dev_run:
                tensorboard = TensorBoardLogger(folder, name="", version="tensorboard")
                kwargs["logger"] = [tensorboard, CSVLogger(folder, name="csv")]
        kwargs["plugins"] = [*_listed(config.plugins), SafeCheckpointIO()]
        callbacks = [*_listed(config.callbacks), FiniteGradients(), RandomState()]
        if config.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            callbacks.append(Bar())
        kwargs["callbacks"] = callbacks
        return super().instantiate_trainer(**kwargs)  # type: ignore[return-value]

    def run_name(self) -> str:
        """What --run says, or the first config's path below configs/."""
        given = self._get(self.config, "run")
        files = self._get(self.config, "config") or []
        if given or not files:
            return given or "unnamed"
        path = Path(str(files[0])).resolve().with_suffix("")
        return str(path.relative_to(CONFIGS)) if path.is_relative_to(CONFIGS) else path.name

    def before_fit(self) -> None:
        given = self._get(self.config, "ckpt_path")
        own = Path(self.trainer.default_root_dir, "checkpoints")
        goes_on = given in ("last", "best") or (given is not None and Path(given).resolve().parent == own.resolve())
        if not goes_on and not self._get(self.config, "trainer").fast_dev_run:
            self.trainer.callbacks.insert(0, NewRun(self.trainer))  # type: ignore[attr-defined]

    def after_fit(self) -> None:
        if self.trainer.is_global_zero:
            tell(sorted(Path(self.trainer.default_root_dir, "checkpoints").glob("*.ckpt")))


def main(args: Sequence[str] | None = None) -> None:
    """Runs a command. What a user can put right is answered in a sentence; anything else keeps its traceback."""
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help"):
        print_help()
        return
    keep_quiet()
    before, sys.argv = sys.argv, [sys.argv[0], *args]  # what Lightning starts other ranks with
    try:
        SequenceCLI()
    except Exception as error:
        said = answer(error)
        if said is None or os.environ.get(DEBUG):
            raise
        raise SystemExit(f"error: {said}\n({DEBUG}=1 shows where.)") from None  # a rank that fails exits with 1
    finally:
        sys.argv = before


def answer(error: BaseException) -> str | None:
    """What to tell a user about an error that is likely to be theirs; None for all others."""
    while str(error).startswith("Does not validate against any") and error.__cause__ is not None:
        error = error.__cause__  # jsonargparse wraps what a constructor said
    if is_full(error):
        return f"{error.filename or 'a file'} could not be written: {error.strerror}"  # type: ignore[attr-defined]
    if isinstance(error, RuntimeError) and "in loading state_dict" in str(error):
        return "the checkpoint is not of the model of this config. " + "\n".join(str(error).splitlines()[:4])
    return str(error) if isinstance(error, ANSWERED) else None


def keep_quiet() -> None:
    """Leaves out what the libraries below say about themselves and the user can do nothing about."""
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    warnings.filterwarnings("ignore", "torch.triangular_solve is deprecated")
    warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # where sys.argv has other options
    warnings.filterwarnings("ignore", "The '.*' does not have many workers")
    warnings.filterwarnings("ignore", "Precision .* is not supported by the model summary")
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: "Tip:" not in record.getMessage()
    )


def print_help() -> None:
    """Says what can be run."""
    console = Console()
    console.print(
        "Trains, evaluates and samples densities of sequences: python train.py COMMAND\n\n"
        "fit      --config configs/NAME.yaml                   trains, into runs/NAME\n"
        "fit      --config configs/NAME.yaml --ckpt_path last  goes on where it stopped\n"
        "validate --config configs/NAME.yaml                   metrics of validation\n"
        "test     --config configs/NAME.yaml                   a table, beside references\n"
        "predict  --config configs/NAME.yaml --out FILE.csv    a density per sequence\n"
        "sample   --config configs/NAME.yaml --num_samples 64  samples, and a picture\n"
        "fit --help                                            every option there is\n"
        "fit --data.help ArraySequences                        data of your own\n",
        highlight=False,
        soft_wrap=True,
    )
    presets = sorted(CONFIGS.glob("presets/*.yaml"))
    for title, paths in {
        "experiments": sorted({*CONFIGS.rglob("*.yaml")} - {DEFAULT, *presets}),
        "presets, as a second --config": presets,
    }.items():
        table = Table(title=title, title_justify="left")
        table.add_column("config", no_wrap=True)
        table.add_column("what it is")
        for path in paths:
            table.add_row(str(path.relative_to(CONFIGS.parent)), first_comment(path))
        console.print(table)


def first_comment(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def _event_shape(data: LightningDataModule) -> Any:
    return getattr(data, "event_shape", None)


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
