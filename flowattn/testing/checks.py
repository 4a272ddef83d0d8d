"""The checks themselves. Their names say what they ask for; each raises, in words, where it is not given."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from nflows.transforms.base import InverseTransform
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from flowattn.context import pack_context, split_context
from flowattn.testing.case import ContractViolation, Run


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
    try:
        got = torch.func.jacrev(lambda x: run.outputs(x).flatten(1).sum(0))(run.inputs)
    except NotImplementedError:
        if run.direction == "inverse":  # by an iteration, which torch.func cannot trace, and which says so
            return
        raise
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
