"""Systems of particles at temperature 1, sampled here: four in double wells, thirteen of Lennard and Jones."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pickle
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowattn.checks import check_positive
from flowattn.data.base import SPLITS, SequenceData, SplitOrAll
from flowattn.data.batch import Batch, Sequences, generator
from flowattn.data.chains import anneal_estimate, rotations, sample
from flowattn.data.loader import Loader
from flowattn.data.potentials import Potential, centred, double_well, lennard_jones, pair_distances

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Part of every cache key: raised whenever the same settings would be sampled differently.
VERSION = 1


class Particles(SequenceData):
    r"""Samples of :math:`e^{-U}` on the mean-free space, by parallel Markov chains, one set of chains for each split.

    Densities are on the mean-free space of (N - 1) D dimensions. Samples are kept in a folder, in a file for all the
    settings that they depend on; a file that cannot be read is made anew.

    Args:
        num_train, num_val, num_test: sizes of the splits.
        batch_size, eval_batch_size, predict_split, seed: as of `SequenceData`. The seed is that of the samples too.
        rotate: whether every training batch is turned and mirrored at random, each time differently.
        num_walkers: chains that run in parallel.
        burn_in: steps of each chain, after annealing, that are not looked at.
        thinning: steps between two looks.
        cache_dir: the folder; $XDG_CACHE_HOME/flowattn or ~/.cache/flowattn unless given.
    """

    shape: tuple[int, int]
    start_scale = 2.0  # standard deviation of the normal distribution that annealing starts from

    def __init__(
        self,
        num_train: int = 100_000,
        num_val: int = 10_000,
        num_test: int = 20_000,
        batch_size: int = 512,
        eval_batch_size: int | None = 2000,
        predict_split: SplitOrAll = "test",
        seed: int = 0,
        rotate: bool = True,
        num_walkers: int = 5000,
        burn_in: int = 100,
        thinning: int = 25,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, predict_split, seed)
        check_positive(num_train=num_train, num_val=num_val, num_test=num_test)
        check_positive(num_walkers=num_walkers, burn_in=burn_in, thinning=thinning)
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
        self.rotate = rotate
        self.num_walkers, self.burn_in, self.thinning = num_walkers, burn_in, thinning
        self.cache_dir = _cache_dir() if cache_dir is None else Path(cache_dir).expanduser()

    @property
    @abstractmethod
    def potential(self) -> Potential:
        """The energy U."""

    @property
    @abstractmethod
    def constants(self) -> dict[str, Any]:
        """What U is made of, for the key of the cache."""

    @property
    def event_shape(self) -> tuple[int, int]:
        return self.shape

    def prepare_data(self) -> None:
        """Samples what is not in the cache yet; Lightning calls it on one process of a machine."""
        for name in SPLITS:
            self._samples(name)

    def load(self) -> dict[str, Sequences]:
        return {name: Sequences(self._samples(name)) for name in SPLITS}

    def train_dataloader(self) -> Loader:
        loader = super().train_dataloader()
        if not self.rotate:
            return loader
        return _TurningLoader(
            loader.dataset, loader.batch_size, loader.shuffle, loader.seed, loader.rank, loader.num_ranks
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Zeros and ones: flows of particles have a `scale` of their own, and their results are measured with it."""
        return torch.zeros(self.shape[1]), torch.ones(self.shape[1])

    def references(self, mean_free: bool = True) -> dict[str, Callable[[Batch], Tensor]]:
        """Gaussians on the mean-free space, where these systems are."""
        return super().references(mean_free=True)

    def draw(self, data: Batch, samples: Float[Tensor, "samples tokens features"]) -> Figure:
        """Histograms of pair distances and of energies, of data and of samples."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        systems = {"data": data.inputs, "samples": samples}
        systems = {name: x[x.isfinite().all((1, 2))].detach().double().cpu() for name, x in systems.items()}
        distances = {name: pair_distances(x).flatten() for name, x in systems.items()}
        energies = {name: self.potential(x) for name, x in systems.items()}
        # Samples that collide have energies without bound: the axes are those of the data.
        low, high = energies["data"].min().item(), energies["data"].quantile(0.999).item()
        for axes, values, limits, label in (
            (left, distances, (0.0, 1.1 * distances["data"].max().item()), "distance of a pair"),
            (right, energies, (low - 0.05 * (high - low), high + 0.5 * (high - low)), "energy"),
        ):
            bins = torch.linspace(*limits, 81).tolist()
            for name, value in values.items():
                weights = torch.full_like(value, 80 / (limits[1] - limits[0]) / max(1, len(value))).numpy()
                axes.hist(value.numpy(), bins, weights=weights, histtype="step", label=name)
            axes.set_xlabel(label)
            axes.set_ylabel("density")
        left.legend()
        return figure

    def _samples(self, split: str) -> Tensor:
        num_walkers = min(self.num_walkers, self.sizes[split])
        settings = {
            "what": "samples",
            "split": split,
            "size": self.sizes[split],
            "walkers": num_walkers,
            "burn_in": self.burn_in,
            "thinning": self.thinning,
            "seed": self.seed,
        }

        def make() -> Tensor:
            return sample(
                self.potential,
                self.shape,
                self.sizes[split],
                generator(self.seed, SPLITS.index(split)),
                num_walkers=num_walkers,
                burn_in=self.burn_in,
                thinning=self.thinning,
                scale=self.start_scale,
            ).float()

        return centred(self._cached(settings, make).to(torch.get_default_dtype()))

    def _cached(self, settings: dict[str, Any], make: Callable[[], Tensor]) -> Tensor:
        settings = {"version": VERSION, "system": type(self).__name__, **self.constants, **settings}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        return cached(self.cache_dir / f"{type(self).__name__.lower()}-{settings['what']}-{key}.pt", make)


class DoubleWell(Particles):
    """DW4: four particles in the plane, each pair in a double well.

    U is `flowattn.data.potentials.double_well`. Its integral is known from sequential Monte Carlo, and with it the
    exact density of each system and the entropy, the floor of what any model can reach.
    """

    shape = (4, 2)
    num_estimates = 16  # of the integral
    num_walkers_of_an_estimate = 4096

    @property
    def potential(self) -> Potential:
        return double_well

    @property
    def constants(self) -> dict[str, Any]:
        return {}

    def entropy(self) -> tuple[float, float]:
        r"""The entropy :math:`H = \log Z + E\,U` in nats and its standard error, over independent estimates."""
        both = self._estimates().sum(1)
        return both.mean().item(), (both.std() / math.sqrt(len(both))).item()

    def log_density(self, batch: Batch) -> Float[Tensor, " batch"]:
        """The logarithm of e^-U / Z, exact up to the error of Z, about 0.01."""
        return -self.potential(batch.inputs.double()) - self._estimates()[:, 0].mean()

    def _estimates(self) -> Tensor:
        """Estimates of log Z and of the mean energy, [num_estimates, 2]."""
        num_walkers = self.num_walkers_of_an_estimate
        settings = {"what": "integral", "estimates": self.num_estimates, "walkers": num_walkers}

        def make() -> Tensor:
            stream = generator(0)
            draws = [
                anneal_estimate(self.potential, self.shape, num_walkers, stream) for _ in range(self.num_estimates)
            ]
            return torch.tensor(draws, dtype=torch.float64)

        return self._cached(settings, make)


class LennardJones(Particles):
    """LJ13: thirteen Lennard-Jones particles in space, in a harmonic trap.

    U is `flowattn.data.potentials.lennard_jones`: each pair is counted once, and the trap acts on distances from the
    centre, as Koehler, Klein and Noe (2020) have it. ``depth=2`` is the convention that counts each pair twice.

    Args:
        depth: the depth of the well of a pair.
        oscillator: the strength of the trap.
        options: those of `Particles`.
    """

    shape = (13, 3)
    start_scale = 1.0

    def __init__(self, depth: float = 1.0, oscillator: float = 1.0, **options: Any) -> None:
        for name, value in {"depth": depth, "oscillator": oscillator}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number; got {name}={value}.")
        super().__init__(**options)
        self.depth, self.oscillator = float(depth), float(oscillator)

    @property
    def potential(self) -> Potential:
        return functools.partial(lennard_jones, depth=self.depth, oscillator=self.oscillator)

    @property
    def constants(self) -> dict[str, Any]:
        return {"depth": self.depth, "oscillator": self.oscillator}


class _TurningLoader(Loader):
    """Turns and mirrors every system at random, as the seed, the epoch and its place in the order say."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            # As for one process with the batches of all ranks together, of which this rank has every W-th system.
            stream = generator(self.seed, self._epoch, self._position)
            turns = rotations(self.batch_size * self.num_ranks, batch.inputs.shape[-1], stream)
            yield batch._replace(inputs=batch.inputs @ turns[self.rank :: self.num_ranks].to(batch.inputs))


def cached(path: Path, make: Callable[[], Tensor]) -> Tensor:
    """The tensor in a file, made and written if it is missing or cannot be read. No reader ever sees half a file."""
    try:
        value = torch.load(path, weights_only=True)
        if isinstance(value, Tensor):
            return value
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        pass
    value = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            torch.save(value, file)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return value


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flowattn"
