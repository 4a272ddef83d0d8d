"""The ladder and the depths, in small: runs are kept, tables add up, and a divergence is no end."""

import csv
import dataclasses
import math

import pytest

from flowattn.experiments import _language, depth, ladder, recover
from flowattn.models import RUNGS


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the company said it will buy the other company\n" * 60)
    return path


def trained_in_no_time(run, *_):
    outcome = _language.Outcome(10, 4, 1.0, 2.0, [{"step": 3, "train_nll": 2.0, "val_nll": 2.0}])
    return outcome, _language._model(run, 50)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_ladder_writes_its_table_its_curves_and_its_picture(text, tmp_path, capsys):
    arguments = ["--quick", "--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path)]
    arguments += ["--rungs", "dot_product", "invertible", "--seeds", "0", "1"]
    ladder.main(arguments)
    rows = read(tmp_path / "results" / "ladder.csv")
    assert [row["rung"] for row in rows] == ["dot_product", "invertible"]
    assert all(row["seeds"] == "2" and float(row["ms_per_step"]) > 0 for row in rows)
    assert int(rows[1]["parameters"]) <= int(rows[0]["parameters"])
    above = float(rows[1]["val_nll"]) - float(rows[0]["val_nll"])
    assert float(rows[1]["above_first"]) == pytest.approx(above, abs=2e-5)
    (curve,) = (tmp_path / "results").glob("ladder_invertible_2layers_rate0.008_seed1_*.csv")
    curve = read(curve)
    assert [int(row["step"]) for row in curve] == [3, 6]
    assert (tmp_path / "figures" / "ladder.png").read_bytes().startswith(b"\x89PNG")
    assert "the ladder on text.txt" in capsys.readouterr().out


def test_runs_that_ended_are_not_trained_again(text, tmp_path, monkeypatch, capsys):
    arguments = ["--quick", "--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path)]
    trained = []

    def train(run, *_):
        trained.append((run.rung, run.seed))
        return trained_in_no_time(run)

    monkeypatch.setattr(_language, "train", train)
    ladder.main([*arguments, "--rungs", "l2_tied"])
    ladder.main([*arguments, "--rungs", "l2_tied", "dot_product"])
    assert trained == [("l2_tied", 0), ("dot_product", 0)]
    kept = tmp_path / "results" / "ladder_runs.jsonl"
    kept.write_text(kept.read_text()[:-40])  # as if the machine had stopped in the middle of a line
    (weights,) = (tmp_path / "weights").glob("dot_product_2layers_rate0.008_seed0_*.pt")
    weights.unlink()
    ladder.main([*arguments, "--rungs", "l2_tied", "dot_product"])
    assert trained == [("l2_tied", 0), ("dot_product", 0), ("dot_product", 0)]
    ladder.main([*arguments, "--rungs", "l2_tied", "--rates", "0.5"])
    assert trained[-1] == ("l2_tied", 0) and len(trained) == 4
    ladder.main([*arguments, "--rungs", "l2_tied", "--rates", "0.5", "--model", '{"hidden": 3}'])  # of the same name
    assert len(trained) == 5
    assert len(list((tmp_path / "weights").glob("l2_tied_2layers_rate0.5_seed0_*.pt"))) == 2


def test_all_rungs_are_run_unless_some_are_named(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_language, "train", trained_in_no_time)
    ladder.main(["--quick", "--layer_norm", "--layers", "1", "2", "--out", str(tmp_path)])
    rows = read(tmp_path / "results" / "ladder.csv")
    assert [row["rung"] for row in rows] == 2 * list(RUNGS)
    assert all(float(row["above_first"]) == 0 for row in rows)


def test_depths_are_trained_with_layernorm_and_without(text, tmp_path, capsys):
    arguments = ["--quick", "--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path)]
    depth.main([*arguments, "--rungs", "dot_product", "invertible", "--depths", "1", "2"])
    rows = read(tmp_path / "results" / "depth.csv")
    found = [(row["rung"], row["layer_norm"], row["layers"]) for row in rows]
    shallow = [("dot_product", "1", "1"), ("dot_product", "0", "1"), ("invertible", "0", "1")]
    assert found == [(rung, norm, layers) for layers in "12" for rung, norm, _ in shallow]
    assert all(math.isfinite(float(row["val_nll"])) and row["diverged"] == "0" for row in rows)
    assert (tmp_path / "figures" / "depth.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_diverges_is_counted_and_the_others_go_on(text, tmp_path, capsys):
    arguments = ["--quick", "--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path)]
    depth.main([*arguments, "--rungs", "dot_product", "--depths", "2", "--rates", "1e30", "1e-3"])
    rows = read(tmp_path / "results" / "depth.csv")
    assert [row["diverged"] for row in rows if row["rate"] == "1e+30"] == ["1", "1"]
    assert all(row["diverged"] == "0" for row in rows if row["rate"] == "0.001")


def test_characters_are_recovered_without_an_error(text, tmp_path, monkeypatch, capsys):
    arguments = ["--quick", "--data", str(text), "--cache", str(tmp_path), "--out", str(tmp_path)]
    ladder.main([*arguments, "--rungs", "invertible"])
    monkeypatch.delattr(_language, "train")  # the model of the ladder is there
    recover.main([*arguments, "--characters", "100"])
    (row,) = read(tmp_path / "results" / "recover.csv")
    assert (row["characters"], row["wrong_single"], row["wrong_double"]) == ("112", "0", "0")
    assert 0 < float(row["test_bpc"]) < 10
    assert float(row["certified_double"]) <= 1e-5 and float(row["error_double"]) < 1e-5
    assert (tmp_path / "figures" / "recover.png").read_bytes().startswith(b"\x89PNG")
    for characters in ("142", "1000"):  # windows overlap, so that there are more of them than fit
        message = rf"in whole windows of 16, at most the 141 of the test split; got characters={characters}\."
        with pytest.raises(ValueError, match=message):
            recover.main([*arguments, "--characters", characters])


def test_the_table_grows_by_what_is_trained(text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_language, "train", trained_in_no_time)
    arguments = ["--quick", "--out", str(tmp_path)]
    ladder.main([*arguments, "--rungs", "invertible", "--seeds", "0", "1"])
    ladder.main([*arguments, "--rungs", "l2_tied", "--rates", "0.5"])  # of another rate
    ladder.main([*arguments, "--rungs", "dot_product", "--layers", "2", "4"])
    rows = read(tmp_path / "results" / "ladder.csv")
    found = [(row["rung"], row["layers"], row["seeds"]) for row in rows]
    assert found == [("dot_product", "2", "1"), ("invertible", "2", "2"), ("dot_product", "4", "1")]


def test_runs_with_and_without_layernorm_do_not_share_a_row(tmp_path, monkeypatch, capsys):
    def train(run, *_):
        outcome, model = trained_in_no_time(run)
        return dataclasses.replace(outcome, val_nll=1.0 if run.layer_norm else 2.0), model

    monkeypatch.setattr(_language, "train", train)
    arguments = ["--quick", "--out", str(tmp_path), "--rungs", "dot_product", "invertible"]
    ladder.main(arguments)
    ladder.main([*arguments, "--layer_norm"])
    rows = read(tmp_path / "results" / "ladder.csv")
    assert [(row["rung"], row["seeds"], row["val_nll"]) for row in rows] == [
        ("dot_product", "1", "1"),
        ("invertible", "1", "2"),
    ]


def test_a_run_that_is_shorter_than_the_way_to_its_first_validation_is_drawn(tmp_path, monkeypatch, capsys):
    def train(run, *_):
        outcome, model = trained_in_no_time(run)
        return dataclasses.replace(outcome, curve=[]), model

    monkeypatch.setattr(_language, "train", train)
    ladder.main(["--quick", "--out", str(tmp_path), "--rungs", "dot_product"])
    assert (tmp_path / "figures" / "ladder.png").exists()


def test_the_lines_over_depth_go_from_left_to_right():
    rows = [
        {"rung": "l2_tied", "layer_norm": 1, "layers": layers, "rate": rate, "val_nll": layers + rate}
        for layers, rate in ((4, 0.5), (4, 0.1), (2, 0.5), (2, 0.1))
    ]
    lines = depth.plot(rows).axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [[[2, 2.5], [4, 4.5]], [[2, 2.1], [4, 4.1]]]
    assert [line.get_label() for line in lines] == ["l2_tied, LayerNorm, rate 0.5", "l2_tied, LayerNorm, rate 0.1"]
