"""The router's network: from a summary of the residual to S, compensation and the weight of every source."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

HIDDEN, EMBEDDING = 256, 64
TRUNK = (256, 128)
DROPOUT = 0.1  # in training: a few thousand inputs are soon known by heart
MOST = 3.0  # compensation lies in [0, 3], as in the searches


class Prediction(NamedTuple):
    """What a router says of a batch."""

    S: Tensor  # [inputs, source, substitute]; the diagonal means nothing
    alpha: Tensor  # [inputs, source, substitute]
    weight: Tensor  # [inputs, source], before the softmax

    @property
    def share(self) -> Tensor:
        """The weights as shares of one: the paper's `w̃`."""
        return self.weight.softmax(-1)


class RouterNetwork(nn.Module):
    """The paper's pair features and three heads on them.

    `φ_ij = [E(z); e_i; e_j; |e_i − e_j|; e_i ⊙ e_j]`, E an encoder of the summary z, e a learned embedding of each
    unit. Two layers on φ_ij are common to the heads: `Ŝ_ij`, `α̂_ij`, and one whose mean over j is `ŵ_i`. With a width
    of 768 and 12 heads it has 0.826 million parameters.

    mean, scale: of the summaries that it is trained on; z is standardized with them.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, summary: int, units: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(summary))
        self.register_buffer("scale", torch.ones(summary))
        self.encoder = nn.Sequential(
            nn.LayerNorm(summary), nn.Linear(summary, HIDDEN), nn.GELU(), nn.Dropout(DROPOUT), nn.Linear(HIDDEN, HIDDEN)
        )
        self.units = nn.Parameter(torch.randn(units, EMBEDDING))
        self.first, self.second = nn.Linear(HIDDEN + 4 * EMBEDDING, TRUNK[0]), nn.Linear(*TRUNK)
        self.heads = nn.Linear(TRUNK[1], 3)
        self._kept: tuple[object, Tensor] | None = None

    def forward(self, z: Tensor) -> Prediction:
        """Predict for summaries `[inputs, 3 · width]`."""
        code = self.encoder((z - self.mean) / self.scale)  # [inputs, hidden]
        # The first layer is linear in φ, so the parts of input and pair are mapped apart and added: φ of every pair of
        # every input is never held.
        of_input = code @ self.first.weight[:, :HIDDEN].T
        pairs = self._of_pair()
        if torch.is_grad_enabled() or z.device.type != "cpu":
            found = self.heads(gelu(self.second(gelu(of_input[:, None, None] + pairs))))
        else:  # one input at a time stays in the cache: half the time
            found = torch.stack([self.heads(gelu(self.second(gelu(row + pairs)))) for row in of_input])
        S, alpha, weight = found.unbind(-1)
        return Prediction(S, MOST * alpha.sigmoid(), weight.mean(-1))

    def _of_pair(self) -> Tensor:
        """The pairs' part of the first layer, `[units, units, trunk]`: of a frozen network it is computed once."""
        if torch.is_grad_enabled() and self.units.requires_grad:
            return self._mapped_pairs()
        if self.units.is_inference():  # has no versions
            return self._mapped_pairs()
        own = (self.units, self.first.weight, self.first.bias)
        state = ([value._version for value in own], self.units.device, self.units.dtype)
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, self._mapped_pairs())
        return self._kept[1]

    def _mapped_pairs(self) -> Tensor:
        e = self.units
        count = len(e)
        i, j = e[:, None].expand(count, count, -1), e[None].expand(count, count, -1)
        return torch.cat([i, j, (i - j).abs(), i * j], -1) @ self.first.weight[:, HIDDEN:].T + self.first.bias
