"""Trains character models one after another and keeps what was measured: the ladder and the depths are made of runs."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flowattn.data.corpus import CharCorpus
from flowattn.experiments._lab import Row, write_csv
from flowattn.models import CharTransformer
from flowattn.training.guards import NotFinite
from flowattn.training.language import LanguageModule
from flowattn.training.schedules import WarmupCosine

QUIET = ("pytorch_lightning", "lightning_fabric", "lightning")


@dataclass(frozen=True)
class Run:
    """One training. Two runs with the same fields are the same run."""

    rung: str
    layers: int
    seed: int
    rate: float
    schedule: str  # "cosine" or "fixed", both after a warm-up
    layer_norm: bool
    position: str | None
    features: int
    heads: int
    tokens: int
    batch: int
    steps: int
    warmup: int
    every: int
    text: str
    model: str  # further options of the model, in JSON

    @property
    def name(self) -> str:
        norm = "_layernorm" if self.layer_norm else ""
        return f"{self.rung}{norm}_{self.layers}layers_rate{self.rate:g}_seed{self.seed}"

    @property
    def file_name(self) -> str:
        """The name, and a few digits that tell runs apart which differ in what it leaves out."""
        return f"{self.name}_{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Outcome:
    """What a run gave; the losses are in nats per character, and NaN if it came to no end."""

    parameters: int
    hidden: int
    step_ms: float
    val_nll: float
    curve: list[Row]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all experiments on characters share."""
    add = parser.add_argument
    add("--data", type=Path, help="folder of the Penn Treebank, or a text file; Python's documentation unless given")
    add("--seeds", type=int, nargs="+", default=[0])
    add("--rates", type=float, nargs="+", default=[8e-3], help="learning rates")
    add("--features", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--tokens", type=int, default=128, help="characters in a window")
    add("--batch", type=int, default=32)
    add("--steps", type=int, default=2000)
    add("--warmup", type=int, default=100)
    add(
        "--every",
        type=int,
        default=250,
        help="steps between two validations on a tenth of the text; the last is on all",
    )
    add("--model", type=json.loads, default={}, help="further options of CharTransformer, in JSON")
    add("--cache", type=Path, help="folder of the symbols; the user's cache unless given")
    add("--out", type=Path, default=Path("docs"), help="where figures/ and results/ go")
    add("--quick", action="store_true", help="narrow, short and few, in seconds")


def make_quick(options: argparse.Namespace) -> None:
    """Shrinks a run to seconds."""
    if options.quick:
        options.features, options.heads, options.tokens = 16, 2, 16
        options.batch, options.steps, options.warmup, options.every = 4, 6, 2, 3


def make_run(options: argparse.Namespace, **own: Any) -> Run:
    """A run with the options given and these of its own."""
    shared = {
        name: getattr(options, name) for name in ("features", "heads", "tokens", "batch", "steps", "warmup", "every")
    }
    text = "documentation of Python" if options.data is None else options.data.name
    return Run(**shared, **own, text=text, model=json.dumps(options.model, sort_keys=True))


def run_all(runs: Sequence[Run], options: argparse.Namespace, name: str) -> list[tuple[Run, Outcome]]:
    """Trains what was not trained before. Each run that ends is kept in results/NAME_runs.jsonl, with its own CSV.

    Its model is kept in weights/. A run is known by its fields alone: remove both after a change of the code.

    Returns:
        What was asked for, and after it all that was kept of the same family: tables grow by as much as is trained.
    """
    folder = options.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{name}_runs.jsonl"
    done = _read(kept)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn()) as progress:
        missing = [run for run in runs if run not in done]
        task = progress.add_task(name, total=sum(run.steps for run in missing))
        for run in missing:
            progress.update(task, description=f"{name}: {run.name}")
            outcome, _ = train_kept(run, options, lambda: progress.advance(task))
            done[run] = outcome
            with kept.open("a") as file:
                print(json.dumps([asdict(run), asdict(outcome)]), file=file)
            write_csv(folder / f"{name}_{run.file_name}.csv", outcome.curve)
    families = {_family(run) for run in runs}
    others = [run for run in done if run not in runs and _family(run) in families]
    return [(run, done[run]) for run in [*runs, *others]]


