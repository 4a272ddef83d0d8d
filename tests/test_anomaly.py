import csv

import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

from flowattn.data.batch import Sequences
from flowattn.experiments import anomaly


def labelled(normal=40, anomalies=30, gap=1.0):
    random = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.zeros(normal), torch.ones(anomalies)]).long()
    return torch.randn(normal + anomalies, generator=random) + gap * labels, labels


def test_auroc_is_the_share_of_pairs_in_the_right_order():
    scores, labels = labelled()
    scores[:9] = scores[-9:]  # ties count half
    difference = scores[labels == 1].unsqueeze(1) - scores[labels == 0]
    share = (difference > 0).double().mean() + 0.5 * (difference == 0).double().mean()
    assert abs(anomaly.auroc(scores, labels)[0] - share) < 1e-6


def test_scores_far_from_zero_are_told_apart():
    scores, labels = labelled()
    near, _ = anomaly.auroc(scores, labels)
    assert anomaly.auroc(scores + 1000, labels)[0] == anomaly.auroc(1000 * scores - 1e5, labels)[0] == near
    assert binary_auroc(scores + 1000, labels) == 0.5  # what torchmetrics alone makes of them


def test_the_standard_error_is_the_spread_over_data_sets():
    random = torch.Generator().manual_seed(1)
    labels = torch.cat([torch.zeros(60), torch.ones(60)]).long()
    draws = [anomaly.auroc(torch.randn(120, generator=random) + labels, labels) for _ in range(200)]
    areas, errors = (torch.tensor(values) for values in zip(*draws, strict=True))
    assert 0.8 < errors.mean() / areas.std() < 1.25


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        ([0.0, torch.nan], [0, 1], "scores must be finite; got nan"),
        ([0.0, 1.0], [1, 1], "labels must have both kinds; got 0 normal sequences and 2 anomalies"),
        ([0.0, 1.0], [0, 0], "labels must have both kinds; got 2 normal sequences and 0 anomalies"),
    ],
)
def test_what_has_no_roc_is_refused(scores, labels, message):
    with pytest.raises(ValueError, match=message):
        anomaly.auroc(torch.tensor(scores), torch.tensor(labels))


def test_a_score_is_per_real_token_and_does_not_depend_on_the_batch():
    mask = torch.tensor([[True, True, True], [True, False, False], [True, True, False]])
    split = Sequences(torch.ones(3, 3, 2), mask)

    def log_prob(batch):
        return -batch.inputs.sum((1, 2))

    for batch_size in (1, 2, 200):
        assert torch.equal(anomaly.scores(log_prob, split, batch_size), torch.full((3,), 2.0, dtype=torch.float64))


def test_the_picture_has_a_curve_for_each_score_and_all_utterances():
    scores, labels = labelled()
    figure = anomaly.draw(labels, scores, {"noise": torch.randn(len(labels))})
    roc, histogram = figure.axes
    assert [text.get_text()[:5] for text in roc.get_legend().get_texts()] == ["flow,", "noise"]
    assert "70 utterances" in histogram.get_title()


def test_a_missing_checkpoint_is_named(capsys):
    with pytest.raises(SystemExit):
        anomaly.main(["--checkpoint", "nowhere.ckpt"])
    assert "--checkpoint must be a file; got nowhere.ckpt" in capsys.readouterr().err


def test_it_trains_scores_and_draws(tmp_path, monkeypatch):
    pytest.importorskip("aeon")
    monkeypatch.chdir(tmp_path)
    anomaly.main(["--quick", "--out", "docs"])
    with open("docs/results/anomaly.csv", newline="") as file:
        rows = {row["score"]: float(row["AUROC"]) for row in csv.DictReader(file)}
    assert set(rows) == {"flow", "Gaussian, diagonal", "Gaussian, full covariance"}
    assert (tmp_path / "docs/figures/anomaly.png").stat().st_size > 10_000

    anomaly.main(["--out", "again", "--checkpoint", "runs/anomaly/checkpoints/best.ckpt"])
    assert (tmp_path / "docs/results/anomaly.csv").read_text() == (tmp_path / "again/results/anomaly.csv").read_text()
