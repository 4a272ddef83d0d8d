"""Scratch memory: who gets which, and that nothing that is returned or kept for later lies in it."""

import threading

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from flowattn.contractions import L2SelfAttention
from flowattn.kernels import scratch
from flowattn.kernels.pairs import pair_attention
from flowattn.kernels.scratch import Scratch, as_they_are
from flowattn.logdet import ExactLogDet

LIKE = torch.zeros(1)


def starts(tensors):
    return [t.data_ptr() for t in tensors]


def test_tensors_of_a_call_have_their_shapes_and_do_not_overlap():
    shapes = [(3, 5), (), (0, 4), (2, 1, 7)]
    found = Scratch(as_they_are)(LIKE, *shapes)
    assert [t.shape for t in found] == [torch.Size(shape) for shape in shapes]
    for number, t in enumerate(found):
        t.fill_(number)
    assert [t.unique().tolist() for t in found] == [[0.0], [1.0], [], [3.0]]


def test_the_next_call_gets_the_same_memory_and_a_larger_one_new_memory():
    give = Scratch(as_they_are)
    first = give(LIKE, (100,), (50,))
    assert starts(give(LIKE, (60,))) == starts(first[:1])
    assert len(give(LIKE, (1000,))[0]) == 1000
    assert starts(give(LIKE, (100,), (50,))) == starts(give(LIKE, (100,), (50,)))


def test_types_have_memory_of_their_own():
    give = Scratch(as_they_are)
    single, double = (give(LIKE.to(dtype), (10,))[0] for dtype in (torch.float32, torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert single.data_ptr() != double.data_ptr()


def test_large_memory_is_not_kept(monkeypatch):
    monkeypatch.setattr(scratch, "KEPT", 160)
    give = Scratch(as_they_are)
    give(LIKE, (160,))
    assert give.kept
    give(LIKE, (161,))
    assert not give.kept


def test_threads_do_not_share():
    give, found = Scratch(as_they_are), []
    thread = threading.Thread(target=lambda: found.extend(give(LIKE, (10,))))
    mine = give(LIKE, (10,))
    thread.start()
    thread.join()
    assert starts(mine) != starts(found)


def test_memory_from_inference_mode_can_be_written_to_outside():
    give = Scratch(as_they_are)
    with torch.inference_mode():
        give(LIKE, (10,))
    assert give(LIKE, (10,))[0].zero_().sum() == 0


def test_the_default_device_has_no_say():
    give = Scratch(as_they_are)
    with torch.device("meta"):
        give(LIKE, (10,))
    assert give(LIKE, (10,))[0].device.type == "cpu"


def test_traces_keep_none_of_it():
    function = make_fx(lambda z: pair_attention(z) + 0)
    z, other = torch.randn(2, 40, 3), torch.randn(2, 40, 3)
    graph = function(z)
    assert not [name for name in vars(graph) if "constant" in name]
    torch.testing.assert_close(graph(other), pair_attention(other))


def test_tensors_without_memory_of_their_own_get_none_of_it():
    give = Scratch(as_they_are)
    assert give(LIKE.to("meta"), (3,))[0].device.type == "meta"
    torch.func.vmap(lambda x: give(x, (3,))[0].zero_() + x)(torch.ones(2, 3))
    assert not give.kept


def exact(x, **options):
    torch.manual_seed(0)
    value, logabsdet = ExactLogDet()(L2SelfAttention(x.shape[-1], 2, **options).to(x), x)
    return torch.cat([value.flatten(1), logabsdet.unsqueeze(1)], 1)


USERS = {
    "pair attention": (pair_attention, (2, 300, 4)),
    "dense": (exact, (40, 12, 4)),
    "dense, in a ball": (lambda x: exact(x, radius=1.5), (40, 12, 4)),
    "causal": (lambda x: exact(x, causal=True), (3, 80, 8)),
}


@pytest.mark.parametrize(("function", "shape"), USERS.values(), ids=USERS.keys())
def test_a_call_changes_nothing_of_the_one_before(function, shape):
    first, second = (torch.randn(shape, dtype=torch.float64).requires_grad_() for _ in range(2))
    alone = function(first)
    weight = torch.randn_like(alone)
    value, (gradient,) = alone.detach().clone(), torch.autograd.grad(alone, first, weight)

    one, other = function(first), function(second)
    (of_one,) = torch.autograd.grad(one, first, weight)
    kept = of_one.clone()
    torch.autograd.grad(other, second, weight)
    assert torch.equal(one, value)
    assert torch.equal(of_one, kept)
    assert torch.equal(of_one, gradient)
