"""Notices strangers by the log-density of what they say: trains on some speakers, and scores utterances of all.

The score of an utterance is its negative log-density per token, so that long utterances are not strange by length.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, binary_roc

from flowattn.cli import CONFIGS, SequenceCLI, keep_quiet
from flowattn.data.batch import Sequences
from flowattn.experiments._lab import BLUE, GREEN, ORANGE, Lab, Row, write_csv
from flowattn.metrics import lengths
from flowattn.training.trainer import load_weights

CONFIG = "vowels_anomaly"
TITLE = "telling strangers from known speakers"


def ranks(scores: Float[Tensor, " sequences"]) -> Float[Tensor, " sequences"]:
    """Numbers in [0, 1] in the order of the scores, equal where they are.

    torchmetrics takes anything outside [0, 1] for logits, and its sigmoid makes all large scores the same.

    Example:
        >>> ranks(torch.tensor([100.0, -3.0, 200.0, 100.0]))
        tensor([0.5000, 0.0000, 1.0000, 0.5000])
    """
    values, places = scores.double().unique(return_inverse=True)
    return places / max(1, len(values) - 1)


def auroc(scores: Float[Tensor, " sequences"], labels: Int[Tensor, " sequences"]) -> tuple[float, float]:
    r"""The chance that an anomaly scores higher than a normal sequence, and its standard error.

    .. math:: \sigma^2 = \frac{A (1 - A) + (n_1 - 1)(Q_1 - A^2) + (n_0 - 1)(Q_2 - A^2)}{n_0 n_1}, \qquad
        Q_1 = \frac{A}{2 - A}, \quad Q_2 = \frac{2 A^2}{1 + A}

    References:
        | The Meaning and Use of the Area under a Receiver Operating Characteristic Curve (Hanley, McNeil, 1982)

    Example:
        >>> auroc(torch.tensor([0.0, 5.0, 7.0, 9.0]), torch.tensor([0, 1, 0, 1]))[0]
        0.75
    """
    if not torch.isfinite(scores).all():
        raise ValueError(f"scores must be finite; got {scores[~torch.isfinite(scores)][0].item()}.")
    anomalies, normal = int(labels.sum()), int((1 - labels).sum())
    if not anomalies or not normal:
        raise ValueError(f"labels must have both kinds; got {normal} normal sequences and {anomalies} anomalies.")
    area = binary_auroc(ranks(scores), labels).item()
    above, below = area / (2 - area) - area**2, 2 * area**2 / (1 + area) - area**2
    variance = (area * (1 - area) + (anomalies - 1) * above + (normal - 1) * below) / (anomalies * normal)
    return area, max(0.0, variance) ** 0.5


@torch.no_grad()
def scores(log_prob: Any, split: Sequences, batch_size: int = 200) -> Float[Tensor, " sequences"]:
    """The negative log-density per token of every sequence."""
    parts = []
    for rows in torch.arange(len(split)).split(batch_size):
        batch = split.batch(rows)
        parts.append(-log_prob(batch).double() / lengths(batch.inputs, batch.context))
    return torch.cat(parts)


def fit(quick: bool, checkpoint: Path | None, folder: Path) -> tuple[Any, Any]:
    """The model of the config, trained here or loaded, and its data."""
    keep_quiet()
    arguments = ["--config", str(CONFIGS / f"{CONFIG}.yaml"), f"--trainer.default_root_dir={folder}"]
    if quick:
        arguments += ["--trainer.max_steps=20"]
    cli = SequenceCLI(arguments, run=False)
    model, data = cli.model, cli.datamodule
    trainer: Any = cli.trainer
    if checkpoint is None:
        trainer.fit(model, datamodule=data)
        checkpoint = Path(trainer.find_checkpoint("best"))
    load_weights(model, str(checkpoint))
    return model.cpu().eval(), data


def draw(labels: Tensor, ours: Tensor, others: dict[str, Tensor]) -> Figure:
    """The ROC curves, and histograms of the log-densities."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = zip({"flow": ours, **others}.items(), (BLUE, ORANGE, GREEN), strict=False)
    for (name, values), color in curves:
        false, true, _ = binary_roc(ranks(values), labels)
        left.plot(false, true, color=color, label=f"{name}, {auroc(values, labels)[0]:.3f}")
    left.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    left.set(xlabel="known speakers taken for strangers", ylabel="strangers noticed", title="ROC and the area below")
    left.legend(loc="lower right")
    low, high = torch.quantile(-ours, torch.tensor([0.01, 1.0], dtype=ours.dtype)).tolist()
    edges = torch.linspace(low, high, 41).tolist()
    for label, name, color in ((0, "known speakers", BLUE), (1, "strangers", ORANGE)):
        right.hist(
            (-ours[labels == label]).clamp(low, high).numpy(), edges, density=True, alpha=0.6, color=color, label=name
        )
    lowest = "log-density per token (nats)\nthe lowest 1 % are in the first bar"
    right.set(xlabel=lowest, ylabel="density", title=f"{len(labels)} utterances")
    right.legend()
    return figure


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m flowattn.experiments anomaly", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="a few steps of training only")
    parser.add_argument("--out", type=Path, default=Lab.out, help="where figures/ and results/ go")
    parser.add_argument("--checkpoint", type=Path, help="a trained model; it is trained now unless given")
    options = parser.parse_args(arguments)
    if options.checkpoint is not None and not options.checkpoint.is_file():
        parser.error(f"--checkpoint must be a file; got {options.checkpoint}")

    lab = Lab("anomaly", options.out, options.quick)
    model, data = fit(options.quick, options.checkpoint, Path("runs") / "anomaly")
    split, labels = data.split("test"), data.labels("test")
    ours = scores(lambda batch: model.log_prob(batch.inputs, batch.context), split)
    others = {name: scores(log_prob, split) for name, log_prob in data.references().items()}
    rows: list[Row] = []
    for name, values in {"flow": ours, **others}.items():
        area, error = auroc(values, labels)
        rows.append({"score": name, "AUROC": area, "standard error": error})
    lab.show(TITLE, rows)
    lab.save(lambda: draw(labels, ours, others))
    results = options.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    write_csv(results / "anomaly.csv", rows)
    lab.close()
