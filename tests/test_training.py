"""The parts of training, one by one."""

import math

import numpy as np
import pytest
import torch
from nflows.transforms import LULinear
from torch import nn

from flowattn.data.arrays import ArraySequences
from flowattn.data.batch import Batch
from flowattn.data.gaussian import helmert
from flowattn.flows import AttentionFlow, ParticleFlow, TransformFlow
from flowattn.logdet import ExactLogDet, PowerSeries, RussianRoulette
from flowattn.training import EMA, DensityModule, NotFinite, SequenceTrainer, WarmupCosine
from flowattn.training.checkpoint_io import CheckpointError, read_checkpoint, write_checkpoint
from flowattn.training.exact import exact_logdets
from flowattn.training.guards import check_batch, check_loss
from flowattn.training.monitors import captured_inputs, maps
from flowattn.training.predictions import histogram
from flowattn.training.random_state import generators, get_state, set_state
from flowattn.training.report import Report
from flowattn.transforms import InvertibleAttention, TokenActNorm
from tests.tiny import RandomFlow, Tiny


def small_flow(event_shape, **options):
    return AttentionFlow(event_shape, depth=1, num_heads=2, hidden=4, **options)


def trainer(folder, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    return SequenceTrainer(default_root_dir=folder, accelerator="cpu", enable_checkpointing=False, **quiet, **options)


# -- the density


def test_densities_are_in_the_units_of_the_data():
    module = DensityModule(small_flow, (1, 2), standardize=True).eval()
    module.standardize.fix(torch.tensor([5.0, -100.0]), torch.tensor([0.1, 20.0]))
    grid = torch.cartesian_prod(torch.linspace(4.3, 5.7, 141), torch.linspace(-240, 40, 141))
    total = module.log_prob(grid.unsqueeze(1)).exp().sum() * (1.4 / 140) * (280 / 140)
    assert total.item() == pytest.approx(1, abs=1e-3)
    samples = module.sample(2000)
    assert samples.mean((0, 1)).tolist() == pytest.approx([5, -100], rel=0.05)
    assert not samples.requires_grad


@pytest.fixture
def mean_free_file(tmp_path):
    """Systems of three particles in the plane, centred, and ten times as wide along one axis as along the other."""
    inputs = torch.randn(400, 3, 2, dtype=torch.float64) * torch.tensor([10.0, 1.0])
    np.save(tmp_path / "systems.npy", (inputs - inputs.mean(1, keepdim=True)).numpy())
    return ArraySequences(str(tmp_path / "systems.npy"), batch_size=8)


def test_the_density_of_ones_own_particles_is_one_of_the_mean_free_space(mean_free_file, tmp_path):
    module = DensityModule(lambda shape: ParticleFlow(shape, depth=1), (3, 2))
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=mean_free_file)
    module.eval().double()
    scale = module.standardize.scale
    assert scale[0] == scale[1] and scale[0] > 3 and module.standardize.mean.eq(0).all()
    # In orthonormal coordinates of the four dimensions, a density and its sampler agree: E_p[q / p] = 1.
    deviation = 1.3 * scale[0]
    u = deviation * torch.randn(20_000, 2, 2, dtype=torch.float64)
    log_q = torch.distributions.Normal(0, deviation).log_prob(u).sum((1, 2))
    with torch.no_grad():
        weights = (module.log_prob(helmert(3).T @ u) - log_q).exp()
        turned = module.log_prob(helmert(3).T @ u[:5].flip(2))
    assert abs(weights.mean() - 1) < 4 * weights.std() / 20_000**0.5
    torch.testing.assert_close(turned, module.log_prob(helmert(3).T @ u[:5]))


def test_the_references_of_ones_own_particles_are_of_the_same_space(mean_free_file, tmp_path):
    module = DensityModule(lambda shape: ParticleFlow(shape, depth=1), (3, 2))
    trainer(tmp_path).test(module, datamodule=mean_free_file, ckpt_path=None)
    assert "Gaussian, full covariance" in (tmp_path / "test.csv").read_text()
    batch = mean_free_file.split("test").all()
    nll = -mean_free_file.references(mean_free=True)["Gaussian, full covariance"](batch).mean().item()
    assert nll == pytest.approx(2 * math.log(2 * math.pi * math.e) + 2 * math.log(10), abs=0.6)


