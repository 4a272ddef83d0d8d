"""Trains an invertible character model, and recovers the characters of a text from its hidden tokens.

    python -m flowattn.experiments recover --data PATH [--layers 2] [--characters 10000]

writes DIR/results/recover.csv, with the bits per character of the test split, and DIR/figures/recover.png. A model that
`ladder` left in DIR/weights is not trained again.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.data.corpus import CharCorpus
from flowattn.experiments._lab import BLUE, ORANGE, Row, save_figure, write_csv
from flowattn.experiments._language import add_options, make_quick, make_run, train_kept
from flowattn.experiments.ladder import show
from flowattn.models import CharTransformer
from flowattn.training.language import CharacterLoss

SHOWN = 48  # characters in the picture


@torch.no_grad()
def recover(model: CharTransformer, texts: Tensor, batch: int = 16) -> Row:
    """The worst of all texts, with hidden tokens in single and in double precision.

    `wrong` counts characters. `error` is the longest difference of an embedding, `certified` the largest bound of a
    block's inverse. What rounds the hidden tokens is stretched by every linear map and coupling on the way back, and
    these have no bound: in single precision that is most of the error, and no solver's fault.
    """
    row: Row = {"characters": texts.numel()}
    for name, same in (("single", model.float()), ("double", copy.deepcopy(model).double())):
        worst = {"wrong": 0.0, "error": 0.0, "certified": 0.0}
        for part in texts.split(batch):
            found = same.invert(same.hidden(part))
            worst["wrong"] += float((found.characters != part).sum())
            error = (found.embeddings - same.embedding(part)).norm(dim=-1).max().item()
            worst["error"] = max(worst["error"], error)
            worst["certified"] = max(worst["certified"], found.certified_error.max().item())
        row |= {f"wrong_{name}": int(worst["wrong"]), f"error_{name}": worst["error"]}
        row[f"certified_{name}"] = worst["certified"]
    return row


@torch.no_grad()
def test_bits(model: CharTransformer, corpus: CharCorpus) -> float:
    """Bits per character of the whole test split, each character seen with half a window before it at least."""
    loss = CharacterLoss()
    for batch in corpus.test_dataloader():
        loss.update(model(batch.inputs), batch.targets)  # type: ignore[attr-defined]
    return float(loss.compute()["bpc"])


@torch.no_grad()
def plot(model: CharTransformer, corpus: CharCorpus, text: Tensor) -> Figure:
    """What the trunk makes of a text, and how far from what is recovered the nearest two embeddings are."""
    model = copy.deepcopy(model).double()
    hidden = model.hidden(text[None])
    found = model.invert(hidden)
    distances = (found.embeddings[0].unsqueeze(1) - model.embedding.weight).norm(dim=-1)
    near, second = distances.topk(2, largest=False).values.T
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 3.8), layout="constrained", sharex=True, height_ratios=[1.2, 1]
    )
    top.imshow(hidden[0].T.numpy(), aspect="auto", cmap="RdBu", vmin=-3, vmax=3, interpolation="nearest")
    top.set_ylabel("hidden features")
    top.set_yticks([])
    bottom.semilogy(second.numpy(), color=ORANGE, marker="s", label="the next symbol")
    bottom.semilogy(near.clamp_min(1e-16).numpy(), color=BLUE, marker="o", label="the symbol found")
    bottom.set_ylabel("distance of embeddings")
    characters = corpus.decode(found.characters[0]).replace("\n", "\u21b5").replace(" ", "\u2423")
    bottom.set_xticks(range(len(characters)), list(characters))
    bottom.legend(loc="center", ncols=2)
    return figure


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flowattn.experiments recover", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[2], help="depths")
    parser.add_argument("--characters", type=int, default=10_000, help="how many to recover, of the test split")
    add_options(parser)
    options = parser.parse_args(arguments)
    check_positive(characters=options.characters)
    make_quick(options)
    results, figures = options.out / "results", options.out / "figures"
    for folder in (results, figures):
        folder.mkdir(parents=True, exist_ok=True)

    corpus = CharCorpus(
        options.data, max_tokens=options.tokens, overlap=options.tokens // 2, eval_batch_size=64, cache=options.cache
    )
    texts = _texts(corpus, options.characters)
    rows: list[Row] = []
    shown: CharTransformer | None = None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        for layers in options.layers:
            run = make_run(
                options,
                rung="invertible",
                layers=layers,
                seed=options.seeds[0],
                rate=options.rates[0],
                schedule="cosine",
                layer_norm=False,
                position=None,
            )
            task = progress.add_task(f"recover: {run.name}", total=run.steps)
            outcome, model = train_kept(run, options, lambda task=task: progress.advance(task))
            model.eval()
            shown = model if shown is None else shown
            losses = {"val_nll": outcome.val_nll, "test_bpc": test_bits(model, corpus)}
            rows.append({"layers": layers, **losses, **recover(model, texts)})
    write_csv(results / "recover.csv", rows)
    assert shown is not None
    save_figure(figures / "recover.png", lambda: plot(shown, corpus, texts[0, : min(SHOWN, texts.shape[1])]))
    show("characters recovered from hidden tokens", rows)


def _texts(corpus: CharCorpus, characters: int) -> Tensor:
    """So many characters at least of the test split, in windows."""
    windows, most = corpus.split("test"), corpus.num_characters("test")
    count = -(-characters // corpus.max_tokens)
    if count * corpus.max_tokens > most:
        raise ValueError(
            f"characters must be, in whole windows of {corpus.max_tokens}, at most the {most} of the test split; got "
            f"characters={characters}."
        )
    return windows.batch(torch.arange(count) * corpus.max_tokens).inputs
