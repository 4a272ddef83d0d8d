"""The figures of the guide, in small: what is measured agrees with what is proven."""

import csv
import math
import sys
import types

import pytest

from flowattn.experiments import __main__ as experiments
from flowattn.experiments import demo, guide


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide")
    guide.main(["--quick", "--out", str(folder)])
    return folder


@pytest.fixture
def table(out):
    def read(name):
        with (out / "results" / f"guide_{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows
        return [{k: number(v) for k, v in row.items()} for row in rows]

    return read


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("name", ["logdet", "norm", "radius"])
def test_every_figure_is_a_picture(out, name):
    assert (out / "figures" / f"guide_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_exact_logdet_has_no_error_and_estimates_have_one(table):
    for row in table("logdet_errors"):
        assert row["milliseconds"] > 0
        assert (row["rms_error_of_a_draw"] < 1e-9) == (row["method"] == "exact")


def test_the_bias_of_a_series_is_below_its_bound_and_falls_with_its_terms(table):
    series = [row for row in table("logdet_errors") if row["method"] == "series"]
    assert all(row["bias"] <= row["remainder_bound"] for row in series)
    for structure in ("dense", "causal"):
        biases = [row["bias"] for row in series if row["structure"] == structure]
        assert biases == sorted(biases, reverse=True)


def test_times_are_those_of_the_sizes_asked_for(table):
    rows = table("logdet_times")
    assert [row["dimensions"] for row in rows] == list(guide.QUICK.dimensions)
    assert all(value > 0 for row in rows for name, value in row.items() if name.endswith("_ms"))


def test_the_crossover_lies_where_the_times_are_equal():
    times = {10: (1, 4), 40: (2, 4), 160: (8, 4)}
    rows = [
        {"features": 2, "dimensions": size, "exact_dense_ms": exact, "roulette_dense_ms": roulette}
        for size, (exact, roulette) in times.items()
    ]
    assert guide.crossover(rows, 2) == pytest.approx(80)
    assert guide.crossover(rows[:2], 2) == pytest.approx(40)
    assert guide.crossover(rows[2:], 2) == pytest.approx(160)


def test_no_input_exceeds_its_bound_in_any_norm_and_ours_are_below_the_published(table):
    rows = table("norm")
    assert all(0 < row["found"] <= row["bound"] for row in rows)
    bounds = {(row["tokens"], row["features"], row["norm"], row["source"]): row["bound"] for row in rows}
    for (*shape, source), bound in bounds.items():
        if source == "published":
            assert bounds[(*shape, "ours")] < bound


def test_the_ball_lowers_the_bound_and_no_input_exceeds_it(table):
    rows = table("radius")
    assert all(0 < row["found"] <= row["bound"] for row in rows)
    free = {row["tokens"]: row["bound"] for row in rows if row["ratio"] == math.inf}
    assert all(row["bound"] <= free[row["tokens"]] for row in rows)
    for row in rows:
        expected = 1 / (1 + (row["tokens"] - 1) * math.exp(-4 * row["ratio"]))
        assert row["largest_weight"] == pytest.approx(expected, rel=1e-4)


def test_all_runs_every_experiment_but_the_long_ones(monkeypatch):
    ran = {}

    def stand_in(name):
        return types.SimpleNamespace(main=lambda options: ran.update({name: options}))

    monkeypatch.setattr(experiments.importlib, "import_module", stand_in)
    monkeypatch.setattr(sys, "argv", ["experiments", "all"])
    experiments.main()
    assert {demo.__name__, guide.__name__} <= set(ran)
    assert not {f"flowattn.experiments.{name}" for name in experiments.LONG} & set(ran)
    assert not any(name.rpartition(".")[2].startswith("_") for name in ran)
    assert all(options == [] for options in ran.values())


def test_all_takes_no_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", "all", "--quick"])
    with pytest.raises(SystemExit):
        experiments.main()
    assert "all takes no options" in capsys.readouterr().err
