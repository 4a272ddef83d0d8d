"""Small things for the tests of training: data, a flow with random log-determinants, a config, and real processes."""

import multiprocessing
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import yaml
from pytorch_lightning import Callback

from flowattn.data.base import SequenceData
from flowattn.data.batch import Batch, Sequences
from flowattn.flows import AttentionFlow
from flowattn.logdet import RussianRoulette
from flowattn.training.random_state import get_state


class Tiny(SequenceData):
    """Independent normal features of mean 3 and deviation 2; on request, one value of one batch is not a number."""

    def __init__(self, batch_size: int = 8, size: int = 72, masked: bool = False, bad_batch: int | None = None) -> None:
        super().__init__(batch_size)
        self.size = size
        self.masked = masked
        self.bad_batch = bad_batch

    @property
    def event_shape(self) -> tuple[int, int]:
        return 4, 2

    def load(self) -> dict[str, Sequences]:
        generator = torch.Generator().manual_seed(1)
        splits = {}
        for name in ("train", "val", "test"):
            inputs = 3 + 2 * torch.randn(self.size, 4, 2, generator=generator)
            lengths = torch.randint(1, 5, (self.size, 1), generator=generator)
            splits[name] = Sequences(inputs, torch.arange(4) < lengths if self.masked else None)
        return splits

    def log_density(self, batch: Batch) -> torch.Tensor:
        each = torch.distributions.Normal(3.0, 2.0).log_prob(batch.inputs).sum(2)
        return (each if batch.context is None else each.masked_fill(~batch.context, 0)).sum(1)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer.training and self.trainer.global_step == self.bad_batch:
            batch.inputs[3, 2, 1] = torch.nan
        return batch


class RandomFlow(AttentionFlow):
    """Attention whose log-determinants are estimated, with a generator of their own."""

    def __init__(self, event_shape: tuple[int, int]) -> None:
        logdet = RussianRoulette(num_exact_terms=2, survival=0.5, generator=torch.Generator().manual_seed(3))
        super().__init__(event_shape, depth=1, num_heads=2, hidden=4, logdet=logdet)


class KillAt(Callback):
    """The process's own SIGKILL after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


# Not strict: some trainings of the tests end before their first validation.
EARLY_STOPPING = {
    "class_path": "pytorch_lightning.callbacks.EarlyStopping",
    "init_args": {"monitor": "val/nll", "strict": False},
}
CONFIG = {
    "model": {
        "class_path": "flowattn.training.DensityModule",
        "init_args": {
            "flow": {"class_path": "tests.tiny.RandomFlow"},
            "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
            "scheduler": {"class_path": "flowattn.training.WarmupCosine", "init_args": {"warmup_steps": 5}},
            "ema": 0.9,
        },
    },
    "data": {"class_path": "tests.tiny.Tiny"},
    "trainer": {
        "max_steps": 25,
        "log_every_n_steps": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [
            {"class_path": "flowattn.training.Checkpoints", "init_args": {"every_n_steps": 2}},
            EARLY_STOPPING,
        ],
    },
}


def write_config(folder: Path) -> Path:
    """The config of a training of 25 steps, 9 an epoch, in this folder."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def start(folder: Path, *arguments: str, prepare=None) -> multiprocessing.Process:
    """Runs train.py with these arguments in a process of its own, a copy of this one; its words go to output.txt."""

    def child() -> None:
        from flowattn.cli import main

        with open(folder / "output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            code = 0
            try:
                if prepare is not None:
                    prepare()
                main(arguments)
            except SystemExit as end:
                code = 0 if end.code in (None, 0) else 1
                print(end, file=sys.stderr)
            except BaseException:
                code = 2
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def run(folder: Path, *arguments: str, prepare=None, timeout: float = 300) -> tuple[int, str]:
    """The exit code of such a process, -9 when it was killed, and what it said."""
    process = start(folder, *arguments, prepare=prepare)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        raise TimeoutError(f"{arguments} took more than {timeout} seconds")
    return process.exitcode, (folder / "output.txt").read_text()


class Dump(Callback):
    """Writes what each rank ends with, and the random states it started from."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 0:
            self.index = batch.index.clone()
            self.random = get_state(pl_module)

    def on_train_end(self, trainer, pl_module) -> None:
        path = Path(trainer.default_root_dir, f"rank-{trainer.global_rank}.pt")
        torch.save({"weights": pl_module.state_dict(), "index": self.index, "random": self.random}, path)
