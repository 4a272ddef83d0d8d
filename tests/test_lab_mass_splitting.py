"""The experiment `mass_splitting` at its quick size."""

import csv

import pytest

from flowattn.experiments import mass_splitting


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("mass_splitting")
    mass_splitting.main(["--quick", "--out", str(out)])
    assert (out / "figures" / "mass_splitting.png").stat().st_size > 10_000
    with (out / "results" / "mass_splitting.csv").open() as file:
        return list(csv.DictReader(file))


def test_splitting_beats_moving_for_negative_matrices_and_large_radii_only(rows):
    best = {(row["matrix"], row["radius"]): float(row["best_ratio"]) for row in rows if row["part"] == "local"}
    assert best["A = -I", "3"] > 1.1
    assert best["A = -I", "1"] < 1 and best["A = I", "3"] < 1 and best["A = I", "1"] < 1


def test_free_weights_help_the_split(rows):
    local = [row for row in rows if row["part"] == "local"]
    assert all(float(row["best_ratio_weighted"]) > float(row["best_ratio"]) for row in local)


def test_small_attacks_reach_the_local_constants_and_do_not_exceed_them(rows):
    small = min((row for row in rows if row["part"] == "attack"), key=lambda row: float(row["distance"]))
    for name in ("moving", "splitting"):
        assert float(small[name]) == pytest.approx(float(small[f"local_{name}"]), rel=0.03)
    assert float(small["attack_ratio"]) > 1.05
