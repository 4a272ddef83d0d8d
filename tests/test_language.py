"""Training a character model: what is counted, that it learns, and that it goes on where it was stopped."""

import functools
import math
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, Trainer

from flowattn.cli import main
from flowattn.data.corpus import CharCorpus
from flowattn.data.windows import NOTHING
from flowattn.models import RUNGS, CharTransformer
from flowattn.training.guards import NotFinite
from flowattn.training.language import CharacterLoss, LanguageModule
from flowattn.training.schedules import WarmupCosine

CONFIGS = Path(__file__).parents[1] / "configs" / "ptb"
TEXT = "the company said it will buy the other company\n" * 60


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return functools.partial(CharCorpus, path, cache=tmp_path, max_tokens=16, batch_size=8)


def make(rung="invertible", rate=1e-2, scheduler=None, **options):
    torch.manual_seed(0)
    model = CharTransformer(30, 16, 2, 1, 16, rung=rung, **options)
    return LanguageModule(model, functools.partial(torch.optim.Adam, lr=rate), scheduler)


def trainer(folder, **options):
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "gradient_clip_val": 1.0,
        "default_root_dir": folder,
    }
    return Trainer(**{**settings, **options})


def weights(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()])


# -- the metric


def test_characters_count_the_same_whatever_batch_they_are_in():
    logits, targets = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    targets[1, 2:] = NOTHING
    whole, parts = CharacterLoss(), CharacterLoss()
    whole.update(logits, targets)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 6)):
        parts.update(logits[rows], targets[rows])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOTHING)
    for found in (whole.compute(), parts.compute()):
        assert found["characters"] == 27
        assert torch.allclose(found["nll"], expected)
        assert torch.allclose(found["bpc"], expected / math.log(2))