def _family(run: Run) -> Run:
    """What runs that stand in one table have in common."""
    return replace(run, rung="", layers=0, seed=0)


def train_kept(run: Run, options: argparse.Namespace, advance: Any = lambda: None) -> tuple[Outcome, CharTransformer]:
    """What `train` gives, from the file in weights/ if the same run was trained before."""
    path = options.out / "weights" / f"{run.file_name}.pt"
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if kept["run"] == asdict(run):
            model = _model(run, kept["num_symbols"])
            model.load_state_dict(kept["model"])
            return Outcome(**kept["outcome"]), model
    outcome, model = train(run, options.data, options.cache, advance)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"run": asdict(run), "outcome": asdict(outcome), "num_symbols": model.num_symbols}
    partial = path.with_suffix(".partial")  # a file that was cut is none
    torch.save(whole | {"model": model.state_dict()}, partial)
    partial.replace(path)
    return outcome, model


def train(
    run: Run, data: Path | None, cache: Path | None, advance: Any = lambda: None
) -> tuple[Outcome, CharTransformer]:
    """One training from its start, and validation on the whole split at its end."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    corpus = CharCorpus(
        data, max_tokens=run.tokens, batch_size=run.batch, eval_batch_size=4 * run.batch, seed=run.seed, cache=cache
    )
    torch.manual_seed(run.seed)
    model = _model(run, len(corpus.alphabet))
    final = 1.0 if run.schedule == "fixed" else 0.01
    schedule = functools.partial(WarmupCosine, warmup_steps=run.warmup, total_steps=run.steps, final=final)
    module = LanguageModule(model, functools.partial(torch.optim.Adam, lr=run.rate), schedule)
    curve = _Curve(advance)
    trainer = Trainer(
        accelerator="cpu" if not torch.cuda.is_available() else "auto",
        devices=1,
        max_steps=run.steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        val_check_interval=run.every,
        check_val_every_n_epoch=None,
        limit_val_batches=max(1, len(corpus.val_dataloader()) // 10),
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[curve],
    )
    try:
        trainer.fit(module, datamodule=corpus)
        trainer.limit_val_batches = 1.0
        val_nll = float(trainer.validate(module, datamodule=corpus, verbose=False)[0]["val/nll"])
    except NotFinite:
        val_nll = float("nan")
    step_ms = 1e3 * statistics.median(curve.seconds) if curve.seconds else float("nan")
    return Outcome(model.num_parameters, model.hidden_width, step_ms, val_nll, curve.rows), model


def _model(run: Run, num_symbols: int) -> CharTransformer:
    return CharTransformer(
        num_symbols,
        run.features,
        run.heads,
        run.layers,
        run.tokens,
        rung=run.rung,  # type: ignore[arg-type]
        position=run.position,  # type: ignore[arg-type]
        layer_norm=run.layer_norm,
        **json.loads(run.model),
    )


class _Curve(Callback):
    """The seconds of every step, and the loss at every validation."""

    def __init__(self, advance: Any) -> None:
        self.advance = advance
        self.seconds: list[float] = []
        self.rows: list[Row] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.advance()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            metrics = trainer.callback_metrics
            train_nll, val_nll = float(metrics["train/nll"]), float(metrics["val/nll"])
            self.rows.append({"step": trainer.global_step, "train_nll": train_nll, "val_nll": val_nll})


def _read(path: Path) -> dict[Run, Outcome]:
    """The runs that came to an end; a last line that was cut is none."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        path.write_text("".join(whole))
    return {Run(**run): Outcome(**outcome) for run, outcome in map(json.loads, whole)}
