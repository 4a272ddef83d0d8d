"""Trains a character model by the cross-entropy of the next character."""

from __future__ import annotations

import csv
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pytorch_lightning import LightningModule
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable
from pytorch_lightning.utilities import rank_zero_info
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flowattn.data.corpus import CharCorpus
from flowattn.data.windows import NOTHING, CharBatch
from flowattn.metrics import ExactSums
from flowattn.models import CharTransformer, generate
from flowattn.training.guards import check_loss
from flowattn.training.schedules import WarmupCosine


class CharacterLoss(ExactSums):
    r"""The mean negative log-probability of the characters of a text, in nats and in bits.

    .. math:: \text{nll} = -\frac1n \sum_{i=1}^n \log p(c_i | c_1 \dots c_{i-1}), \qquad \text{bpc} = \text{nll} / \ln 2

    Every character counts the same, whatever batch or rank it is on, and `characters` says how many there were: on
    the Penn Treebank 393,042 for validation and 442,423 for the test.

    Example:
        >>> metric = CharacterLoss()
        >>> metric.update(torch.zeros(1, 3, 4), torch.tensor([[2, 0, NOTHING]]))
        >>> {name: value.item() for name, value in metric.compute().items()}
        {'nll': 1.3862943649291992, 'bpc': 2.0, 'characters': 2.0}
    """

    total: Tensor
    characters: Tensor

    def __init__(self) -> None:
        super().__init__(counts=("characters",), sums=("total",))

    def update(self, logits: Float[Tensor, "batch tokens symbols"], targets: Int[Tensor, "batch tokens"]) -> None:
        """Counts the characters of a batch, where there is one to predict."""
        self.total += _cross_entropy(logits.detach(), targets, "sum").to(self.total.dtype)
        self.characters += (targets != NOTHING).sum()

    def compute(self) -> dict[str, Tensor]:
        """`nll`, `bpc` and `characters`; not a number before the first character."""
        nll = (self.total / self.characters).float()
        return {"nll": nll, "bpc": nll / math.log(2), "characters": self.characters.float()}


class LanguageModule(LightningModule):
    """A character model in training.

    Logs `train/nll` in nats per character, `train/gradient_norm` before it is clipped and `train/learning_rate`; `nll`,
    `bpc` and `characters` of `CharacterLoss` for `val/` and `test/`.

    Args:
        model: the character model.
        optimizer: makes the optimiser from the parameters.
        scheduler: makes a schedule of the learning rate from the optimiser, which steps after every batch; None for
            a fixed one.
        label: what the run is called in logs and tables; the rung and the depth unless given.

    Example:
        >>> module = LanguageModule(CharTransformer(features=16, max_tokens=8, rung="l2_tied"))
        >>> module.label
        'l2_tied, 2 layers'
    """

    def __init__(
        self,
        model: CharTransformer,
        optimizer: OptimizerCallable = partial(torch.optim.Adam, lr=2e-3),  # noqa: B008
        scheduler: LRSchedulerCallable | None = WarmupCosine,
        label: str | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.label = f"{model.rung}, {model.num_layers} layers" if label is None else label
        self.loss = CharacterLoss()

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, CharCorpus):
            return
        if len(data.alphabet) > self.model.num_symbols:
            raise ValueError(
                f"num_symbols must be at least the {len(data.alphabet)} of the text; got {self.model.num_symbols}."
            )
        if data.max_tokens > self.model.max_tokens:
            raise ValueError(
                f"max_tokens of the model must be at least that of the data; got {self.model.max_tokens} and "
                f"{data.max_tokens}."
            )

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        if isinstance(scheduler, WarmupCosine) and scheduler.total_steps is None:
            scheduler.total_steps = int(self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        size = {"label": self.label, "parameters": self.model.num_parameters, "hidden": self.model.hidden_width}
        rank_zero_info(f"{self.label}: {size['parameters']:,} parameters, feed-forward width {size['hidden']}")
        for logger in self.loggers:
            logger.log_hyperparams(size)

    def training_step(self, batch: CharBatch, batch_idx: int) -> Tensor:
        nll = _cross_entropy(self.model(batch.inputs), batch.targets, "mean")
        check_loss(nll, f"train batch {batch_idx}, step {self.global_step}")
        self.log("train/nll", nll.detach(), prog_bar=True, batch_size=len(batch.inputs))
        return nll

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [weight.grad for weight in self.parameters() if weight.grad is not None]
        self.log("train/gradient_norm", torch.nn.utils.get_total_norm(gradients))
        self.log("train/learning_rate", float(optimizer.param_groups[0]["lr"]))

    def validation_step(self, batch: CharBatch, batch_idx: int) -> None:
        self.loss.update(self.model(batch.inputs), batch.targets)

    def on_validation_epoch_end(self) -> None:
        self._log_loss("val")

    def test_step(self, batch: CharBatch, batch_idx: int) -> None:
        self.loss.update(self.model(batch.inputs), batch.targets)

    def on_test_epoch_end(self) -> None:
        row = {"model": self.label, **{name: value.item() for name, value in self._log_loss("test").items()}}
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, CharCorpus):
            row["text"] = "lines, each by itself" if data.mode == "lines" else f"stream, overlap {data.overlap}"
        if self.trainer.is_global_zero:
            self._show(row)

    def predict_step(self, batch: CharBatch, batch_idx: int) -> dict[str, Tensor]:
        """Where each text begins, its length, its log-probability, and that per character."""
        nll = _cross_entropy(self.model(batch.inputs), batch.targets, "none").view_as(batch.targets).sum(-1)
        length = (batch.targets != NOTHING).sum(-1)
        return {"index": batch.index, "length": length, "log_prob": -nll, "log_prob_per_token": -nll / length}

    def write_samples(
        self,
        out: Path,
        *,
        num_samples: int,
        batch_size: int,
        datamodule: CharCorpus,
        prompt: str = "\n",
        temperature: float = 1.0,
        top_k: int | None = None,
        num_characters: int = 400,
    ) -> list[Path]:
        """Writes texts that go on from the prompt, one after another, to a .txt file, by this suffix or without."""
        if out.suffix not in ("", ".txt"):
            raise ValueError(f"out must end in .txt, for samples of a language model are text; got {out}.")
        given = datamodule.encode(prompt)
        if not len(given):
            raise ValueError("prompt must have a character at least; got prompt=''.")
        texts = []
        for first in range(0, num_samples, batch_size):
            count = min(batch_size, num_samples - first)
            text = generate(
                self.model,
                given.expand(count, -1).to(self.device),
                num_characters,
                temperature=temperature,
                top_k=top_k,
                num_symbols=len(datamodule.alphabet),
                seed=first,
            )
            texts += [datamodule.decode(row) for row in text.cpu()]
        path = Path(out).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"\n\n{'-' * 80}\n\n".join(text.strip("\n") for text in texts) + "\n", encoding="utf-8")
        return [path]

    def _log_loss(self, stage: str) -> dict[str, Tensor]:
        # All ranks come here, also one that had no batch; what is computed is the same on all of them.
        values = self.loss.compute()
        self.loss.reset()
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, sync_dist=True)
        return values

    def _show(self, row: dict[str, Any]) -> None:
        table = Table(*row, title="test")
        table.add_row(*(f"{value:,.6g}" if isinstance(value, float) else value for value in row.values()))
        Console().print(table)
        path = Path(self.trainer.default_root_dir) / "test.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            writer.writeheader()
            writer.writerow(row)


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=NOTHING, reduction=reduction)
