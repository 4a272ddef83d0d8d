"""How smooth is this attention layer? One call: what is measured at given tokens, and the bounds that apply."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowattn.checks import check_tokens
from flowattn.lipschitz.dot_product import ball_bound, published_ball_bound, published_mean_field_bound
from flowattn.lipschitz.dot_product_at import attention_matrix_bound, local_bound
from flowattn.lipschitz.heads import DotProductHeads
from flowattn.lipschitz.measure import local_lipschitz
from flowattn.lipschitz.norms import Norm, token_norm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Where a bound holds: at the tokens given, for all tokens that are no longer than the longest of them, or for all.
Scope = Literal["at x", "in the ball", "everywhere"]


class Bound(NamedTuple):
    """An upper bound: its name, its norm, where it holds, its value, and this over what was measured."""

    name: str
    norm: Norm
    scope: Scope
    value: float
    ratio: float


@dataclass(frozen=True)
class LipschitzReport:
    """What `report` found. `print` it, `plot` it, or take the numbers."""

    name: str
    num_tokens: int
    features: int
    radius: float
    local: dict[Norm, float]
    bounds: tuple[Bound, ...]
    note: str = ""

    def __str__(self) -> str:
        shape = f"{self.num_tokens} tokens of {self.features} features"
        head = f"{self.name}: {shape}, the longest of length {self.radius:.4g}"
        width = max([len("local constant, measured"), *(len(bound.name) for bound in self.bounds)])
        lines = [head, f"{'norm':<6} {'':<{width}} {'holds':<12} {'value':>10} {'over local':>10}"]
        for norm, value in self.local.items():
            lines.append(f"{norm:<6} {'local constant, measured':<{width}} {'at x':<12} {value:>10.4g} {1:>10.4g}")
            for bound in self.bounds:
                if bound.norm == norm:
                    numbers = f"{bound.value:>10.4g} {bound.ratio:>10.4g}"
                    lines.append(f"{norm:<6} {bound.name:<{width}} {bound.scope:<12} {numbers}")
        return "\n".join(lines + ([self.note] if self.note else []))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars on a logarithmic axis: the measured constants in black, bounds by where they hold."""
        if ax is None:
            from matplotlib.figure import Figure

            ax = Figure(figsize=(6.4, 3.2), layout="constrained").subplots()
        colors = {"at x": "#0072B2", "in the ball": "#E69F00", "everywhere": "#009E73"}
        bars: list[tuple[str, float, str, str]] = []
        for norm, value in self.local.items():
            bars.append((f"measured, norm {norm}", value, "black", "measured at x"))
            own = [bound for bound in self.bounds if bound.norm == norm and bound.value < float("inf")]
            bars += [(bound.name, bound.value, colors[bound.scope], f"bound {bound.scope}") for bound in own]
        values = [value for _, value, _, _ in bars]
        low = min([value for value in values if value > 0], default=1.0) / 3
        high = max([*values, 3 * low])
        seen: set[str] = set()
        for height, (_, value, color, label) in enumerate(bars):
            ax.barh(-height, value - low, left=low, color=color, label=None if label in seen else label)
            ax.annotate(f"{value:.3g}", (value, -height), (3, 0), textcoords="offset points", va="center", fontsize=8)
            seen.add(label)
        ax.set_yticks([-height for height in range(len(bars))], [name for name, *_ in bars])
        ax.set(xscale="log", xlim=(low, high * (high / low) ** 0.15), xlabel="Lipschitz constant", title=self.name)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(seen), frameon=False)
        return ax


