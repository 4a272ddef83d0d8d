"""Two processes train and test as one."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import run, write_config

ROOT = Path(__file__).parents[1]
TWO = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2", "--data.batch_size", "4"]
EXACT = ["--model.flow", "flowattn.flows.AttentionFlow", "--model.flow.num_heads", "2", "--model.flow.depth", "1"]


def arguments(folder, command, *more):
    config = ["--config", str(write_config(folder)), "--trainer.default_root_dir", str(folder)]
    # 71 sequences: the ranks do not get equally many.
    return [command, *config, "--data.size", "71", "--data.masked", "true", *more]


def fit_and_test(folder, *more):
    dump = ["--trainer.callbacks+", "tests.tiny.Dump"] if "--trainer.devices" in more else []
    code, output = run(folder, *arguments(folder, "fit", "--trainer.max_steps", "12", *more, *dump))
    assert code == 0, output
    code, output = run(folder, *arguments(folder, "test", *more))
    assert code == 0, output
    assert output.count("nats per sequence") == 1, output  # one table, by one rank
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return fit_and_test(tmp_path_factory.mktemp("alone"), *EXACT)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return fit_and_test(tmp_path_factory.mktemp("together"), *EXACT, *TWO)


def load(folder, name="last"):
    return torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)


def ranks(folder):
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


def test_both_ranks_end_with_the_same_weights_from_different_data(together):
    one, other = ranks(together)
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    assert not set(one["index"].tolist()) & set(other["index"].tolist())


def test_two_processes_train_as_one_with_the_batch_of_both(alone, together):
    got, wanted = load(together), load(alone)
    assert got["global_step"] == wanted["global_step"] == 12
    for key in ("state_dict", "trained_state_dict"):
        assert any("log_scale" in name for name in got[key])  # what starts from the data
        for name, value in wanted[key].items():
            torch.testing.assert_close(got[key][name], value, rtol=1e-5, atol=1e-5, msg=name)


def table(folder):
    with open(folder / "test.csv") as file:
        return {row.pop("density"): {key: float(value) for key, value in row.items()} for row in csv.DictReader(file)}


def test_two_processes_report_the_metrics_of_one(alone, together):
    got, wanted = (load(folder)["callbacks"]["Checkpoints"]["metrics"] for folder in (together, alone))
    assert wanted.keys() == got.keys()
    for name in wanted:
        if name.startswith("val/"):
            assert got[name].item() == pytest.approx(wanted[name].item(), rel=1e-5), name
    got, wanted = table(together), table(alone)
    assert {"AttentionFlow", "Gaussian, diagonal", "truth"} <= got.keys() == wanted.keys()
    for density in wanted:
        assert got[density] == pytest.approx(wanted[density], rel=1e-5), density


def test_two_processes_predict_each_sequence_once(alone, together):
    columns = []
    for folder, more in ((alone, EXACT), (together, [*EXACT, *TWO])):
        code, output = run(folder, *arguments(folder, "predict", "--out", str(folder / "out.npz"), *more))
        assert code == 0, output
        columns.append(np.load(folder / "out.npz"))
    wanted, got = columns
    assert got["index"].tolist() == list(range(71))
    np.testing.assert_array_equal(got["length"], wanted["length"])
    np.testing.assert_allclose(got["log_prob"], wanted["log_prob"], rtol=1e-4, atol=1e-4)


def test_ranks_draw_different_probes(tmp_path):
    more = [*TWO, "--trainer.max_steps", "1", "--trainer.callbacks+", "tests.tiny.Dump"]
    code, output = run(tmp_path, *arguments(tmp_path, "fit", *more))
    assert code == 0, output
    one, other = ranks(tmp_path)
    assert all(torch.equal(one["weights"][name], other["weights"][name]) for name in one["weights"])
    assert not torch.equal(one["random"]["cpu"], other["random"]["cpu"])
    (first,), (second,) = one["random"]["generators"], other["random"]["generators"]
    assert not torch.equal(first, second)
    assert len(load(tmp_path)["callbacks"]["RandomState"]["ranks"]) == 2


@pytest.mark.slow
def test_torchrun_launches_it(alone, tmp_path):
    two = ["--trainer.strategy", "ddp", "--trainer.devices", "2", "--data.batch_size", "4", *EXACT]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"]
    for command, more in (("fit", ["--trainer.max_steps", "12"]), ("test", [])):
        finished = subprocess.run(
            [*launch, *arguments(tmp_path, command, *two, *more)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("nats per sequence") == 1
    for name, value in load(alone)["state_dict"].items():
        torch.testing.assert_close(load(tmp_path)["state_dict"][name], value, rtol=1e-5, atol=1e-5, msg=name)
