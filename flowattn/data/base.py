"""The data module that all of ours are: splits of sequences, what is known about them, and pictures of them."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from pytorch_lightning import LightningDataModule
from torch import Tensor

from flowattn.checks import check_choice, check_positive
from flowattn.data.batch import Batch, Sequences, generator
from flowattn.data.gaussian import Gaussian, mean_free_coordinates
from flowattn.data.loader import Loader
from flowattn.data.pictures import draw_sequences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Batch", "Loader", "SequenceData", "Sequences", "generator"]

Split = Literal["train", "val", "test"]
SplitOrAll = Literal["train", "val", "test", "all"]
SPLITS = ("train", "val", "test")


class SequenceData(LightningDataModule, ABC):
    """Sequences of tokens in three splits, and what is known about their density.

    Inputs are yielded in the user's own units: a model that wants them standardised asks for the `moments` and keeps
    them, so that its densities and samples are in these units too.

    A subclass says its `event_shape` before any data is read, and makes its splits in `load`. It may know more:
    the exact `log_density` and its `entropy`, other `references`, `labels` of anomalies, a better picture.

    Args:
        batch_size: the number of sequences in a batch of training, on each device.
        eval_batch_size: the same for evaluation; None for `batch_size`.
        predict_split: the split that `predict` goes through; "all" for every sequence, in the order of the user's file
            where there is one, and otherwise one split after another.
        seed: of the order of batches, and of whatever a subclass draws or generates.
    """

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int | None = None,
        predict_split: SplitOrAll = "test",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_positive(batch_size=batch_size)
        if eval_batch_size is not None:
            check_positive(eval_batch_size=eval_batch_size)
        check_choice("predict_split", predict_split, (*SPLITS, "all"))
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0; got seed={seed!r}.")
        # In evaluation, a rank to which no sequence falls waits for the others.
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.batch_size = batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.predict_split: SplitOrAll = predict_split
        self.seed = seed
        self._splits: dict[str, Sequences] | None = None
        self._references: dict[bool, dict[str, Callable[[Batch], Tensor]]] = {}

    @property
    @abstractmethod
    def event_shape(self) -> tuple[int, int]:
        """The largest number of tokens, and their width; known before any data is read."""

    @property
    def context_features(self) -> int | None:
        """How many features the context has, beside the mask; None without any. Known before any data is read."""
        return None

    @abstractmethod
    def load(self) -> dict[str, Sequences]:
        """Reads or generates the splits "train", "val" and "test"."""

    def setup(self, stage: str | None = None) -> None:
        """Loads the splits, once, whatever the stage."""
        if self._splits is None:
            splits = self.load()
            for name in SPLITS:
                if len(splits[name]) == 0:
                    raise ValueError(f"The split {name!r} of {type(self).__name__} has no sequences.")
                if tuple(splits[name].inputs.shape[1:]) != self.event_shape:
                    raise ValueError(
                        f"The split {name!r} of {type(self).__name__} has events of shape "
                        f"{list(splits[name].inputs.shape[1:])}; event_shape says {list(self.event_shape)}."
                    )
            self._splits = splits

    def split(self, name: Split) -> Sequences:
        """One of the splits; loads them if `setup` was not called."""
        check_choice("name", name, SPLITS)
        self.setup()
        assert self._splits is not None
        return self._splits[name]

    def whole(self) -> Sequences:
        """All splits together, in the order of the user's file where there is one."""
        return Sequences.join([self.split(name) for name in ("train", "val", "test")])

    def train_dataloader(self) -> Loader:
        overfit = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._loader(self.split("train"), self.batch_size, shuffle=not overfit)

    def val_dataloader(self) -> Loader:
        return self._loader(self.split("val"), self.eval_batch_size)

    def test_dataloader(self) -> Loader:
        return self._loader(self.split("test"), self.eval_batch_size)

    def predict_dataloader(self) -> Loader:
        chosen = self.whole() if self.predict_split == "all" else self.split(self.predict_split)
        return self._loader(chosen, self.eval_batch_size)

    def moments(self) -> tuple[Float[Tensor, " features"], Float[Tensor, " features"]]:
        """The mean and the standard deviation of each feature over the real tokens of the train split."""
        tokens = self.split("train").tokens()
        constant = tokens.amin(0) == tokens.amax(0)
        if constant.any():
            feature = int(constant.nonzero()[0])
            raise ValueError(
                f"Feature {feature} of {type(self).__name__} is {tokens[0, feature].item()} in every token of the "
                "train split: it has no density. Leave it out."
            )
        tokens = tokens.double()
        return tokens.mean(0).to(torch.get_default_dtype()), tokens.std(0).to(torch.get_default_dtype())

    def log_density(self, batch: Batch) -> Float[Tensor, " batch"] | None:
        """The exact log-density of each sequence in nats, where it is known."""
        return None

    def entropy(self) -> tuple[float, float] | None:
        """The entropy of a sequence in nats and its standard error, where it is known."""
        return None

    def references(self, mean_free: bool = False) -> dict[str, Callable[[Batch], Tensor]]:
        """Log-densities of each sequence under simple models fitted on the train split, by name.

        Gaussians of whole sequences; of tokens, one like the other, where lengths vary. The one with the full
        covariance is missing where the train split is too small or too degenerate to have one.

        Args:
            mean_free: whether they are to be densities on the space in which the tokens of a sequence add up to zero;
                there are none of sequences with a mask then.
        """
        if mean_free not in self._references:
            train = self.split("train")
            if mean_free and train.mask is not None:
                return {}
            train = mean_free_coordinates(train.inputs) if mean_free else train
            found = {"Gaussian, diagonal": Gaussian.fit(train, diagonal=True)}
            if Gaussian.has_full_covariance(train):
                found["Gaussian, full covariance"] = Gaussian.fit(train)
            self._references[mean_free] = {
                name: functools.partial(_mean_free, gaussian) if mean_free else gaussian
                for name, gaussian in found.items()
            }
        return self._references[mean_free]

    def labels(self, split: Split) -> Int[Tensor, " sequences"] | None:
        """1 for each anomalous sequence of a split, 0 for the others, where a module has them."""
        return None

    def draw(self, data: Batch, samples: Float[Tensor, "samples tokens features"]) -> Figure:
        """A picture of data beside samples."""
        return draw_sequences(data, samples)

    def _loader(self, sequences: Sequences, batch_size: int, shuffle: bool = False) -> Loader:
        rank, num_ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return Loader(sequences, batch_size, shuffle, self.seed, rank, num_ranks)


def _mean_free(gaussian: Gaussian, batch: Batch) -> Tensor:
    return gaussian(mean_free_coordinates(batch.inputs).all())
