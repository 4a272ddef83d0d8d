"""Upper bounds of spectral norms against Gram iteration without shifts, and against the norm by singular values.

    python -m benchmarks.spectral

prints the times of `spectral_norm_bound` of square matrices, forward and backward, over those of both rivals, and how
far each bound is above the norm in percent: of a random matrix, and of the worst of some hundred spectra, those of two
values among them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.timing import medians
from flowattn.lipschitz import gram, spectral_norm_bound

SIZES = (32, 64, 128, 256, 512, 1024)
TOLERANCE = 0.01


def unshifted(matrix: Tensor) -> Tensor:
    """Gram iteration as it was published, to the same tolerance."""
    num_squarings = gram._num_plain(len(matrix), TOLERANCE)
    return gram.upper_bound(matrix[None], gram.of_gram(gram.plain(num_squarings)))


def exact(matrix: Tensor) -> Tensor:
    """The norm."""
    return torch.linalg.matrix_norm(matrix, 2)


RIVALS: dict[str, Callable[[Tensor], Tensor]] = {
    "flowattn": spectral_norm_bound,
    "unshifted": unshifted,
    "singular values": exact,
}


def step(norm: Callable[[Tensor], Tensor], matrix: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def run() -> None:
        matrix.grad = None
        norm(matrix).sum().backward()

    return run


def excess(norm: Callable[[Tensor], Tensor], matrices: list[Tensor]) -> float:
    """How far above the norms it may be, in percent."""
    with torch.no_grad():
        return max(100 * (norm(matrix) / exact(matrix) - 1).item() for matrix in matrices)


def hard(size: int) -> list[Tensor]:
    """Diagonal matrices whose largest value is hard to tell from the others."""
    place = torch.arange(size) / size
    values = [torch.ones(size), 1 - place, 1 - place.square(), 0.5 + 0.5 * (place == 0), torch.exp(-20 * place)]
    for power in (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        is_top = torch.arange(size) < size**power
        values += [torch.where(is_top, 1.0, other) for other in torch.linspace(0, 0.95, 12)]
    return [torch.diag(v.double()) for v in values]


def main(rounds: int = 15) -> None:
    """Prints the table."""
    torch.manual_seed(0)
    ours, *others = RIVALS
    print("| size | flowattn, ms | of unshifted | of singular values | random: flowattn, unshifted | worst: both |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        matrix = torch.randn(size, size, requires_grad=True)
        few = rounds if size < 1024 else max(3, rounds // 3)
        t = medians({name: step(norm, matrix) for name, norm in RIVALS.items()}, few, str(size))
        ratios = " | ".join(f"{t[ours] / t[name]:.2f}" for name in others)
        spectra = [[matrix.detach().double()], hard(size) if size <= 256 else hard(size)[::4]]
        above = [" and ".join(f"{excess(RIVALS[name], some):.2f} %" for name in list(RIVALS)[:2]) for some in spectra]
        print(f"| {size} | {t[ours]:.2f} | {ratios} | {' | '.join(above)} |", flush=True)


if __name__ == "__main__":
    main()
