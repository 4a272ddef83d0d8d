"""Every config is run: a batch of fit and of test."""

import numpy as np
import pytest

from flowattn.cli import CONFIGS, DEFAULT
from flowattn.data.particles import DoubleWell
from tests.tiny import run

PRESETS = sorted((CONFIGS / "presets").glob("*.yaml"))
LANGUAGE = sorted((CONFIGS / "ptb").glob("*.yaml"))  # run by test_language.py, on a text of its own
EXPERIMENTS = sorted(set(CONFIGS.rglob("*.yaml")) - {*PRESETS, *LANGUAGE, DEFAULT})
CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.enable_progress_bar", "false"]
CPU += ["--trainer.enable_model_summary", "false"]
# What makes the data of a config small, where it is not.
FEW = ["--data.num_train", "640", "--data.num_val", "40", "--data.num_test", "40"]
CHAINS = ["--data.num_walkers", "40", "--data.burn_in", "4", "--data.thinning", "2", "--model.flow.depth", "1"]
SMALL = {"arrays": ["--data.path", "own.npz"], "autoregression": FEW, "dw4": [*FEW, *CHAINS], "lj13": [*FEW, *CHAINS]}


def name(path):
    return str(path.relative_to(CONFIGS).with_suffix(""))


def run_once(command, folder, *more):
    code, output = run(folder, command, *more, *CPU, "--trainer.default_root_dir", str(folder))
    assert code == 0, output
    return output


@pytest.mark.parametrize("path", EXPERIMENTS, ids=name)
def test_a_batch_of_fit_and_of_test_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", inputs=np.random.default_rng(0).normal(size=(60, 5, 3)), mask=np.tri(60, 5, dtype=bool))
    monkeypatch.setattr(DoubleWell, "num_estimates", 2)
    monkeypatch.setattr(DoubleWell, "num_walkers_of_an_estimate", 50)
    options = ["--config", str(path), *SMALL.get(name(path), [])]
    run_once("fit", tmp_path, *options, "--trainer.fast_dev_run", "1")
    output = run_once("test", tmp_path, *options, "--ckpt_path", "null", "--trainer.limit_test_batches", "1")
    assert "nats per" in output or "bits per" in output


@pytest.mark.parametrize("path", PRESETS, ids=name)
def test_a_preset_patches_a_config(path, tmp_path):
    options = ["--config", str(CONFIGS / "autoregression.yaml"), "--config", str(path), *SMALL["autoregression"]]
    run_once("fit", tmp_path, *options, "--trainer.num_nodes", "1", "--trainer.max_steps", "1")
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_every_row_of_an_own_file_is_scored_by_a_flow_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    np.save("normal.npy", random.normal(size=(40, 4, 3)))
    np.savez("others.npz", inputs=random.normal(size=(9, 7, 3)), mask=np.arange(7) < np.arange(1, 10)[:, None])
    config = ["--config", str(CONFIGS / "arrays.yaml")]
    run_once("fit", tmp_path, *config, "--data.path", "normal.npy", "--trainer.max_steps", "1")
    others = ["--data.path", "others.npz", "--data.predict_split", "all", "--out", "scores.npz"]
    run_once("predict", tmp_path, *config, *others)
    scores = np.load("scores.npz")
    assert scores["index"].tolist() == list(range(9))
    assert scores["length"].tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
