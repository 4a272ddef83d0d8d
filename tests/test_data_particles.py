"""Systems of particles: energies, chains that sample them, what is known about them, and the cache."""

import math

import pytest
import torch

from flowattn.data import particles
from flowattn.data.batch import generator
from flowattn.data.chains import Langevin, anneal, rotations, sample, symmetrised
from flowattn.data.gaussian import helmert
from flowattn.data.particles import DoubleWell, LennardJones, cached
from flowattn.data.potentials import centred, double_well, energy_and_gradient, lennard_jones, pair_distances, virial

SMALL = {"num_train": 600, "num_val": 200, "num_test": 300, "num_walkers": 100, "burn_in": 10, "thinning": 5}


@pytest.fixture(scope="module")
def wells(tmp_path_factory):
    return DoubleWell(**SMALL, batch_size=100, eval_batch_size=300, cache_dir=tmp_path_factory.mktemp("wells"))


def trap(x):
    """A harmonic potential, whose samples and integral are known."""
    return 0.5 * x.square().sum((1, 2)) / 9


# -- energies


def test_the_double_well_of_a_pair_is_the_stated_polynomial():
    x = torch.tensor([[[0.0, 0.0], [3.0, 4.0]]], dtype=torch.float64)
    assert double_well(x).item() == pytest.approx(-4 * 1 + 0.9 * 1)


def test_a_lennard_jones_pair_rests_at_distance_one_and_is_counted_once():
    x = torch.tensor([[[-0.5, 0.0, 0.0], [0.5, 0.0, 0.0]]], dtype=torch.float64)
    energy, gradient = energy_and_gradient(lambda x: lennard_jones(x, depth=3.0, oscillator=0.0), x)
    assert energy.item() == pytest.approx(-3.0)
    torch.testing.assert_close(gradient, torch.zeros_like(x))
    assert lennard_jones(x, depth=0.0, oscillator=2.0).item() == pytest.approx(0.5)


@pytest.mark.parametrize("potential", [double_well, lennard_jones])
def test_energies_feel_neither_order_nor_place_nor_rotation(potential):
    x = 3 * torch.randn(20, 5, 3, dtype=torch.float64)
    moved = symmetrised(x, generator(0)) + torch.randn(20, 1, 3)
    torch.testing.assert_close(potential(moved), potential(x))


def test_rotations_are_orthogonal_and_half_of_them_mirror():
    Q = rotations(2000, 3, generator(0))
    torch.testing.assert_close(Q @ Q.mT, torch.eye(3, dtype=torch.float64).expand(2000, 3, 3))
    mirrored = (torch.linalg.det(Q) < 0).double().mean().item()
    assert abs(mirrored - 0.5) < 5 * 0.5 / math.sqrt(2000)
    assert Q.mean(0).abs().max() < 5 / math.sqrt(3 * 2000)


# -- chains


def test_annealing_finds_the_integral_of_a_gaussian():
    walkers, log_integral = anneal(trap, (3, 2), 4000, generator(0), scale=1.0)
    assert log_integral.item() == pytest.approx(2 * math.log(2 * math.pi * 9), abs=0.1)
    assert walkers.mean(1).abs().max() < 1e-10
    assert trap(walkers).mean().item() == pytest.approx(2.0, abs=5 * math.sqrt(2 / 1000))


def test_langevin_steps_keep_the_distribution_they_are_made_for():
    x = 3 * centred(torch.randn(4000, 3, 2, generator=generator(1), dtype=torch.float64))
    chain = Langevin(generator(0), step=2.0)
    x = chain.run(trap, x, 50, adapt=False)
    assert 0.2 < chain.acceptance < 0.99
    energy = trap(x)
    assert abs(energy.mean() - 2) < 5 * math.sqrt(2 / 4000)
    assert abs(energy.var() - 2) < 0.4


@pytest.mark.parametrize(
    "potential, shape, scale", [(double_well, (4, 2), 2.0), (lennard_jones, (5, 3), 1.0)], ids=["wells", "cluster"]
)
def test_samples_obey_the_virial_theorem(potential, shape, scale):
    x = sample(potential, shape, 1000, generator(0), num_walkers=500, burn_in=50, thinning=50, scale=scale)
    values = virial(potential, x)
    error = values.std() / math.sqrt(500)  # as if the two looks at each walker were the same
    assert abs(values.mean() - (shape[0] - 1) * shape[1]) < 5 * error
    assert error < 3.0
    assert x.mean(1).abs().max() < 1e-6


# -- the data modules


def test_the_shape_is_known_before_anything_is_sampled(tmp_path):
    assert DoubleWell(cache_dir=tmp_path).event_shape == (4, 2)
    assert LennardJones(cache_dir=tmp_path).event_shape == (13, 3)
    assert not list(tmp_path.iterdir())


def test_splits_are_mean_free_and_differ(wells):
    inputs = {name: wells.split(name).inputs for name in ("train", "val", "test")}
    assert [len(x) for x in inputs.values()] == [600, 200, 300]
    for x in inputs.values():
        assert x.mean(1).abs().max() < 1e-5
    assert not (inputs["train"][:200].unsqueeze(1) == inputs["val"]).all(-1).all(-1).any()


