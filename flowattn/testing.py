"""The contract of a transform of nflows, as a function to run on ours and on yours.

    from flowattn.testing import check_transform

    def test_my_transform():
        check_transform(lambda: MyTransform(3), event_shape=(5, 3))

Each check is a function in `CHECKS`, and its name says what it asks for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from nflows.transforms.base import InverseTransform, Transform
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from flowattn.context import pack_context, split_context

__all__ = ["CHECKS", "ContractViolation", "check_transform"]


class ContractViolation(AssertionError):
    """A transform does not do what transforms are for."""


def check_transform(
    make_transform: Callable[[], Transform],
    event_shape: Sequence[int],
    *,
    context: Callable[[int], Tensor | None] | None = None,
    make_inputs: Callable[..., Tensor] = torch.randn,
    batch_size: int = 4,
    dtype: torch.dtype = torch.float64,
    supports_mask: bool = False,
    stochastic: bool = False,
    num_draws: int = 512,
    training: bool = False,
    perturbation: float = 0.1,
    rtol: float | None = None,
    atol: float | None = None,
    compile_backend: str = "eager",
    directions: Sequence[str] = ("forward", "inverse"),
    only: Iterable[str] | None = None,
    skip: Iterable[str] = (),
) -> None:
    """Raises `ContractViolation`, which says what is wrong, unless the transform keeps the contract.

    The transform sees one batch in training mode first, for what it wants to learn from it, and its parameters are
    moved a little, since many transforms start as the identity. Random numbers of yours are not touched.

    Args:
        make_transform: makes a new transform, the same one but for random numbers.
        event_shape: shape of an input without the batch; small, because the whole Jacobian is computed.
        context: makes the context of a batch of so many samples.
        make_inputs: makes random inputs of a given shape, for transforms that do not take all real numbers.
        batch_size: number of samples.
        dtype: floating-point type of everything, but for the gradients, which are always checked in float64.
        supports_mask: whether the transform reads masks as in `flowattn.context`; then everything is checked with
            one as well, and what holds for padding. The event shape is (tokens, features).
        stochastic: whether logabsdet is an unbiased estimate: its mean is checked, within five standard errors.
        num_draws: number of estimates in that mean.
        training: whether to check in training mode.
        perturbation: standard deviation of what is added to the parameters.
        rtol: relative tolerance, 1e-8 or, in single precision, 1e-4.
        atol: absolute tolerance, likewise.
        compile_backend: backend of torch.compile.
        directions: which of "forward" and "inverse" to start from.
        only: names of checks to run, in place of all.
        skip: names of checks to leave out.

    Example:
        >>> from flowattn.transforms import TokenActNorm
        >>> check_transform(lambda: TokenActNorm(3), event_shape=(4, 3), supports_mask=True)
    """
    names, skip = list(CHECKS if only is None else only), list(skip)
    unknown = [name for name in [*names, *skip] if name not in CHECKS]
    if unknown:
        raise ValueError(f"only and skip must name checks, which are {', '.join(CHECKS)}; got {', '.join(unknown)}.")
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    case = Case(
        make_transform=make_transform,
        event_shape=tuple(event_shape),
        make_context=context or (lambda batch_size: None),
        make_inputs=make_inputs,
        batch_size=batch_size,
        dtype=dtype,
        supports_mask=supports_mask,
        stochastic=stochastic,
        num_draws=num_draws,
        training=training,
        perturbation=perturbation,
        rtol=tolerance if rtol is None else rtol,
        atol=tolerance if atol is None else atol,
        compile_backend=compile_backend,
        directions=tuple(directions),
    )
    for name in names:
        if name not in skip:
            _run_check(name, case)


def _run_check(name: str, case: Case) -> None:
    sentence = name.replace("_", " ").capitalize()
    if CHECKS[name] is gradients_are_those_of_finite_differences:
        case = replace(case, dtype=torch.float64)
    words = ""
    with torch.random.fork_rng(devices=[]):
        try:
            for run in case.runs():
                words = run.words
                CHECKS[name](run)
        except ContractViolation as violation:
            raise ContractViolation(f"{sentence}? No ({words}): {violation}") from None
        except Exception as error:
            where = words or "at the first batch"
            raise ContractViolation(f"{sentence}? No ({where}): {type(error).__name__}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is checked, and how strictly: the arguments of `check_transform`."""

    make_transform: Callable[[], Transform]
    event_shape: tuple[int, ...]
    make_context: Callable[[int], Tensor | None]
    make_inputs: Callable[..., Tensor]
    batch_size: int
    dtype: torch.dtype
    supports_mask: bool
    stochastic: bool
    num_draws: int
    training: bool
    perturbation: float
    rtol: float
    atol: float
    compile_backend: str
    directions: tuple[str, ...]

    def runs(self) -> Iterator[Run]:
        """Every direction, without a mask and, if that is supported, with one."""
        masks: list[Tensor | None] = [None]
        if self.supports_mask:
            # All real; the last token padded; the first token padded; nothing but padding; and again.
            mask = torch.ones(self.batch_size, self.event_shape[0], dtype=torch.bool)
            mask[1::4, -1] = False
            mask[2::4, 0] = False
            mask[3::4] = False
            masks.append(mask)
        for each in masks:
            for direction in self.directions:
                yield self.run(direction, each)

    def run(self, direction: str, mask: Tensor | None) -> Run:
        """A transform that is ready to be checked, the same one every time."""
        torch.manual_seed(0)
        transform = self.new_transform()
        inputs, first = (self.make_inputs(self.batch_size, *self.event_shape).to(self.dtype) for _ in range(2))
        context = self.make_context(self.batch_size)
        if context is not None and context.is_floating_point():
            context = context.to(self.dtype)
        if mask is not None:
            features, own = split_context(context, inputs)
            mask = mask if own is None else mask & own
            context = pack_context(features, mask)
        with torch.no_grad():
            transform.train()
            transform(first, context)
            for parameter in transform.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=self.perturbation)
            transform.train(self.training)
            if direction == "inverse":
                inputs, transform = transform(inputs, context)[0], InverseTransform(transform)
        words = f"{direction}{'' if mask is None else ', with a mask'}, {self.dtype}"
        return Run(self, words, transform, inputs, context, mask, direction)

    def new_transform(self) -> Transform:
        return self.make_transform().to(self.dtype)