def report(
    module: Callable[..., Any],
    x: Float[Tensor, "batch tokens features"],
    *,
    call: Callable[[Any, Tensor], Tensor] | None = None,
    norms: Sequence[Norm] = ("2", "token"),
    name: str | None = None,
) -> LipschitzReport:
    """Measures an attention layer at tokens x, the worst sequence counting, and gives the bounds that apply to it.

    The layer is any module or function of tokens. Dot-product attention is recognised by its weights, see
    `DotProductHeads.of`, and believed only if these give the layer's outputs, with a causal mask or without one, up to
    a constant. A layer with a method ``lipschitz_bound(num_tokens, norm)``, such as L2SelfAttention, is asked. Of any
    other only the local constants are given. `call(module, x)` tells how to call it where ``module(x)`` will not do,
    for instance with a mask. Modules are measured in evaluation mode.

    Cost: that of `local_lipschitz`. For wide layers the norm "token" is the expensive one.

    Example:
        >>> layer = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        >>> [bound.name for bound in report(layer, torch.randn(2, 3, 4), norms=["token"]).bounds]
        ['covariances', 'ball']
    """
    heads, known = None, DotProductHeads.of(module)
    width = getattr(module, "features", None) if known is None else known.query.shape[-1]
    if call is None and isinstance(width, int):
        check_tokens("x", x, width)
    with _evaluating(module), sdpa_kernel(SDPBackend.MATH):
        f = _as_map(module, call)
        local: dict[Norm, float] = {norm: local_lipschitz(f, x, norm).amax().item() for norm in norms}
        if known is not None:
            heads = _confirmed(known.to(torch.float64), f, x)
    bounds, note = [], "No bound is known for such a layer."
    if heads is not None:
        mask = ", causal" if heads.causal else ""
        note = f"Dot-product attention, {len(heads.query)} heads{mask}: there is no bound that holds everywhere."
        bounds = [b for norm in norms for b in _dot_product_bounds(heads, x.double(), norm)]
    elif known is not None:
        note = "It looks like dot-product attention, but its weights do not give its outputs: no bound is given."
    elif hasattr(module, "lipschitz_bound"):
        bounds, note = _declared_bounds(module, x.shape[1], norms)
    named = tuple(_over(bound, local[bound.norm]) for bound in bounds)
    kind = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "map")
    title = kind if name is None else name
    radius = token_norm(x).amax().item()
    return LipschitzReport(title, x.shape[1], x.shape[2], radius, local, named, note)


def _over(bound: Bound, local: float) -> Bound:
    return bound._replace(ratio=bound.value / local if local > 0 else float("inf"))


def _dot_product_bounds(heads: DotProductHeads, x: Tensor, norm: Norm) -> Iterator[Bound]:
    n, radius = x.shape[1], token_norm(x).amax().item()
    if norm == "inf":
        return
    found: list[tuple[str, Scope, Tensor]] = [("covariances", "at x", local_bound(heads, x, norm).amax())]
    if norm == "2":
        found.append(("Yudin et al.", "at x", attention_matrix_bound(heads, x).amax()))
    found.append(("ball", "in the ball", ball_bound(heads, n, radius, norm)))
    if norm == "2":
        found.append(("ball, Castin et al.", "in the ball", published_ball_bound(heads, n, radius)))
        field = "mean field, causal" if heads.causal else "mean field, Castin et al."
        found.append((field, "in the ball", published_mean_field_bound(heads, radius)))
    yield from (Bound(name, norm, scope, value.item(), 1.0) for name, scope, value in found)


def _declared_bounds(module: Any, num_tokens: int, norms: Sequence[Norm]) -> tuple[list[Bound], str]:
    bounds, reason = [], ""
    for norm in norms:
        try:
            value = torch.as_tensor(module.lipschitz_bound(num_tokens, norm)).item()
        except ValueError as error:
            reason = str(error)
        else:
            bounds.append(Bound("declared", norm, "everywhere", value, 1.0))
    return bounds, "" if bounds or not reason else f"No bound: {reason}"


def _confirmed(heads: DotProductHeads, f: Callable[[Tensor], Tensor], x: Tensor) -> DotProductHeads | None:
    """The heads with the mask that the layer is seen to use, or None if neither gives its outputs."""
    with torch.no_grad():
        output = f(x).double()
        for causal in (heads.causal, not heads.causal):
            candidate = replace(heads, causal=causal)
            own = candidate(x.double())
            difference = output - own
            error = (difference - difference[:1, :1]).abs().amax()
            if error <= 1e-3 * (own - own[:1, :1]).abs().amax() + 1e-6:
                return candidate
    return None


def _as_map(module: Any, call: Callable[[Any, Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    if call is not None:
        return lambda x: call(module, x)
    if isinstance(module, nn.MultiheadAttention):
        if module.batch_first:
            return lambda x: module(x, x, x, need_weights=False)[0]
        return lambda x: module(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1)

    def first(x: Tensor) -> Tensor:
        y = module(x)
        return y if isinstance(y, Tensor) else y[0]

    return first


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Dropout off, and torch's fast path of attention, which has no derivatives."""
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    training, fast = [m.training for m in modules], torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for m in modules:
            m.training = False
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for m, mode in zip(modules, training, strict=True):
            m.training = mode
