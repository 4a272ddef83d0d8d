"""Which attention is Lipschitz: in small, what the figure says."""

import csv
import math
from functools import partial

import pytest
import torch

from flowattn.contractions import L2SelfAttention
from flowattn.experiments import _lab, unbounded
from flowattn.lipschitz import lambert_w0, search_lipschitz


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbounded")
    unbounded.main(["--quick", "--out", str(folder)])
    return folder


@pytest.fixture
def rows(out):
    with (out / "results" / "unbounded.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [row | {"scale": float(row["scale"]), "constant": float(row["constant"])} for row in rows]


def test_the_figure_is_a_picture_and_nothing_else_is_left(out):
    assert (out / "figures" / "unbounded.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "results").iterdir()) == ["unbounded.csv"]


def test_each_kind_fails_at_its_own_inputs_and_l2_at_none(rows):
    grown = {row["kind"]: row for row in unbounded.exponents(rows)}
    zero, between, blind, _ = unbounded.FAMILIES
    assert grown["dot product"][zero] == pytest.approx(2, abs=0.1)
    assert grown["L2, untied keys"][between] == pytest.approx(2, abs=0.1)
    assert grown["L2 without A"][blind] == pytest.approx(1, abs=0.15)
    assert grown["unsquared without A"][blind] == pytest.approx(1, abs=0.15)
    for kind in ("L2", "unsquared"):
        assert max(grown[kind][family] for family in unbounded.FAMILIES) < 0.1


def test_no_input_exceeds_the_bound_of_l2(rows):
    own = [row for row in rows if row["kind"] == "L2"]
    assert own and all(0 < row["constant"] <= float(row["bound"]) for row in own)


def test_the_formula_of_l2_is_that_of_the_library():
    w = {name: torch.randn(2, 4, 2).double() for name in "qkv"} | {"o": torch.randn(2, 2, 4).double()}
    x = torch.randn(3, 5, 4).double()
    expected = L2SelfAttention.from_paper_weights(w["q"], w["v"], w["o"])(x)
    torch.testing.assert_close(unbounded.attention(w, *unbounded.KINDS["L2"], x), expected)


def test_unsquared_distances_with_the_matrix_a_stay_below_the_bound_of_l2_but_have_a_kink():
    w = {name: torch.eye(2).double()[None] for name in "qkvo"}
    f = partial(unbounded.attention, w, *unbounded.KINDS["unsquared"])
    bound = (1 + 4 * lambert_w0(torch.tensor(5 / math.e)).item()) / math.sqrt(2)  # A is I / s
    assert search_lipschitz(f, (6, 2), num_restarts=8, num_steps=30, dtype=torch.float64).constant < bound
    jump = {row["kind"]: row["jump"] for row in unbounded.kink(_lab.Lab("unbounded"))}
    assert jump["L2"] < 1e-5 < 1e-2 < jump["unsquared"]


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    lab, ran = _lab.Lab("unbounded", out=tmp_path), []

    def job(name, fail=False):
        ran.append(name)
        if fail:
            raise KeyboardInterrupt
        return [{"name": name, "value": 0.1}]

    with pytest.raises(KeyboardInterrupt):
        lab.run({"a": partial(job, "a"), "b": partial(job, "b", fail=True)})
    rows = lab.run({"a": partial(job, "a"), "b": partial(job, "b")})
    assert ran == ["a", "b", "b"]
    assert rows == [{"name": "a", "value": 0.1}, {"name": "b", "value": 0.1}]
    lab.run({"a": partial(job, "a")})
    assert ran == ["a", "b", "b", "a"]  # a run that was finished begins anew


def test_a_stopped_run_of_other_options_is_not_continued(tmp_path):
    def stop():
        raise KeyboardInterrupt

    jobs = {"a": lambda: [{"value": 1}]}
    with pytest.raises(KeyboardInterrupt):
        _lab.Lab("unbounded", out=tmp_path).run(jobs | {"b": stop})
    other = {"a": lambda: [{"value": 2}]}
    assert _lab.Lab("unbounded", out=tmp_path, seed=1).run(other) == [{"value": 2}]


def test_what_is_random_depends_on_the_seed_and_the_label_alone():
    def draw(seed, *labels):
        return torch.rand(4, generator=_lab.Lab("unbounded", seed=seed).generator(*labels))

    assert torch.equal(draw(0, "a", 1), draw(0, "a", 1))
    assert not torch.equal(draw(0, "a", 1), draw(1, "a", 1))
    assert not torch.equal(draw(0, "a", 1), draw(0, "a", 2))