def test_the_same_seed_gives_the_same_samples_and_another_seed_others(tmp_path):
    few = {**SMALL, "num_test": 20}
    one, two, other = (
        DoubleWell(**few, cache_dir=tmp_path / folder, seed=seed)._samples("test")
        for folder, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_samples_are_read_from_the_cache_and_a_broken_file_is_made_anew(tmp_path):
    path, calls = tmp_path / "folder" / "x.pt", []

    def make():
        calls.append(1)
        return torch.arange(1000.0)

    for _ in range(2):
        assert torch.equal(cached(path, make), torch.arange(1000.0))
    assert len(calls) == 1
    path.write_bytes(path.read_bytes()[:700])
    assert torch.equal(cached(path, make), torch.arange(1000.0))
    assert len(calls) == 2 and len(list(path.parent.iterdir())) == 1


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        cached(tmp_path / "x.pt", lambda: torch.zeros(3))
    assert not list(tmp_path.iterdir())


def test_every_setting_is_part_of_the_name_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(particles, "sample", lambda *_, **__: torch.zeros(1, 4, 2))
    for options in ({}, {"seed": 1}, {"burn_in": 21}, {"thinning": 6}, {"num_test": 301}, {"num_walkers": 99}):
        DoubleWell(**{**SMALL, "cache_dir": tmp_path, **options})._samples("test")
    assert len(list(tmp_path.iterdir())) == 6


def test_training_batches_are_turned_and_an_epoch_resumes_with_the_same_turns(wells):
    loader = wells.train_dataloader()
    batches = list(loader)
    train = wells.split("train").inputs
    for batch in batches:
        torch.testing.assert_close(pair_distances(batch.inputs), pair_distances(train[batch.index]))
        assert (batch.inputs - train[batch.index]).abs().max() > 0.1
    resumed = wells.train_dataloader()
    stopped = wells.train_dataloader()
    steps = iter(stopped)
    for _ in range(3):
        next(steps)
    resumed.load_state_dict(stopped.state_dict())
    for got, wanted in zip(resumed, batches[3:], strict=True):
        assert torch.equal(got.inputs, wanted.inputs)
    resumed.set_epoch(1)
    assert not torch.equal(next(iter(resumed)).inputs, batches[0].inputs)


def test_two_ranks_turn_systems_as_one_process_does(wells):
    options = {"shuffle": True, "seed": 3}
    train = wells.split("train")
    one = next(iter(particles._TurningLoader(train, 100, **options)))
    for rank in range(2):
        part = next(iter(particles._TurningLoader(train, 50, rank=rank, num_ranks=2, **options)))
        assert torch.equal(part.index, one.index[rank::2])
        torch.testing.assert_close(part.inputs, one.inputs[rank::2])


def test_evaluation_batches_are_not_turned(wells):
    assert torch.equal(next(iter(wells.test_dataloader())).inputs, wells.split("test").inputs)


def test_the_entropy_is_the_mean_of_the_exact_log_density(wells, monkeypatch):
    monkeypatch.setattr(DoubleWell, "num_estimates", 2)
    monkeypatch.setattr(DoubleWell, "num_walkers_of_an_estimate", 500)
    entropy, error = wells.entropy()
    assert entropy == pytest.approx(7.12, abs=0.4) and error < 0.4
    log_density = wells.log_density(wells.split("test").all())
    assert log_density.shape == (300,)
    assert -log_density.mean().item() == pytest.approx(entropy, abs=1.0)


@pytest.mark.slow
def test_the_entropy_of_the_double_wells_is_712(tmp_path):
    entropy, error = DoubleWell(cache_dir=tmp_path).entropy()
    assert error < 0.02
    assert abs(entropy - 7.12) < 0.02 + 3 * error


def test_references_are_densities_on_the_mean_free_space(wells):
    batch = wells.split("test").all()
    references = {name: -log_prob(batch).mean().item() for name, log_prob in wells.references().items()}
    assert set(references) == {"Gaussian, diagonal", "Gaussian, full covariance"}
    scale = wells.split("train").inputs.double().square().sum((1, 2)).mean() / 6
    isotropic = 3 * math.log(2 * math.pi * scale) + 3
    assert all(abs(value - isotropic) < 0.3 for value in references.values())


def test_the_rows_of_the_basis_are_orthonormal_and_mean_free():
    H = helmert(5)
    torch.testing.assert_close(H @ H.T, torch.eye(4, dtype=torch.float64))
    assert H.sum(1).abs().max() < 1e-12


def test_the_picture_shows_distances_and_energies_even_of_bad_samples(wells):
    samples = torch.randn(50, 4, 2)
    samples[0] = torch.nan
    samples[1] = 0
    figure = wells.draw(wells.split("test").all(), samples)
    assert [axes.get_xlabel() for axes in figure.axes] == ["distance of a pair", "energy"]
    figure.canvas.draw()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_train": 0}, "num_train must be a whole number of at least 1; got num_train=0"),
        ({"thinning": -1}, "thinning must be a whole number of at least 1; got thinning=-1"),
        ({"burn_in": 0.5}, "burn_in must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
    ],
)
def test_bad_settings_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        DoubleWell(**options)


@pytest.mark.parametrize("name", ["depth", "oscillator"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_bad_constants_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number"):
        LennardJones(**{name: value})
