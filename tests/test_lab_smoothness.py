"""The experiment `smoothness` at its quick size."""

import csv

import pytest

from flowattn.experiments import smoothness


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("smoothness")
    smoothness.main(["--quick", "--out", str(out)])
    assert (out / "figures" / "smoothness.png").stat().st_size > 10_000
    with (out / "results" / "smoothness.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adversarial_tokens_have_the_exponent_one_half_with_and_without_a_mask(rows):
    typed = [row | {name: float(row[name]) for name in ("tokens", "constant")} for row in rows]
    fitted = smoothness.exponents(typed)
    adversarial = [row["exponent"] for row in fitted if "adversarial" in row["part"] + row["series"]]
    assert len(adversarial) == 6
    assert all(abs(exponent - 0.5) <= 0.05 for exponent in adversarial)


def test_no_constant_is_above_its_bound_and_no_bound_of_ours_above_a_published_one(rows):
    bounded = [row for row in rows if row["bound"]]
    assert bounded
    for row in bounded:
        assert float(row["constant"]) <= float(row["bound"]) <= float(row["published_bound"])


def test_the_mean_field_keeps_long_sequences_from_growing(rows):
    regime = [float(row["constant"]) for row in rows if row["part"] == "regimes"]
    assert regime[-1] < 1.1 * regime[-5] and regime[5] > 2 * regime[0]


def test_layer_norm_undoes_the_scale_of_tokens(rows):
    norm = {(row["series"], float(row["radius"])): float(row["constant"]) for row in rows if row["part"] == "LayerNorm"}
    small, large = sorted({radius for _, radius in norm})
    assert norm["attention", large] > norm["attention", small]
    ratio = norm["behind LayerNorm", small] / norm["behind LayerNorm", large]
    assert ratio == pytest.approx(large / small, rel=0.05)


def test_pretrained_weights_without_transformers_are_refused_in_words(monkeypatch, tmp_path):
    monkeypatch.setattr(smoothness._huggingface, "is_installed", lambda: False)
    with pytest.raises(SystemExit, match="transformers, which is not installed"):
        smoothness.main(["--quick", "--out", str(tmp_path), "--pretrained", str(tmp_path)])
