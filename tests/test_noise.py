from types import SimpleNamespace

import pytest
import torch

from flowattn.data.batch import Sequences
from flowattn.training.noise import NoisyInputs


def test_noise_is_that_of_each_feature_and_the_data_stay_as_they_are():
    torch.manual_seed(0)
    split = Sequences(torch.zeros(500, 20, 2))
    module = SimpleNamespace(standardize=SimpleNamespace(scale=torch.tensor([1.0, 50.0])))
    batch = split.batch(torch.arange(500))
    NoisyInputs(0.1).on_train_batch_start(None, module, batch, 0)
    deviation = batch.inputs.flatten(0, 1).std(0)
    torch.testing.assert_close(deviation, torch.tensor([0.1, 5.0]), rtol=0.03, atol=0)
    assert split.inputs.count_nonzero() == 0


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ValueError, match="scale must be a positive number; got scale="):
        NoisyInputs(scale)
