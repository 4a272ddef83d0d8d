import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nflows import transforms as nf

from flowattn.context import pack_context
from flowattn.transforms import TokenActNorm

MASK = torch.tensor([[True, True, False, False], [False, True, True, True], [False] * 4])


def test_the_first_batch_comes_out_with_mean_zero_and_variance_one():
    x = 5 + 3 * torch.randn(64, 7, 3, dtype=torch.float64)
    outputs, _ = TokenActNorm(3).double()(x)
    torch.testing.assert_close(outputs.mean((0, 1)), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(outputs.var((0, 1), correction=0), torch.ones(3, dtype=torch.float64))


def test_only_real_tokens_count():
    x = torch.randn(3, 4, 3, dtype=torch.float64).masked_fill(~MASK.unsqueeze(-1), torch.nan)
    for context in (MASK, pack_context(torch.randn(3, 2), MASK)):
        norm = TokenActNorm(3).double()
        outputs, logabsdet = norm(x, context)
        torch.testing.assert_close(outputs[MASK].mean(0), torch.zeros(3, dtype=torch.float64))
        torch.testing.assert_close(outputs[MASK].var(0, correction=0), torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(logabsdet, norm.log_scale.sum() * MASK.sum(1))


def test_digits_are_kept_far_from_the_origin():
    x = 1e5 + torch.randn(64, 7, 3)
    norm = TokenActNorm(3)
    norm(x)
    torch.testing.assert_close(norm.log_scale.exp(), 1 / x.double().std((0, 1), correction=0).float())


@pytest.mark.parametrize("value", [0.0, 0.1, -1e5, 1e30])
def test_a_constant_feature_keeps_its_scale(value):
    x = torch.randn(16, 7, 3)
    x[..., 1] = value
    norm = TokenActNorm(3)
    outputs, logabsdet = norm(x)
    assert norm.log_scale[1] == 0
    assert outputs.isfinite().all() and logabsdet.isfinite().all()
    assert outputs[..., 1].abs().max() <= abs(value) * 1e-6


def test_a_batch_of_one_token_is_centred_and_not_scaled():
    norm = TokenActNorm(3)
    outputs, logabsdet = norm(torch.tensor([[[1.0, -2.0, 3.0]]]))
    assert torch.equal(outputs, torch.zeros(1, 1, 3)) and torch.equal(logabsdet, torch.zeros(1))


def test_a_batch_of_nothing_but_padding_waits_for_the_next():
    norm, x = TokenActNorm(3), torch.randn(3, 4, 3)
    outputs, logabsdet = norm(x, torch.zeros_like(MASK))
    assert torch.equal(outputs, x) and torch.equal(logabsdet, torch.zeros(3)) and not norm.initialized
    norm(x, MASK)
    assert norm.initialized


def test_it_is_initialised_once():
    norm = TokenActNorm(3)
    norm(torch.randn(8, 7, 3))
    before = norm.log_scale.clone()
    norm(9 * torch.randn(8, 7, 3))
    assert torch.equal(norm.log_scale, before)


def test_it_is_not_initialised_again_after_loading():
    norm, fresh = TokenActNorm(3), TokenActNorm(3)
    norm(torch.randn(8, 7, 3))
    fresh.load_state_dict(norm.state_dict())
    fresh.train()(9 * torch.randn(8, 7, 3))
    assert torch.equal(fresh.log_scale, norm.log_scale) and torch.equal(fresh.shift, norm.shift)


def test_only_a_forward_pass_in_training_initialises_it():
    norm, x = TokenActNorm(3), 5 + torch.randn(8, 7, 3)
    for outputs, _ in (norm.inverse(x), norm.eval()(x), norm.inverse(x)):
        assert torch.equal(outputs, x)
    norm.train()
    torch.func.jacrev(lambda x: norm(x)[0].sum(0))(x)
    torch.compile(norm, backend="eager")(x)
    assert not norm.initialized
    with torch.inference_mode():
        norm(x)
    assert norm.initialized
    norm(x)[0].sum().backward()


def test_gradients_flow_from_the_batch_that_initialises_it():
    norm = TokenActNorm(3)
    outputs, logabsdet = norm(torch.randn(8, 7, 3))
    (outputs.square().sum() + logabsdet.sum()).backward()
    assert norm.shift.grad is not None
    torch.testing.assert_close(norm.log_scale.grad, torch.full((3,), 3.0 * 8 * 7))


def test_it_is_that_of_nflows_on_vectors():
    ours, theirs, x = TokenActNorm(3), nf.ActNorm(3), 2 + 3 * torch.randn(2000, 1, 3)
    outputs, logabsdet = ours(x)
    wanted, wanted_logabsdet = theirs(x.squeeze(1))
    torch.testing.assert_close(outputs.squeeze(1), wanted, atol=2e-3, rtol=2e-3)  # theirs divides by n - 1
    torch.testing.assert_close(logabsdet, wanted_logabsdet, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite_does_not_initialise_it(value):
    norm, x = TokenActNorm(3), torch.randn(8, 7, 3)
    x[1, 2, 0] = value
    with pytest.raises(ValueError, match="inputs must be finite; got"):
        norm(x)
    assert not norm.initialized and norm.log_scale.eq(0).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"inputs must have shape \[batch, tokens, 3\]; got \[8, 3\]"):
        TokenActNorm(3)(torch.randn(8, 3))
    with pytest.raises(ValueError, match="features must be a whole number of at least 1; got features=0"):
        TokenActNorm(0)


def initialise_on_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    norm = TokenActNorm(3)
    if rank == 0:  # two tokens out of four
        norm(torch.tensor([[[1.0, 0.1, 7.0], [2.0, 0.1, 7.0], [9e9, 9e9, 9e9]]]), torch.tensor([[True, True, False]]))
    else:
        norm(torch.tensor([[[4.0, 0.3, 7.0], [6.0, 0.3, 7.0]]]))
    torch.save(norm.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_end_with_the_same_bits_from_the_tokens_of_both(tmp_path):
    mp.spawn(initialise_on_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = TokenActNorm(3)
    alone(torch.tensor([[[1.0, 0.1, 7.0], [2.0, 0.1, 7.0], [4.0, 0.3, 7.0], [6.0, 0.3, 7.0]]]))
    for name, value in alone.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value)
    assert first["initialized"]
