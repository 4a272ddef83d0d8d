"""Recordings that come with other packages: the watch and the vowels."""

import re
import sys
from pathlib import Path

import pytest
import torch

from flowattn.data.vowels import JapaneseVowels
from flowattn.data.watch import Smartwatch


@pytest.fixture(scope="module")
def watch():
    pytest.importorskip("seglearn")
    data = Smartwatch()
    data.setup()
    return data


@pytest.fixture(scope="module")
def vowels():
    pytest.importorskip("aeon")
    data = JapaneseVowels(normal_speakers=[1, 2, 3])
    data.setup()
    return data


def test_watch_is_windows_of_32_by_6_from_ten_people(watch):
    assert watch.event_shape == (32, 6)
    assert [len(watch.split(name)) for name in ("train", "val", "test")] == [5168, 780, 1613]


def test_windows_of_training_overlap_when_they_are_asked_to(watch):
    half = Smartwatch(step=16)
    torch.testing.assert_close(half.split("train").inputs[1, :16], watch.split("train").inputs[0, 16:])
    assert len(half.split("train")) == 10293
    assert torch.equal(half.split("test").inputs, watch.split("test").inputs)


def test_watch_gaussian_has_the_density_that_is_documented(watch):
    batch = watch.split("test").all()
    nll = -watch.references()["Gaussian, full covariance"](batch).mean() / 192
    standardised = nll - watch.moments()[1].log().mean()
    assert nll == pytest.approx(-0.7305, abs=2e-3)
    assert standardised == pytest.approx(-0.6953, abs=2e-3)


def test_vowels_have_7_to_29_tokens_before_their_padding(vowels):
    lengths = torch.cat([vowels.split(name).mask.sum(1) for name in ("train", "val", "test")])
    assert (int(lengths.min()), int(lengths.max()), len(lengths)) == (7, 29, 640)
    mask = vowels.split("test").mask
    assert (mask.long().diff(dim=1) <= 0).all()
    assert (vowels.split("test").inputs[~mask] == 0).all()


def test_strangers_are_in_the_test_only(vowels):
    for name in ("train", "val"):
        assert set(vowels.speakers(name).tolist()) == {1, 2, 3}
        assert vowels.labels(name).sum() == 0
    labels, speakers = vowels.labels("test"), vowels.speakers("test")
    assert set(speakers[labels == 1].tolist()) == {4, 5, 6, 7, 8, 9}
    assert set(speakers[labels == 0].tolist()) == {1, 2, 3}
    assert (len(labels), int(labels.sum())) == (550, 396)


def test_no_utterance_is_in_two_splits(vowels):
    rows = torch.cat([vowels.split(name).inputs.flatten(1) for name in ("train", "val", "test")])
    assert len(rows.unique(dim=0)) == len(rows)


def test_without_normal_speakers_nobody_is_a_stranger():
    pytest.importorskip("aeon")
    data = JapaneseVowels()
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [216, 54, 370]
    assert data.labels("test") is None


@pytest.mark.parametrize("speakers", [[], [0], [1, 1], [1, 10], list(range(1, 10))])
def test_impossible_speakers_are_refused(speakers):
    with pytest.raises(ValueError, match=re.escape(f"got normal_speakers={speakers}")):
        JapaneseVowels(normal_speakers=speakers)


@pytest.mark.parametrize("data, package", [(Smartwatch, "seglearn"), (JapaneseVowels, "aeon")])
def test_a_missing_package_is_named_with_the_command(monkeypatch, data, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape(f"{package}: pip install 'flowattn[data]'")):
        data().setup()
    assert data().event_shape[0] in (29, 32)


@pytest.mark.parametrize("data, package", [(Smartwatch, "seglearn"), (JapaneseVowels, "aeon")])
def test_a_missing_file_is_named_with_the_command(monkeypatch, data, package):
    pytest.importorskip(package)
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    with pytest.raises(FileNotFoundError, match=f"should have come with {package}: pip install"):
        data().setup()