def test_a_context_that_the_flow_would_not_look_at_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", inputs=torch.randn(40, 4, 2).numpy(), context=torch.randn(40, 3).numpy())
    data = ArraySequences(str(tmp_path / "a.npz"), batch_size=8)
    blind, seeing = small_flow, lambda shape: small_flow(shape, context_features=3)
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(DensityModule(seeing, (4, 2)), datamodule=data)
    message = "AttentionFlow must take the context of ArraySequences, which is 3 wide; got context_features=None"
    for flow in (blind, lambda shape: TransformFlow(shape, [lambda features: InvertibleAttention(features, 1)])):
        with pytest.raises(ValueError, match=message.replace("AttentionFlow", r"\w+")):
            trainer(tmp_path, max_steps=1).fit(DensityModule(flow, (4, 2)), datamodule=data)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path).predict(DensityModule(blind, (4, 2)), datamodule=data, ckpt_path=None)


def test_an_average_is_refused_by_the_name_the_user_gave_it():
    with pytest.raises(ValueError, match="ema must be between 0 and 1, or None for no average; got ema=3"):
        DensityModule(small_flow, (4, 2), ema=3)


def test_samples_with_a_context_are_one_for_each_row():
    module = DensityModule(lambda shape: small_flow(shape, context_features=3), (4, 2)).eval()
    assert module.sample(5, torch.randn(5, 3)).shape == (5, 4, 2)
    with pytest.raises(ValueError, match="context must have num_samples rows; got 5 and num_samples=4"):
        module.sample(4, torch.randn(5, 3))


def test_what_goes_to_the_noise_comes_back():
    module = DensityModule(small_flow, (4, 2)).eval()
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    batch = Batch(torch.randn(2, 4, 2), mask, torch.arange(2))
    with torch.no_grad():
        back = module.reconstruct(batch)
    torch.testing.assert_close(back, batch.inputs.masked_fill(~mask.unsqueeze(-1), 0), rtol=1e-3, atol=1e-3)


def test_training_standardises_by_the_train_split(tmp_path):
    module, data = DensityModule(small_flow, (4, 2)), Tiny()
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
    mean, scale = data.moments()
    assert torch.equal(module.standardize.mean, mean)
    assert torch.equal(module.standardize.scale, scale)
    other = DensityModule(small_flow, (4, 2), standardize=False)
    trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(other, datamodule=data)
    assert other.standardize.mean.eq(0).all()


def test_a_flow_is_made_of_a_list_of_transforms_of_both_libraries():
    def attention(features):
        return InvertibleAttention(features, num_heads=1)

    flow = TransformFlow((5, 3), [TokenActNorm, LULinear, attention], depth=2)
    x = torch.randn(4, 5, 3)
    y, logabsdet = flow._transform(x)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: flow._transform(v.unsqueeze(0))[0][0]))(x)
    torch.testing.assert_close(logabsdet, jacobian.reshape(4, 15, 15).slogdet().logabsdet, rtol=1e-4, atol=1e-4)
    assert y.shape == x.shape
    with pytest.raises(ValueError, match="transforms must have at least one entry"):
        TransformFlow((5, 3), [])


# -- its parts


def test_exact_logdets_are_for_a_while():
    flow = RandomFlow((4, 2)).eval()
    x = torch.randn(3, 4, 2)
    with exact_logdets(flow):
        assert torch.equal(flow.log_prob(x), flow.log_prob(x))
    assert not torch.equal(flow.log_prob(x), flow.log_prob(x))
    with pytest.raises(KeyError), exact_logdets(flow):
        raise KeyError
    assert not any(isinstance(getattr(part, "logdet", None), ExactLogDet) for part in flow.modules())


def test_the_schedule_rises_and_falls():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = WarmupCosine(optimizer, warmup_steps=4, total_steps=24, final=0.1)
    rates = []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates[14] == pytest.approx(2 * (0.1 + 0.9 * 0.5))
    assert rates[24:] == pytest.approx([0.2] * 6)
    assert rates[4:25] == sorted(rates[4:25], reverse=True)


def test_the_schedule_ends_with_the_training(tmp_path):
    module = DensityModule(small_flow, (4, 2), scheduler=lambda o: WarmupCosine(o, warmup_steps=1, final=0.0))
    trainer(tmp_path, max_steps=7, limit_val_batches=0).fit(module, datamodule=Tiny())
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_a_longer_training_goes_on_along_a_longer_schedule():
    def make(total):
        return WarmupCosine(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), warmup_steps=1, total_steps=total)

    short, long = make(10), make(20)
    for _ in range(10):
        short.optimizer.step()
        short.step()
    long.load_state_dict(short.state_dict())
    assert long.last_epoch == 10 and long.total_steps == 20
    assert long.get_lr()[0] > 0.5 > 0.02 > short.get_lr()[0]


