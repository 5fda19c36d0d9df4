"""The recipe of the mini studies on pictures: the digits, or a folder of labelled pictures of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from understudy.inputs.pictures import Pictures
from understudy.recipes.digits import DIGITS
from understudy.recipes.vit import VitRecipe, family


@dataclass(frozen=True)
class MiniPictures:
    """How pictures are trained on at mini scale: small, and few tokens."""

    epochs: int = 80  # of the digits, half of their own recipe
    side: int = 32  # of the user's pictures
    patch: int = 8
    seen: int = 150_000  # of the user's pictures in training, over all epochs
    measured: int = 256  # held-out pictures of CFS

    def family(self, data: Pictures, heads: Sequence[int]) -> dict[str, VitRecipe]:
        """ViTs of these many heads, of one width."""
        if data is DIGITS.data:
            return family(data, heads, epochs=self.epochs, by_index=True)
        epochs = max(1, round(self.seen / len(data.training)))
        # Grey pictures are often signs, which are others when mirrored.
        moves: dict[str, Any] = {"shift": 2.0, "rotation": 5.0, "stretch": 0.1, "flip": data.channels > 1}
        return family(
            data, heads, patch=self.patch, epochs=epochs, learning_rate=3e-3, dropout=0.0, by_index=True, **moves
        )

    def one(self, data: Pictures) -> VitRecipe:
        """The ViT whose training is followed."""
        if data is DIGITS.data:
            return replace(DIGITS, by_index=True)
        return self.family(data, (6,))[f"{data.name}-6x8"]


MINI = MiniPictures()
