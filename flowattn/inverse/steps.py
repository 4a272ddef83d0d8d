"""Where to go next: the plain step, and those that are faster."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Step(ABC):
    """Proposes the next point from the last one x, its plain step g = y - f(x), and the blocks J_ii there.

    A proposal that is not finite is not taken: the plain step is.
    """

    @abstractmethod
    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        """The next point of each sample."""

    @abstractmethod
    def keep(self, going: Tensor) -> None:
        """Forgets all samples but those that go on."""


class PlainStep(Step):
    r"""The iteration :math:`x \leftarrow y - f(x)` itself."""

    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        return g

    def keep(self, going: Tensor) -> None:
        pass


class NewtonStep(Step):
    r"""Newton's step on each token: :math:`x_i \leftarrow x_i + (I + J_{ii})^{-1} (g_i - x_i)`."""

    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        assert blocks is not None
        identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        step, info = torch.linalg.solve_ex(identity + blocks, (g - x).unsqueeze(-1))
        singular = (info != 0).any(-1)  # which a contraction's never is
        return x + step.squeeze(-1).masked_fill(singular[:, None, None], torch.nan)

    def keep(self, going: Tensor) -> None:
        pass


class ChordStep(Step):
    r"""A step with the blocks J_ii that the first tokens had at the start, which `following` takes as the plain one.

    .. math:: x_i \leftarrow x_i + (I - J_{ii} + J_{ii}^2)(g_i - x_i)

    Under a causal mask Jacobians are triangular over tokens, and the earlier a token, the fewer others it is averaged
    with: the first few blocks are all that makes the plain iteration slow.
    """

    def __init__(self, blocks: Tensor, following: Step) -> None:
        self.correction = blocks @ blocks - blocks
        self.following = following

    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        first = slice(self.correction.shape[1])
        step = (g[:, first] - x[:, first]).unsqueeze(-1)
        g = g.clone()
        g[:, first] += (self.correction @ step).squeeze(-1)
        return self.following.propose(x, g, None)

    def keep(self, going: Tensor) -> None:
        self.correction = self.correction[going]
        self.following.keep(going)


class AndersonStep(Step):
    """The combination of past steps whose residual is smallest. The first two are plain: easy maps need no more.

    Cost: O(N D m) for m past steps, which are kept.

    References:
        | Anderson Acceleration for Fixed-Point Iterations (Walker, Ni, 2011)
    """

    def __init__(self, history: int) -> None:
        self.history = history
        self.num_plain = 2
        self.num_past = 0
        self.last: list[Tensor] = []  # the last plain step and its residual
        self.past: list[Tensor] = []  # the differences of those before, [B, room, N D] each, in a ring
        self.gram = torch.empty(0)  # the inner products of those of the residuals

    def propose(self, x: Tensor, g: Tensor, blocks: Tensor | None) -> Tensor:
        if self.num_plain > 0:
            self.num_plain -= 1
            return g
        now = [g.flatten(1), (g - x).flatten(1)]
        if not self.last:
            self.last = now
            self.past = [t.new_zeros(len(t), 0, t.shape[1]) for t in now]
            self.gram = g.new_zeros(len(g), 0, 0)
            return g
        self._remember(now)
        G, R = (past[:, : self.num_past] for past in self.past)
        gram = self.gram[:, : self.num_past, : self.num_past]
        # All columns are brought to length 1, or the ridge would hide the latest, which are the shortest.
        length = gram.diagonal(dim1=1, dim2=2).sqrt().clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1)
        ridge = 100 * torch.finfo(x.dtype).eps * torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
        weights, _ = torch.linalg.solve_ex(gram / length / length.mT + ridge, R @ now[1].unsqueeze(-1) / length)
        return g - ((weights / length).mT @ G).view_as(g)

    def _remember(self, now: list[Tensor]) -> None:
        room = self.past[0].shape[1]
        if self.num_past == room < self.history:  # few samples need many steps
            more = min(max(4, room), self.history - room)
            self.past = [torch.nn.functional.pad(past, (0, 0, 0, more)) for past in self.past]
            self.gram = torch.nn.functional.pad(self.gram, (0, more, 0, more))
        place = self.num_past % self.history
        for past, new, old in zip(self.past, now, self.last, strict=True):
            torch.sub(new, old, out=past[:, place])
        R = self.past[1]
        products = (R @ R[:, place].unsqueeze(-1)).squeeze(-1)
        self.gram[:, place], self.gram[:, :, place] = products, products
        self.last = now
        self.num_past += 1

    def keep(self, going: Tensor) -> None:
        if self.last:
            self.last = [t[going] for t in self.last]
            self.past = [t[going] for t in self.past]
            self.gram = self.gram[going]