def test_validation_counts_every_character_of_the_text(corpus, tmp_path):
    data, module = corpus(eval_batch_size=3, overlap=5), make()
    (result,) = trainer(tmp_path, limit_val_batches=1.0).validate(module, datamodule=data, verbose=False)
    assert result["val/characters"] == data.num_characters("val")
    losses = []
    for batch in data.val_dataloader():
        logp = module.model(batch.inputs).log_softmax(-1)
        keep = batch.targets != NOTHING
        losses.append(-logp[keep].gather(-1, batch.targets[keep].unsqueeze(-1)))
    assert result["val/nll"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


# -- training


@pytest.mark.parametrize("rung", ["dot_product", "contractive_token", "invertible"])
def test_a_model_learns_a_text(corpus, tmp_path, rung):
    data, module = corpus(), make(rung)
    run = trainer(tmp_path, max_steps=40)
    run.fit(module, datamodule=data)
    assert run.callback_metrics["train/nll"] < 2.0 < math.log(20)
    assert run.callback_metrics["train/gradient_norm"] > 0


def test_the_rate_rises_and_falls_or_stays(corpus, tmp_path):
    def last_rate(scheduler):
        run = trainer(tmp_path, max_steps=6)
        run.fit(make(rate=0.5, scheduler=scheduler), datamodule=corpus())
        return run.callback_metrics["train/learning_rate"].item()

    assert last_rate(None) == 0.5
    assert last_rate(functools.partial(WarmupCosine, warmup_steps=10, total_steps=100)) == pytest.approx(0.3)
    assert last_rate(functools.partial(WarmupCosine, warmup_steps=2)) < 0.2


class Stop(Callback):
    """Keeps what there is after four steps."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 4:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "middle.ckpt", weights_only=False)


def test_a_stopped_training_ends_with_the_same_weights(corpus, tmp_path):
    straight, again = make(scheduler=WarmupCosine), make(scheduler=WarmupCosine)
    trainer(tmp_path, max_steps=9, callbacks=[Stop()]).fit(straight, datamodule=corpus())
    path = tmp_path / "middle.ckpt"
    trainer(tmp_path, max_steps=9).fit(again, datamodule=corpus(), ckpt_path=path, weights_only=True)
    assert torch.equal(weights(straight), weights(again))


def test_a_loss_that_is_no_number_stops_training(corpus, tmp_path):
    module = make()
    with torch.no_grad():
        module.model.readout.bias.fill_(math.nan)
    with pytest.raises(NotFinite, match="train batch 0, step 0: the loss is nan"):
        trainer(tmp_path, max_steps=2).fit(module, datamodule=corpus())


@pytest.mark.parametrize(
    ("data", "message"),
    [({"max_tokens": 20}, "max_tokens of the model must be at least that of the data; got 16 and 20"), ({}, "got 5")],
)
def test_a_model_too_small_for_the_text_is_refused(corpus, tmp_path, data, message):
    module = make()
    if not data:
        module.model.num_symbols = 5
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, max_steps=1).fit(module, datamodule=corpus(**data))


# -- what comes out


def test_the_test_writes_its_row(corpus, tmp_path, capsys):
    data = corpus(eval_batch_size=64, overlap=4)
    trainer(tmp_path).test(make(), datamodule=data, verbose=False)
    header, row = (tmp_path / "test.csv").read_text().splitlines()
    assert header == "model,nll,bpc,characters,text"
    assert row.startswith('"invertible, 1 layers"') and row.endswith(
        f'{data.num_characters("test")}.0,"stream, overlap 4"'
    )
    assert "stream, overlap 4" in capsys.readouterr().out


def test_predictions_add_up_to_the_loss(corpus, tmp_path):
    data, module = corpus(eval_batch_size=8), make()
    run = trainer(tmp_path)
    rows = run.predict(module, datamodule=data, weights_only=True)
    (result,) = run.test(module, datamodule=data, verbose=False)
    total, length = (sum(row[name].sum().item() for row in rows) for name in ("log_prob", "length"))
    assert length == data.num_characters("test")
    assert -total / length == pytest.approx(result["test/nll"], rel=1e-5)


def test_samples_go_on_from_the_prompt(corpus, tmp_path):
    data = corpus()
    settings = {"batch_size": 2, "datamodule": data, "num_characters": 20}
    with pytest.raises(ValueError, match=r"out must end in .txt, for samples of a language model are text; got x.npz"):
        make().write_samples(Path("x.npz"), num_samples=1, **settings)
    (path,) = make().write_samples(tmp_path / "out.txt", num_samples=3, prompt="the company ", top_k=5, **settings)
    texts = path.read_text().split(f"\n\n{'-' * 80}\n\n")
    assert path.suffix == ".txt" and len(texts) == 3
    assert all(text.startswith("the company ") for text in texts)
    with pytest.raises(ValueError, match="'Q' at position 0 is not in the alphabet"):
        make().write_samples(tmp_path / "out", num_samples=1, prompt="Q", **settings)


# -- configs


def test_there_is_a_config_of_every_rung_in_two_sizes():
    ladder = {f"{size}{rung}" for size in ("", "paper_") for rung in RUNGS}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == ladder | {"long_invertible"}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_batch_of_fit_and_of_test_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    model, data = "--model.init_args.model.init_args", "--data.init_args"
    options = [
        *("--config", str(path)),
        *(f"{model}.features", "16", f"{model}.num_heads", "4"),
        *(f"{model}.num_layers", "1", f"{model}.max_tokens", "16"),
        *(f"{data}.path", str(text), f"{data}.download", "false", f"{data}.cache", str(tmp_path)),
        *(f"{data}.max_tokens", "16", f"{data}.overlap", "8", f"{data}.batch_size", "4"),
        *("--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--trainer.logger", "false"),
        *("--trainer.limit_val_batches", "1", "--trainer.limit_test_batches", "1"),
        *("--trainer.enable_progress_bar", "false"),
    ]
    main(["fit", *options])
    assert (tmp_path / "runs" / "ptb" / path.stem / "checkpoints" / "last.ckpt").exists()
    main(["test", *options])
    assert "bpc" in capsys.readouterr().out
