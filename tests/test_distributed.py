"""Two processes train as one."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flowattn.flows import AttentionFlow
from flowattn.transforms import TokenActNorm

WORLD, STEPS, BATCH = 2, 3, 8
EVENT = (4, 3)


class Loss(nn.Module):
    """What DistributedDataParallel can wrap, for the forward pass of a Flow raises."""

    def __init__(self, causal):
        super().__init__()
        torch.manual_seed(0)
        self.flow = AttentionFlow(
            EVENT,
            depth=2,
            num_heads=2,
            head_features=2,
            hidden=8,
            causal=causal,
            position_bias="learned" if causal else None,
        )

    def forward(self, x, mask):
        return -self.flow.log_prob(x, mask)


def batches(dtype):
    """The same on every rank: sequences of several lengths, far from normal."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = 2 + 3 * torch.randn(BATCH, *EVENT, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, EVENT[0] + 1, (BATCH,), generator=generator)
        yield x.to(dtype), torch.arange(EVENT[0]) < lengths.unsqueeze(1)


def train(model, dtype, rank=None):
    """The parameters, the gradients of each step, and the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    gradients, losses = [], []
    for x, mask in batches(dtype):
        if rank is not None:
            part = slice(rank * BATCH // WORLD, (rank + 1) * BATCH // WORLD)
            x, mask = x[part], mask[part]
        optimizer.zero_grad()
        loss = model(x, mask).mean()
        loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
        losses.append(loss.item())
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], gradients, losses


CASES = {
    "set, float64": (torch.float64, False),
    "set, float32": (torch.float32, False),
    "sequence, float64": (torch.float64, True),
    "sequence, float32": (torch.float32, True),
}


def worker(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    try:
        for name, (dtype, causal) in CASES.items():
            model = Loss(causal).to(dtype)
            results = train(DistributedDataParallel(model), dtype, rank)
            torch.save((*results, model.state_dict()), f"{folder}/{name}, {rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes wrote, that ran all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(worker, (str(folder),), nprocs=WORLD)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_with_the_batch_of_both(name, folder):
    dtype, causal = CASES[name]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    ranks = [torch.load(folder / f"{name}, {rank}.pt", weights_only=True) for rank in range(WORLD)]
    (parameters, gradients, losses, state), (others, other_gradients, other_losses, other_state) = ranks

    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
    assert all(torch.equal(state[name], other_state[name]) for name in state)
    assert losses != other_losses  # they saw different data
    for one, other in zip(gradients, other_gradients, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    alone = Loss(causal).to(dtype)
    wanted, wanted_gradients, wanted_losses = train(alone, dtype)
    for got, expected in zip(gradients, wanted_gradients, strict=True):
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for a, b in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    # The gradients are those of the mean over both ranks, and so is the loss.
    both = [(a + b) / 2 for a, b in zip(losses, other_losses, strict=True)]
    assert both == pytest.approx(wanted_losses, rel=max(tolerance, 1e-6))

    norms = [name for name, module in alone.named_modules() if isinstance(module, TokenActNorm)]
    assert len(norms) == 2
    for name in norms:
        assert state[f"{name}.initialized"]
        for part in ("log_scale", "shift"):
            value = state[f"{name}.{part}"]
            torch.testing.assert_close(value, alone.get_parameter(f"{name}.{part}"), rtol=tolerance, atol=tolerance)
            assert (value != 0).all()
