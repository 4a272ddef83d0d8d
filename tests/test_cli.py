"""The command line, from fit to sample, in one folder."""

import csv
import os

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml

from flowattn.cli import CONFIGS, DEFAULT, main
from flowattn.training.parser import TITLES
from tests.tiny import run, write_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder to work in, with a training of masked sequences in runs/tiny."""
    folder = tmp_path_factory.mktemp("cli")
    code, output = run(folder, "fit", *arguments(folder), "--trainer.max_steps", "9", prepare=lambda: enter(folder))
    assert code == 0, output
    return folder


def enter(folder):
    os.chdir(folder)


def arguments(folder):
    return ["--config", str(write_config(folder)), "--data.masked", "true"]


def command(folder, *more):
    code, output = run(folder, more[0], *arguments(folder), *more[1:], prepare=lambda: enter(folder))
    assert code == 0, output
    return output


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["nothing", "--help"])
def test_without_a_command_it_lists_what_can_be_run_and_the_configs(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main(arguments)
    output = capsys.readouterr().out
    experiments, presets = output.split("presets, as a second --config")
    for path in {*CONFIGS.rglob("*.yaml")} - {DEFAULT}:
        assert path.name in (presets if path.parent.name == "presets" else experiments)
        assert path.name not in (experiments if path.parent.name == "presets" else presets)
    assert DEFAULT.name not in output
    commands, _ = output.split("experiments", 1)
    assert {"fit", "validate", "test", "predict", "sample"} <= {line.split(" ")[0] for line in commands.splitlines()}
    assert "--data.help ArraySequences" in commands
    assert all(len(line) <= 80 for line in output.splitlines())


def test_help_has_titles_that_say_what_options_are_for(folder):
    code, output = run(folder, "sample", "--help", prepare=lambda: enter(folder))
    assert code == 0
    assert "<class '" not in output
    for title in (*TITLES.values(), "--num_characters"):
        assert title in " ".join(output.split())


def test_every_config_begins_with_what_it_is():
    for path in CONFIGS.rglob("*.yaml"):
        assert path.read_text().startswith("# "), path


def test_a_run_keeps_everything_in_its_folder(folder):
    run_folder = folder / "runs" / "tiny"
    found = {str(path.relative_to(run_folder)) for path in run_folder.rglob("*") if path.is_file()}
    assert {"config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt", "csv/version_0/metrics.csv"} <= found
    assert any(name.startswith("tensorboard/events") for name in found)
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert config["model"]["init_args"]["flow"]["class_path"] == "tests.tiny.RandomFlow"
    assert not [path for path in folder.iterdir() if path.name not in ("runs", "tiny.yaml", "output.txt")]


def test_metrics_are_logged_under_their_names(folder):
    with open(folder / "runs/tiny/csv/version_0/metrics.csv") as file:
        names = set(csv.DictReader(file).fieldnames)
    assert {"train/nll", "val/nll", "val/nll_error", "val/token_nll", "val/bpd"} <= names


def test_test_prints_one_table_with_the_truth(folder):
    output = command(folder, "test")
    assert output.count("nats per sequence") == 1
    for text in ("RandomFlow", "Gaussian, diagonal", "truth", "divergence from the truth", "log-determinants: exact"):
        assert text in output
    assert (folder / "runs/tiny/test-densities.png").stat().st_size > 1000
    with open(folder / "runs/tiny/test.csv") as file:
        rows = {row["density"]: row for row in csv.DictReader(file)}
    assert float(rows["truth"]["nll"]) < float(rows["RandomFlow"]["nll"])


def test_validate_prints_its_metrics(folder):
    assert "val/token_nll" in command(folder, "validate")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz"])
def test_predict_writes_a_row_for_each_sequence(suffix, folder):
    out = folder / f"predictions.{suffix}"
    command(folder, "predict", "--out", str(out))
    if suffix == "csv":
        with open(out) as file:
            rows = list(csv.DictReader(file))
        columns = {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}
    elif suffix == "parquet":
        columns = {name: np.array(values) for name, values in pyarrow.parquet.read_table(out).to_pydict().items()}
    else:
        columns = dict(np.load(out))
    assert columns["index"].tolist() == list(range(72))
    assert set(columns["length"]) == {1, 2, 3, 4}
    np.testing.assert_allclose(columns["log_prob"] / columns["length"], columns["log_prob_per_token"], rtol=1e-5)
    assert out.with_suffix(".png").stat().st_size > 1000
    for path in (out, out.with_suffix(".png")):
        path.unlink()


def test_predict_refuses_a_format_before_it_computes(folder):
    code, output = run(folder, "predict", *arguments(folder), "--out", "x.txt", prepare=lambda: enter(folder))
    assert code != 0
    assert "out must end in one of .csv, .parquet, .npz; got x.txt" in output


def test_sample_writes_samples_and_a_picture(folder):
    out = folder / "some.npz"
    command(folder, "sample", "--num_samples", "80", "--batch_size", "32", "--out", str(out))
    written = np.load(out)
    assert written["samples"].shape == (80, 4, 2)
    assert np.isfinite(written["samples"]).all()
    assert (written["mask"][:8] == written["mask"][72:]).all()  # the lengths of the test split, and round again
    assert abs(written["samples"][written["mask"]].mean() - 3) < 1.5  # in the units of the data
    assert out.with_suffix(".png").stat().st_size > 1000
    for path in (out, out.with_suffix(".png")):
        path.unlink()


def test_options_of_language_models_are_refused_by_flows(folder):
    code, output = run(folder, "sample", *arguments(folder), "--top_k", "3", prepare=lambda: enter(folder))
    assert code != 0
    assert "DensityModule samples without top_k" in output


def test_the_same_weights_give_the_same_samples(folder):
    for name in ("one.npy", "two.npy"):
        command(folder, "sample", "--num_samples", "4", "--out", str(folder / name))
    assert (np.load(folder / "one.npy") == np.load(folder / "two.npy")).all()
    for name in ("one", "two"):
        (folder / f"{name}.npy").unlink()
        (folder / f"{name}.png").unlink()


def test_a_new_fit_keeps_the_run_before(folder):
    before = (folder / "runs/tiny/checkpoints/last.ckpt").read_bytes()
    output = command(folder, "fit", "--run", "other", "--trainer.max_steps", "1")
    assert "earlier run" not in output
    output = command(folder, "fit", "--run", "other", "--trainer.max_steps", "2")
    assert "An earlier run is now" in output
    assert torch.load(folder / "runs/other-1/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1
    assert torch.load(folder / "runs/other/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    assert (folder / "runs/tiny/checkpoints/last.ckpt").read_bytes() == before
