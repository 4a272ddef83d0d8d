"""Runs the checks on a transform, and says which one failed and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from nflows.transforms.base import Transform
from torch import Tensor

from flowattn.testing.case import Case, ContractViolation
from flowattn.testing.checks import CHECKS, gradients_are_those_of_finite_differences


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
