"""What a transform is checked on: inputs, masks, and both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from nflows.transforms.base import InverseTransform, Transform
from torch import Tensor

from flowattn.context import pack_context, split_context


class ContractViolation(AssertionError):
    """A transform does not do what transforms are for."""


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
            transform(first, _copy(context))
            for parameter in transform.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=self.perturbation)
            transform.train(self.training)
            if direction == "inverse":
                inputs, transform = transform(inputs.clone(), _copy(context))[0], InverseTransform(transform)
        words = f"{direction}{'' if mask is None else ', with a mask'}, {self.dtype}"
        return Run(self, words, transform, inputs, context, mask, direction)

    def new_transform(self) -> Transform:
        return self.make_transform().to(self.dtype)


def _copy(context: Tensor | None) -> Tensor | None:
    return None if context is None else context.clone()


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
