"""Loaders: the order of batches, their shares over ranks, and going on where a run was cut off."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from flowattn.data import Loader, SequenceData, Sequences
from flowattn.data.batch import generator


def numbered(size: int) -> Sequences:
    return Sequences(torch.arange(float(size)).reshape(size, 1, 1).expand(size, 3, 2).clone())


def rows(loader) -> list[list[int]]:
    return [batch.index.tolist() for batch in loader]


def test_a_batch_holds_the_rows_it_names():
    mask = torch.rand(9, 3) < 0.5
    mask[:, 0] = True
    split = Sequences(numbered(9).inputs, mask, torch.arange(9.0).reshape(9, 1))
    batch = split.batch(torch.tensor([7, 2]))
    assert (batch.inputs[mask[[7, 2]]] == torch.tensor([7.0, 2.0]).reshape(2, 1, 1).expand(2, 3, 2)[mask[[7, 2]]]).all()
    assert ((batch.context == -torch.inf).all(-1) == ~mask[[7, 2]]).all()
    assert batch.context[:, 0, 0].tolist() == [7.0, 2.0]


def test_padding_is_zeroed_and_other_values_must_be_finite():
    inputs = torch.full((1, 2, 1), torch.nan)
    inputs[0, 0] = 1.0
    assert Sequences(inputs, torch.tensor([[True, False]])).inputs.tolist() == [[[1.0], [0.0]]]
    with pytest.raises(ValueError, match=r"finite at real tokens; got nan at index \[0, 1, 0\]"):
        Sequences(inputs)


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        loader = Loader(numbered(50), 5, shuffle=True, seed=seed)
        loader.set_epoch(epoch)
        return rows(loader)

    assert order(3, 4) == order(3, 4)
    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_order_does_not_depend_on_the_global_random_state():
    loader = Loader(numbered(20), 5, shuffle=True)
    before = rows(loader)
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    assert rows(loader) == before
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_that_share_their_low_bits_give_other_streams():
    draws = {torch.rand(1, generator=generator(5 + (high << 32))).item() for high in range(4)}
    assert len(draws) == 4


@pytest.mark.parametrize("taken", [0, 1, 3, 6])
def test_resuming_gives_exactly_the_batches_still_to_come(taken):
    loader = Loader(numbered(35), 5, shuffle=True, seed=1)
    loader.set_epoch(2)
    running = iter(loader)
    for _ in range(taken):
        next(running)
    again = Loader(numbered(35), 5, shuffle=True, seed=1)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(2)
    assert rows(again) == [batch.index.tolist() for batch in running]
    assert len(again) == len(loader) == 7
    again.set_epoch(3)
    loader.set_epoch(3)
    assert rows(again) == rows(loader)
    assert len(rows(again)) == 7


def test_a_restored_loader_starts_the_next_epoch_from_its_beginning():
    loader = Loader(numbered(35), 5, shuffle=True)
    list(loader)
    again = Loader(numbered(35), 5, shuffle=True)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)
    loader.set_epoch(1)
    assert rows(again) == rows(loader)


def test_resuming_with_another_batch_size_is_refused_in_mid_epoch_only():
    loader = Loader(numbered(35), 5, shuffle=True)
    next(iter(loader))
    other = Loader(numbered(35), 7, shuffle=True)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match=r"middle of epoch 0.* global_batch_size was 5 and is 7"):
        next(iter(other))
    other.load_state_dict(loader.state_dict())
    other.set_epoch(1)
    assert len(rows(other)) == 5


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shards_of_a_training_step_make_the_batch_of_one_process(num_ranks):
    batch_size = 6 // num_ranks
    shards = [rows(Loader(numbered(40), batch_size, True, 5, rank, num_ranks)) for rank in range(num_ranks)]
    whole = rows(Loader(numbered(40), 6, True, 5))
    for step, together in enumerate(whole):
        assert sorted(row for shard in shards for row in shard[step]) == sorted(together)
    assert {len(shard) for shard in shards} == {len(whole)} == {6}


@pytest.mark.parametrize("size", [1, 2, 5, 12, 13, 40])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_evaluation_counts_each_sequence_once(size, num_ranks):
    loaders = [Loader(numbered(size), 4, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    shares = [rows(loader) for loader in loaders]
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(size))
    assert [len(share) for share in shares] == [len(loader) for loader in loaders]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_state_loads_from_a_file_of_weights_only(tmp_path):
    loader = Loader(numbered(20), np.int64(5), shuffle=np.True_, seed=np.int64(1))
    next(iter(loader))
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == loader.state_dict()


def test_a_batch_that_the_data_cannot_fill_is_refused():
    with pytest.raises(ValueError, match="batch_size=8, 2 ranks and 15 sequences"):
        Loader(numbered(15), 8, shuffle=True, num_ranks=2)


class Numbered(SequenceData):
    event_shape = (3, 2)

    def load(self):
        return {"train": numbered(32), "val": numbered(5), "test": numbered(7)}


class Recorder(pl.LightningModule):
    """Keeps the rows of every training batch it sees."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch):
        self.seen.append((self.current_epoch, batch.index.tolist()))
        return self.weight * batch.inputs.mean()

    def validation_step(self, batch):
        pass

    def test_step(self, batch):
        self.seen.append(batch.index.tolist())

    def predict_step(self, batch):
        return batch.index

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class SaveEveryStep(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit(max_steps, checkpoint=None, **options):
    model = Recorder()
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(model, Numbered(batch_size=4), ckpt_path=checkpoint)
    return model.seen


def test_lightning_goes_on_with_the_very_batches_that_were_next(tmp_path):
    undisturbed = fit(20, callbacks=[SaveEveryStep(tmp_path)])
    assert len({str(batch) for _, batch in undisturbed}) == 20
    for taken in (3, 8, 13, 16):  # the epochs end after 8 and 16
        rest = fit(20, tmp_path / f"{taken}.ckpt")
        assert rest == undisturbed[taken:]


def test_lightning_tests_and_predicts_every_sequence_once():
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    model = Recorder()
    trainer.test(model, Numbered(batch_size=3), verbose=False)
    assert model.seen == [[0, 1, 2], [3, 4, 5], [6]]
    predicted = trainer.predict(model, Numbered(eval_batch_size=4, predict_split="val"))
    assert [index.tolist() for index in predicted] == [[0, 1, 2, 3], [4]]


def test_all_splits_can_be_predicted_one_after_another():
    loader = Numbered(eval_batch_size=100, predict_split="all").predict_dataloader()
    (batch,) = loader
    data = Numbered()
    splits = [data.split(name).inputs for name in ("train", "val", "test")]
    assert torch.equal(batch.inputs, torch.cat(splits))
    assert batch.index.tolist() == list(range(len(batch.inputs)))


def test_moments_are_those_of_the_real_tokens():
    class Masked(Numbered):
        def load(self):
            mask = torch.arange(3) < torch.tensor([1, 2, 3, 3] * 8).unsqueeze(1)
            train = Sequences(numbered(32).inputs + torch.randn(32, 3, 2), mask)
            return {**super().load(), "train": train}

    data = Masked()
    train = data.split("train")
    torch.testing.assert_close(data.moments(), (train.inputs[train.mask].mean(0), train.inputs[train.mask].std(0)))


def test_a_feature_that_never_changes_has_no_moments():
    class Constant(Numbered):
        def load(self):
            inputs = torch.randn(32, 3, 2)
            inputs[:, :, 1] = 0.1
            return dict.fromkeys(("train", "val", "test"), Sequences(inputs))

    with pytest.raises(ValueError, match=r"Feature 1 of Constant is 0.1\d* in every token of the train split"):
        Constant().moments()


def test_splits_must_have_the_shape_that_was_announced():
    class Wrong(Numbered):
        event_shape = (3, 4)

    with pytest.raises(ValueError, match=r"has events of shape \[3, 2\]; event_shape says \[3, 4\]"):
        Wrong().setup()


def test_overfitting_sees_the_same_batch_in_every_epoch():
    seen = fit(3, overfit_batches=1)
    assert len({str(batch) for _, batch in seen}) == 1
