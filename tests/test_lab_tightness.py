"""How tight the bounds are: in small, what the figure says."""

import csv
import math

import pytest
import torch

from flowattn.experiments import tightness
from flowattn.lipschitz import lambert_w0, local_lipschitz


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tightness")
    tightness.main(["--quick", "--out", str(folder)])
    return folder


@pytest.fixture
def rows(out):
    with (out / "results" / "tightness.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_figure_is_a_picture(out):
    assert (out / "figures" / "tightness.png").read_bytes().startswith(b"\x89PNG")


def test_no_input_exceeds_its_bound(rows):
    assert {row["case"] for row in rows} == {"published, inf-norm", "random weights", *tightness.VARIANTS}
    assert all(0 < float(row["found"]) <= float(row["bound"]) for row in rows)


def test_the_search_does_at_least_as_well_as_the_construction(rows):
    own = [row for row in rows if row["case"] in ("plain", "bias")]
    assert own and all(float(row["found"]) >= float(row["two_points"]) * (1 - 1e-5) for row in own)


@pytest.mark.parametrize("features", [1, 2, 4])
@pytest.mark.parametrize("tokens", [3, 65, 301])
def test_two_points_stretch_as_far_as_their_formula_says(features, tokens):
    f = tightness.layer(features, "plain")
    w = lambert_w0(torch.tensor((tokens - 1) / math.e).double()).item()
    expected = 1 + 4 * w - 2 * w / (1 + w)
    assert tightness.stretch_of_row(f, *tightness.two_points(f, tokens)) == pytest.approx(expected, rel=1e-6)


def test_two_points_reach_nine_tenths_of_the_bound_at_1000_tokens():
    f = tightness.layer(2, "plain")
    reached = tightness.stretch_of_row(f, *tightness.two_points(f, 1000))
    assert 0.9 < reached / f.lipschitz_bound(1000).item() < 1


@pytest.mark.parametrize("variant", tightness.VARIANTS)
def test_the_stretch_of_a_row_is_a_lower_bound_of_the_local_constant(variant):
    f = tightness.layer(2, variant)
    x, row = tightness.two_points(f, 15)
    constant = local_lipschitz(f, x[None]).item()
    assert tightness.stretch_of_row(f, x, row) <= constant * (1 + 1e-9) <= f.lipschitz_bound(15).item()
