r"""The log-determinant as a power series in J, by random probes.

.. math:: \log\det(I + J) = \sum_{k \ge 1} \frac{(-1)^{k+1}}{k} \operatorname{tr} J^k, \qquad
    \operatorname{tr} J^k = E\, v^T J^k v
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowattn.checks import can_look, check_positive, in_forward_mode
from flowattn.contractions import Contraction, Push
from flowattn.logdet.base import LogDet, probes


class PowerSeries(LogDet):
    r"""The first terms of the series: a bias that is bounded, and no randomness but the probes'.

    .. math:: \Bigl|\sum_{k > n} \frac{(-1)^{k+1}}{k} \operatorname{tr} J^k\Bigr| \le \frac{N D\, L^{n+1}}{(n+1)(1-L)}

    because the spectral radius of J is below every operator norm. Value and gradient are those of the truncated
    series, without further bias.

    Args:
        num_terms: the number n of terms.
        num_probes: random vectors per sequence.
        generator: where the probes come from; torch's global generator unless given.

    Cost: n derivatives forward, and the memory of all of them while training.

    References:
        | Invertible Residual Networks (Behrmann et al., 2019)
    """

    def __init__(self, num_terms: int = 10, num_probes: int = 1, generator: torch.Generator | None = None) -> None:
        check_positive(num_terms=num_terms, num_probes=num_probes)
        self.num_terms = num_terms
        self.num_probes = num_probes
        self.generator = generator

    def __call__(
        self, contraction: Contraction, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if contraction.coefficient is None and can_look():
            contraction.bound_below_one(x.shape[1])
        value, push = contraction.linearize(x, mask, context)
        logabsdet = value.new_zeros(len(x))
        for v in probes(value, mask, self.num_probes, self.generator):
            w = v
            for k in range(1, self.num_terms + 1):
                w = push(w)
                logabsdet = logabsdet + (-1) ** (k + 1) / k * (v * w).sum((1, 2))
        return value, logabsdet / self.num_probes

    def remainder(self, contraction: Contraction, num_tokens: int) -> float:
        """How far the mean can be from the true log-determinant of so many tokens, at most."""
        L = contraction.bound_below_one(num_tokens)
        n = self.num_terms
        return num_tokens * contraction.features * L ** (n + 1) / ((n + 1) * (1 - L))

    def __repr__(self) -> str:
        return f"PowerSeries(num_terms={self.num_terms}, num_probes={self.num_probes})"


class RussianRoulette(LogDet):
    r"""The whole series, cut at a random place and weighted so that nothing is lost on average.

    .. math:: \widehat{\log\det} = \sum_{k=1}^{n} \frac{(-1)^{k+1}}{k\, p_k} v^T J^k v, \qquad
        \widehat{\partial \log\det} = v^T (\partial J)\, u, \quad u = \sum_{k=0}^{n} \frac{(-1)^k}{p_k} J^k v,

    n drawn at random with :math:`p_k = P(n \ge k)`: unbiased in value and in gradient. The value comes from the
    logarithm's series and the gradient from Neumann's, :math:`\operatorname{tr}\,(\partial J)(I+J)^{-1}`, in which
    only the last derivative is recorded: memory does not grow with the number of terms. Second derivatives would be
    wrong, u being a constant there; they are refused.

    Args:
        num_exact_terms: terms that are always there.
        survival: the chance of each term after them to be there if the one before it is. Unless given it is L^2, the
            smallest at which the variance is finite for every map of Lipschitz constant L. A smaller one is faster,
            and often harmless, since few maps are everywhere as steep as their bound.
        num_probes: random vectors per sequence.
        generator: where all randomness comes from; torch's global generator unless given.

    Cost: about num_exact_terms + 1 / (1 - survival) derivatives.

    References:
        | Residual Flows for Invertible Generative Modeling (Chen et al., 2019)
    """

    def __init__(
        self,
        num_exact_terms: int = 4,
        survival: float | None = None,
        num_probes: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        check_positive(num_exact_terms=num_exact_terms, num_probes=num_probes)
        if survival is not None and not 0 < survival < 1:
            raise ValueError(f"survival must be None or between 0 and 1; got survival={survival}.")
        self.num_exact_terms = num_exact_terms
        self.survival = survival
        self.num_probes = num_probes
        self.generator = generator

    def __call__(
        self, contraction: Contraction, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value, push = contraction.linearize(x, mask, context)
        survival = self.survival
        if survival is None or contraction.coefficient is None:
            bound = contraction.bound_below_one(x.shape[1])
            survival = bound**2 if survival is None else survival
        logabsdet = value.new_zeros(len(x))
        for v in probes(value, mask, self.num_probes, self.generator):
            with torch.no_grad():
                series, u = (t.detach() for t in self._series(push, v, survival))  # without tangents, too
            surrogate = (v * push(u)).sum((1, 2))
            _refuse_second_derivatives(surrogate)
            logabsdet = logabsdet + series + (surrogate - surrogate.detach())
        return value, logabsdet / self.num_probes

    def _series(self, push: Push, v: Tensor, survival: float) -> tuple[Tensor, Tensor]:
        """The estimate of the log-determinant, and u, for one probe."""
        num_terms = self._draw(survival)
        series, u, w = v.new_zeros(v.shape[0]), v, v
        for k in range(1, num_terms + 1):
            w = push(w)
            weight = survival ** -max(0, k - self.num_exact_terms)
            series = series + (-1) ** (k + 1) / k * weight * (v * w).sum((1, 2))
            u = u + (-1) ** k * weight * w
        return series, u

    def _draw(self, survival: float) -> int:
        if survival == 0:  # of a map that is constant
            return self.num_exact_terms
        place = "cpu" if self.generator is None else self.generator.device
        uniform = torch.rand((), generator=self.generator, device=place, dtype=torch.float64).item()
        return self.num_exact_terms + int(math.log1p(-uniform) / math.log(survival))

    def __repr__(self) -> str:
        survival = "L^2" if self.survival is None else self.survival
        exact, probes = self.num_exact_terms, self.num_probes
        return f"RussianRoulette(num_exact_terms={exact}, survival={survival}, num_probes={probes})"


def _refuse_second_derivatives(surrogate: Tensor) -> None:
    """Raises at once where torch.func nests two derivatives; otherwise when a second one passes here."""

    def refuse(g: Tensor) -> None:
        raise NotImplementedError(
            "RussianRoulette can be differentiated once; a second derivative was asked for. Use ExactLogDet() or "
            "PowerSeries()."
        )

    if torch.compiler.is_compiling():
        return
    if not can_look():
        levels = [level.key().name for level in torch._C._functorch.get_interpreter_stack()]
        if sum(name in ("Grad", "Jvp") for name in levels) > 1:
            refuse(surrogate)
        return
    if surrogate.requires_grad:
        surrogate.register_hook(lambda g: refuse(g) if torch.is_grad_enabled() else None)
    if in_forward_mode():
        tangent = torch.autograd.forward_ad.unpack_dual(surrogate).tangent
        if tangent is not None and tangent.requires_grad:
            tangent.register_hook(refuse)
