"""Whether attention can be inverted: in small, what the figure says."""

import csv

import pytest
import torch

from flowattn.experiments import _lab, invertibility
from flowattn.experiments.invertibility import COEFFICIENTS, INPUTS, KINDS


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("invertibility")
    invertibility.main(["--quick", "--out", str(folder)])
    return folder


@pytest.fixture
def rows(out):
    with (out / "results" / "invertibility.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v if k in ("kind", "inputs") else float(v or "nan") for k, v in row.items()} for row in rows]


def last(rows, kind, inputs, c):
    return _lab.where(rows, kind=kind, inputs=inputs, coefficient=c)[-1]["largest_error"]


def test_the_figure_is_a_picture(out):
    assert (out / "figures" / "invertibility.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("c", COEFFICIENTS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_l2_is_inverted_at_all_inputs(rows, inputs, c):
    assert last(rows, KINDS[0], inputs, c) < 1e-6


@pytest.mark.parametrize("c", COEFFICIENTS)
def test_dot_products_are_not_inverted_with_one_token_at_0(rows, c):
    assert last(rows, KINDS[1], "one token at 0", c) > 1e-2
    assert last(rows, KINDS[2], "one token at 0", c) > 1e-2


@pytest.mark.parametrize("c", COEFFICIENTS)
def test_dot_products_are_inverted_where_their_constant_was_measured(rows, c):
    assert last(rows, KINDS[2], "normal", c) < 1e-6


def test_the_certified_error_is_never_below_the_true_one_and_only_l2_has_one(rows):
    for row in rows:
        if row["kind"] == KINDS[0]:
            assert row["largest_error"] <= row["certified_error"] * (1 + 1e-5) + 1e-13
        else:
            assert row["certified_error"] != row["certified_error"]


def test_the_inputs_are_those_of_the_paper():
    x = invertibility.draw_inputs(_lab.Lab("invertibility"), invertibility.QUICK, "one token at 0", 5)
    assert x.shape == (5, 8, 8) and (x[:, 0] == 0).all()
    assert x[:, 1:].std() == pytest.approx(invertibility.FAR, rel=0.2)
    assert torch.equal(x, invertibility.draw_inputs(_lab.Lab("other"), invertibility.QUICK, "one token at 0", 5))