def test_a_model_without_a_finite_density_is_in_the_table_and_in_the_picture(tmp_path, capsys):
    report = Report(Tiny(), "Flow", {}, torch.device("cpu"), is_exact=True, is_mean_free=False)
    batch = Batch(torch.zeros(2, 4, 2), None, torch.arange(2))
    report.add(batch, torch.tensor([-1.0, -torch.inf]))
    report.show(tmp_path, is_first=True)
    assert [line.split(",")[:2] for line in (tmp_path / "test.csv").read_text().splitlines()[1:2]] == [["Flow", "inf"]]
    assert "inf" in capsys.readouterr().out
    figure = histogram({"index": np.arange(3), "log_prob_per_token": np.array([-1.0, -np.inf, -2.0])})
    assert figure.axes[0].get_title() == "3 sequences, 1 of them not finite"


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    device = torch.device("cpu")


class Stepped:
    global_step = 0


def test_the_average_is_that_of_its_formula():
    ema, module, stepped = EMA(decay=0.8), Weight(), Stepped()
    wanted = None
    for step in range(1, 60):
        with torch.no_grad():
            module.w.fill_(math.sin(step))
        stepped.global_step = step
        ema.on_train_batch_end(stepped, module)
        ema.on_train_batch_end(stepped, module)  # no step was made: nothing changes
        decay = min(0.8, step / (step + 9))
        wanted = math.sin(step) if wanted is None else decay * wanted + (1 - decay) * math.sin(step)
    assert ema.average["w"].item() == pytest.approx(wanted, abs=1e-6)
    ema.on_validation_start(stepped, module)
    assert module.w.item() == pytest.approx(wanted, abs=1e-6)
    ema.on_validation_end(stepped, module)
    assert module.w.item() == pytest.approx(math.sin(59))
    with pytest.raises(ValueError, match=r"decay must be between 0 and 1; got decay=1.0"):
        EMA(1.0)


def test_random_states_of_estimators_are_found_and_come_back():
    one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    flow = nn.ModuleList(
        [
            InvertibleAttention(2, 1, logdet=RussianRoulette(generator=one)),
            InvertibleAttention(2, 1, logdet=PowerSeries(generator=other)),
            InvertibleAttention(2, 1, logdet=PowerSeries(generator=one)),
        ]
    )
    assert generators(flow) == [one, other]
    state = get_state(flow)
    first = [torch.rand(3), torch.rand(3, generator=one), torch.rand(3, generator=other)]
    set_state(flow, state)
    again = [torch.rand(3), torch.rand(3, generator=one), torch.rand(3, generator=other)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(ValueError, match="states of 2 random generators; the model has 0"):
        set_state(nn.Linear(1, 1), state)


def test_blocks_stretch_no_more_than_their_bound():
    flow = small_flow((4, 2)).eval()
    mask = torch.tensor([[True, True, True, False]] * 3)
    with torch.no_grad(), captured_inputs(flow) as inputs:
        flow.log_prob(torch.randn(3, 4, 2), mask)
    assert len(inputs) == 2
    for block, x, context in inputs:
        assert context is mask
        for f, rows in maps(block, x, None, mask):
            change = f(rows + 1e-3) - f(rows)
            assert change[0, :3].norm(dim=-1).max() <= 0.97 * 1e-3 * math.sqrt(2) * 1.01


# -- checks


def test_a_bad_value_of_a_batch_is_named():
    inputs = torch.zeros(3, 4, 2)
    inputs[2, 1, 0] = torch.inf
    batch = Batch(inputs, None, torch.tensor([7, 8, 9]))
    with pytest.raises(NotFinite, match="train batch 5: sequence 9 is inf at token 1, feature 0"):
        check_batch(batch, "train batch 5")
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 1:] = False
    check_batch(Batch(inputs, mask, batch.index), "padding may hold anything")


def test_large_values_are_not_mistaken_for_infinite_ones():
    check_batch(Batch(torch.full((4, 4, 2), 3e38), None, torch.arange(4)), "x")


def test_a_loss_that_is_none_is_an_error():
    with pytest.raises(NotFinite, match="step 3: the loss is nan, though the data are finite"):
        check_loss(torch.tensor(torch.nan), "step 3")


def test_checkpoints_come_back(tmp_path):
    path = tmp_path / "deep" / "some.ckpt"
    write_checkpoint({"state_dict": {"w": torch.arange(3)}, "step": 4}, path)
    assert read_checkpoint(path)["step"] == 4
    assert [other.name for other in path.parent.iterdir()] == ["some.ckpt"]


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="has no state_dict"):
        read_checkpoint(tmp_path / "other.ckpt")
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text.ckpt is"):
        read_checkpoint(tmp_path / "text.ckpt")
    (tmp_path / "empty.ckpt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"empty.ckpt is damaged \(0 bytes"):
        read_checkpoint(tmp_path / "empty.ckpt")