@dataclass(frozen=True)
class Run:
    """A transform, or the inverse of one, and what it is given."""

    case: Case
    words: str
    transform: Transform
    inputs: Tensor
    context: Tensor | None
    mask: Tensor | None
    direction: str

    def __call__(self, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Outputs and logabsdet, always with the same random numbers."""
        torch.manual_seed(1)
        outputs, logabsdet = self.transform(self.inputs if inputs is None else inputs, self.context)
        return outputs, logabsdet

    def outputs(self, inputs: Tensor) -> Tensor:
        return self(inputs)[0]

    def compare(self, what: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape:
            raise ContractViolation(f"{what} has shape {list(got.shape)} in place of {list(wanted.shape)}.")
        got, wanted = got.detach(), wanted.detach().to(got.dtype)
        error, allowed = (got - wanted).abs(), self.case.atol + self.case.rtol * wanted.abs()
        wrong = ~(error <= allowed)
        if wrong.any():
            worst = (error - allowed).nan_to_num(torch.inf).where(wrong, -torch.inf).flatten().argmax()
            index = [int(i) for i in torch.unravel_index(worst, error.shape)]
            raise ContractViolation(
                f"{what} is off at {int(wrong.sum())} of {wrong.numel()} places. The worst, at index {index}, is "
                f"{got.flatten()[worst]:.8g} in place of {wanted.flatten()[worst]:.8g}: an error of "
                f"{error.flatten()[worst]:.1e}, where {allowed.flatten()[worst]:.1e} is allowed."
            )

    def compare_both(self, why: str, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
        """Outputs and, unless another shape has made it draw other random numbers, logabsdet."""
        self.compare(f"the output {why}", got[0], wanted[0])
        if not self.case.stochastic or got[0].shape == self.inputs.shape:
            self.compare(f"logabsdet {why}", got[1], wanted[1])


def outputs_are_like_inputs_and_logabsdet_is_one_number_per_sample(run: Run) -> None:
    outputs, logabsdet = run()
    batch = len(run.inputs)
    if outputs.shape != run.inputs.shape or outputs.dtype != run.inputs.dtype:
        raise ContractViolation(
            f"inputs of shape {list(run.inputs.shape)} and {run.inputs.dtype} become outputs of shape "
            f"{list(outputs.shape)} and {outputs.dtype}."
        )
    if logabsdet.shape != (batch,) or logabsdet.dtype not in (torch.float32, torch.float64):
        raise ContractViolation(
            f"logabsdet is of shape {list(logabsdet.shape)} and {logabsdet.dtype}; it must be of shape [{batch}] and "
            "at least float32. nflows broadcasts what is not, without a word."
        )
    for what, values in (("the output", outputs), ("logabsdet", logabsdet)):
        if not values.isfinite().all():
            raise ContractViolation(f"{what} is not finite, although the inputs are.")


def inverse_undoes_it(run: Run) -> None:
    outputs, there = run()
    inputs, back = replace(run, transform=InverseTransform(run.transform))(outputs)
    run.compare("what comes back", inputs, run.inputs)
    if not run.case.stochastic:
        run.compare("logabsdet of the way back", back, -there)


def samples_do_not_depend_on_their_batch_mates(run: Run) -> None:
    outputs, logabsdet = run()
    for k in range(len(outputs)):
        part = slice(k, k + 1)
        alone = replace(run, context=None if run.context is None else run.context[part])
        run.compare_both(
            f"of sample {k}, alone and not among the others,", alone(run.inputs[part]), (outputs[part], logabsdet[part])
        )


def logabsdet_is_that_of_the_autograd_jacobian(run: Run) -> None:
    truth = torch.linalg.slogdet(_jacobian(run.outputs, run.inputs)).logabsdet
    if not run.case.stochastic:
        run.compare("logabsdet", run()[1], truth)
        return
    with torch.no_grad():
        draws = torch.stack([run.transform(run.inputs, run.context)[1] for _ in range(run.case.num_draws)])
    allowed = 5 * draws.std(0) / len(draws) ** 0.5 + run.case.atol
    error = (draws.mean(0) - truth).abs()
    if not (error <= allowed).all():
        worst = int((error / allowed).argmax())
        raise ContractViolation(
            f"logabsdet is biased. Its mean over {len(draws)} draws for sample {worst} is {draws[:, worst].mean():.5g} "
            f"in place of {truth[worst]:.5g}, where an error of {allowed[worst]:.1e} is allowed."
        )


def gradients_are_those_of_finite_differences(run: Run) -> None:
    variables = {"the inputs": run.inputs}
    if run.context is not None and run.context.is_floating_point() and run.context.isfinite().all():
        variables["the context"] = run.context
    variables |= {name: p for name, p in run.transform.named_parameters() if p.requires_grad}

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        named = dict(zip(variables, values, strict=True))
        inputs, context = named.pop("the inputs"), named.pop("the context", run.context)
        outputs, logabsdet = torch.func.functional_call(run.transform, named, (inputs, context))
        attached = 0 * inputs.sum()  # gradcheck overlooks what is cut off from the graph
        return (outputs + attached,) if run.case.stochastic else (outputs + attached, logabsdet + attached)

    try:
        gradcheck(function, [x.detach().clone().requires_grad_() for x in variables.values()], fast_mode=True)
    except GradcheckError as error:
        names = ", ".join(f"{k} = {name}" for k, name in enumerate(variables))
        raise ContractViolation(
            f"{str(error).strip().splitlines()[0]} There output 0 is the output and 1 is logabsdet; input {names}."
        ) from error


def padding_is_not_read(run: Run) -> None:
    if run.mask is None:
        return
    outputs, logabsdet, gradients = _with_gradients(run, run.inputs)
    for value in (1e3, torch.nan):
        junk = torch.where(run.mask.unsqueeze(-1), run.inputs, value)
        other_outputs, other_logabsdet, other_gradients = _with_gradients(run, junk)
        why = f"when padding is {value} and not another number"
        run.compare(f"the output at real tokens, {why},", other_outputs, outputs)
        run.compare(f"logabsdet, {why},", other_logabsdet, logabsdet)
        for name, gradient in gradients.items():
            run.compare(f"the gradient of {name}, {why},", other_gradients[name], gradient)


def padding_passes_through_unchanged(run: Run) -> None:
    if run.mask is None:
        return
    real = run.mask.unsqueeze(-1)
    run.compare("the output at padding", run()[0].masked_fill(real, 0), run.inputs.masked_fill(real, 0))


def padding_at_the_end_can_be_cut_off(run: Run) -> None:
    if run.mask is None:
        return
    mask = torch.ones_like(run.mask)
    mask[:, -1] = False
    padded = run.case.run(run.direction, mask)
    features, _ = split_context(padded.context, padded.inputs)
    if features is not None and features.ndim == 3:
        features = features[:, :-1]
    assert padded.mask is not None
    cut = replace(padded, context=pack_context(features, padded.mask[:, :-1]))
    outputs, logabsdet = padded()
    run.compare_both(
        "without the last token, and not with it as padding,", cut(padded.inputs[:, :-1]), (outputs[:, :-1], logabsdet)
    )


def nothing_given_is_changed(run: Run) -> None:
    given = {"inputs": run.inputs, "context": run.context}
    before = {name: value.clone() for name, value in given.items() if value is not None}
    state = copy.deepcopy(run.transform.state_dict())
    run()
    for name, value in before.items():
        after = given[name]
        assert after is not None
        if not torch.equal(value, after):
            raise ContractViolation(f"it writes into the {name} it was given.")
        if after.requires_grad:
            raise ContractViolation(f"it sets requires_grad on the {name} it was given.")
    for name, value in run.transform.state_dict().items():
        if not run.case.training and not torch.equal(value, state[name]):
            raise ContractViolation(f"it changes {name}, a part of its state, in evaluation mode.")


def a_loaded_state_gives_the_same_function(run: Run) -> None:
    torch.manual_seed(2)
    fresh = run.case.new_transform()
    other = replace(run, transform=InverseTransform(fresh) if run.direction == "inverse" else fresh)
    with torch.no_grad():
        fresh.eval()
        other()  # whatever it remembers of this call must not survive
        other.transform.load_state_dict(copy.deepcopy(run.transform.state_dict()), strict=True)
        for when in ("after loading", "after loading and a batch in training mode"):
            other.transform.train(run.case.training)
            run.transform.train(run.case.training)
            run.compare_both(when, other(), run())
            for each in (run, other):
                each.transform.train()
                each(0.9 * run.inputs)


def single_and_double_precision_agree(run: Run) -> None:
    loose = replace(run.case, dtype=torch.float64, rtol=max(run.case.rtol, 1e-4), atol=max(run.case.atol, 1e-4))
    double = loose.run(run.direction, run.mask)
    context = double.context
    if context is not None and context.is_floating_point():
        context = context.float()
    single = replace(double, transform=copy.deepcopy(double.transform).float(), context=context)
    outputs, logabsdet = single(double.inputs.float())
    if outputs.dtype != torch.float32 or double()[0].dtype != torch.float64:
        raise ContractViolation(
            f"float32 becomes {outputs.dtype} in single precision, float64 becomes {double()[0].dtype} in double."
        )
    double.compare_both("in single precision, and not in double,", (outputs, logabsdet), double())


def works_under_torch_func(run: Run) -> None:
    got = torch.func.jacrev(lambda x: run.outputs(x).flatten(1).sum(0))(run.inputs)
    run.compare("the Jacobian", got.flatten(2).movedim(1, 0), _jacobian(run.outputs, run.inputs))
    if not run.case.stochastic:
        wanted = torch.autograd.functional.jacobian(lambda x: run(x)[1].sum(), run.inputs)
        run.compare("the gradient of logabsdet", torch.func.grad(lambda x: run(x)[1].sum())(run.inputs), wanted)


def works_under_torch_compile(run: Run) -> None:
    torch.compiler.reset()
    compiled = replace(run, transform=torch.compile(run.transform, backend=run.case.compile_backend))
    with warnings.catch_warnings():  # the compiler's, about itself
        warnings.simplefilter("ignore")
        got = compiled()
    torch.compiler.reset()
    run.compare_both("when it is compiled", got, run())


def works_under_inference_mode(run: Run) -> None:
    wanted = run()
    with torch.inference_mode():
        run.compare_both("under inference_mode", run(run.inputs.clone()), wanted)


#: The checks by name, in the order in which they are run.
CHECKS: dict[str, Callable[[Run], None]] = {
    check.__name__: check
    for check in (
        outputs_are_like_inputs_and_logabsdet_is_one_number_per_sample,
        nothing_given_is_changed,
        inverse_undoes_it,
        samples_do_not_depend_on_their_batch_mates,
        logabsdet_is_that_of_the_autograd_jacobian,
        gradients_are_those_of_finite_differences,
        padding_is_not_read,
        padding_passes_through_unchanged,
        padding_at_the_end_can_be_cut_off,
        a_loaded_state_gives_the_same_function,
        single_and_double_precision_agree,
        works_under_torch_func,
        works_under_torch_compile,
        works_under_inference_mode,
    )
}


def _jacobian(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """The Jacobian of each sample, which depends on no other one: [B, E, E] for E numbers."""
    total = torch.autograd.functional.jacobian(lambda x: function(x).flatten(1).sum(0), inputs)
    return total.flatten(2).movedim(1, 0)


def _with_gradients(run: Run, inputs: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Outputs at real tokens, logabsdet, and the gradients of both together."""
    assert run.mask is not None
    outputs, logabsdet = run(inputs)
    outputs = torch.where(run.mask.unsqueeze(-1), outputs, 0)
    loss = outputs.square().sum() + logabsdet.sum()
    parameters = {name: p for name, p in run.transform.named_parameters() if p.requires_grad}
    if not loss.requires_grad:
        return outputs, logabsdet, {}
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return outputs, logabsdet, {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
