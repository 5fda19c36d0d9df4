"""The router's network: from a summary of the residual to S, compensation and the weight of every source."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

HIDDEN, EMBEDDING, HEAD = 256, 64, 64
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


class PairHead(nn.Module):
    """A number for every pair of units of every input, from φ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN + 4 * EMBEDDING, HEAD)
        self.last = nn.Linear(HEAD, 1)

    def forward(self, code: Tensor, pair: Tensor) -> Tensor:
        """From the input's part of φ, `[inputs, hidden]`, and the pair's, to `[inputs, units, units]`.

        The first layer is linear in φ, so the two parts are mapped apart and added: φ of every pair of every input is
        never held.
        """
        of_input = code @ self.first.weight[:, :HIDDEN].T  # [inputs, head]
        of_pair = pair @ self.first.weight[:, HIDDEN:].T + self.first.bias  # [units, units, head]
        found: Tensor = self.last(gelu(of_input[:, None, None] + of_pair))
        return found.squeeze(-1)


class RouterNetwork(nn.Module):
    """The paper's pair features and three heads on them.

    `φ_ij = [E(z); e_i; e_j; |e_i − e_j|; e_i ⊙ e_j]`, E an encoder of the summary z, e a learned embedding of each
    unit. `Ŝ_ij` and `α̂_ij` are heads on φ_ij; `ŵ_i` is the mean over j of a third one. With a width of 768 and 12
    heads it has 0.825 million parameters.

    mean, scale: of the summaries that it is trained on; z is standardized with them.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, summary: int, units: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(summary))
        self.register_buffer("scale", torch.ones(summary))
        self.encoder = nn.Sequential(
            nn.LayerNorm(summary),
            nn.Linear(summary, HIDDEN),
            nn.GELU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.GELU(),
            nn.Linear(HIDDEN, HIDDEN),
        )
        self.units = nn.Parameter(torch.randn(units, EMBEDDING) / EMBEDDING**0.5)
        self.S, self.alpha, self.weight = PairHead(), PairHead(), PairHead()

    def forward(self, z: Tensor) -> Prediction:
        """Predict for summaries `[inputs, 3 · width]`."""
        code = self.encoder((z - self.mean) / self.scale)  # [inputs, hidden]
        pair = self._pairs()  # [units, units, 4 · embedding]
        alpha = MOST * self.alpha(code, pair).sigmoid()
        return Prediction(self.S(code, pair), alpha, self.weight(code, pair).mean(-1))

    def _pairs(self) -> Tensor:
        e = self.units
        count = len(e)
        i, j = e[:, None].expand(count, count, -1), e[None].expand(count, count, -1)
        return torch.cat([i, j, (i - j).abs(), i * j], -1)
