"""A router: a fitted network, the layer and model that it is for, and the budgets it was taught."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from understudy.anatomy import Anatomy, anatomy
from understudy.errors import UnderstudyError
from understudy.identity import fingerprint
from understudy.outcome import Outcome
from understudy.routing.network import Prediction, RouterNetwork
from understudy.routing.subsets import select

WEIGHTS, CARD = "router.safetensors", "router.json"


@dataclass(frozen=True)
class Card:
    """What a router is for and how it was made."""

    model: str
    model_hash: str
    layer: int
    units: int
    width: int  # of the residual stream
    outcome: Outcome
    keep: tuple[int, ...]
    stage: str  # R1: pairs; R2: joint subsets too
    seed: int
    how: dict[str, Any] = field(default_factory=dict)  # data, counts, settings: where the paper is silent, our choices
    understudy: str = version("understudy")


@dataclass(frozen=True)
class Router:
    """Chooses, for each input, the units of a layer that stay.

    >>> router = Router.load("my-router")  # doctest: +SKIP
    >>> router.choose(z, keep=6)  # bool [inputs, units]  # doctest: +SKIP
    """

    network: RouterNetwork
    card: Card

    @torch.no_grad()
    def predict(self, z: Tensor) -> Prediction:
        """S, compensation and weights from summaries `[inputs, 3 · width]`."""
        if z.ndim != 2 or z.shape[1] != 3 * self.card.width:
            raise UnderstudyError(
                f"A summary for this router has {3 * self.card.width} numbers (three times the width "
                f"{self.card.width}), but {list(z.shape)} was given."
            )
        if not bool(torch.isfinite(z).all()):
            bad = (~torch.isfinite(z).all(-1)).nonzero()[:, 0].tolist()
            raise UnderstudyError(
                f"The residual of {len(bad)} inputs holds NaN or infinity (the first is number {bad[0]} of the batch): "
                "nothing can be chosen for them. Look at the inputs, or at the precision of the model."
            )
        with torch.autocast(self.network.mean.device.type, enabled=False):
            found: Prediction = self.network(z.to(self.network.mean))
        return found

    def choose(self, z: Tensor, keep: int) -> Tensor:
        """The units that stay, bool `[inputs, units]`: the exact argmax of the predicted utility."""
        self.check_budget(keep)
        said = self.predict(z)
        return select(said.S, said.share, keep)

    def check_budget(self, keep: int) -> None:
        """Refuse a budget that is not possible."""
        if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep <= self.card.units:
            raise UnderstudyError(
                f"keep={keep!r} is not possible: of {self.card.units} units, 1 to {self.card.units} can be kept."
            )

    def check_model(self, model: nn.Module | Anatomy, *, known: str | None = None) -> Anatomy:
        """Refuse another model than the one that the router was fitted to. known: the model's fingerprint, if known."""
        body = model if isinstance(model, Anatomy) else anatomy(model)
        card = self.card
        if card.layer >= len(body.layers):
            raise UnderstudyError(
                f"This router is for layer {card.layer} of {card.model}, but {body.name} has {len(body.layers)} layers."
            )
        units = body.layers[card.layer].units
        if units != card.units:
            raise UnderstudyError(
                f"This router is for {card.units} heads, but layer {card.layer} of {body.name} has {units}."
            )
        if (known or fingerprint(body)) != card.model_hash:
            raise UnderstudyError(
                f"This router was fitted to {card.model}, and {body.name} has other weights or another architecture: "
                "fit one to it (understudy route train)."
            )
        return body

    def save(self, folder: str | Path) -> Path:
        """Write the network as safetensors and the card as JSON."""
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in self.network.state_dict().items()}, out / WEIGHTS)
        (out / CARD).write_text(json.dumps(asdict(self.card), indent=1) + "\n", encoding="utf-8")
        return out

    @classmethod
    def load(cls, folder: str | Path) -> Router:
        """Read a router that `save` has written."""
        where = Path(folder)
        try:
            known = json.loads((where / CARD).read_text(encoding="utf-8"))
            card = Card(**{**known, "keep": tuple(known["keep"])})
            with torch.inference_mode(mode=False):  # weights that are good outside of a caller's inference mode too
                network = RouterNetwork(3 * card.width, card.units)
                network.load_state_dict(load_file(where / WEIGHTS))
        except FileNotFoundError as problem:
            raise UnderstudyError(f"{where} holds no router: it needs {CARD} and {WEIGHTS}.") from problem
        except Exception as problem:  # what safetensors, JSON and torch say of a damaged file
            raise UnderstudyError(f"The router in {where} cannot be read: {problem}") from problem
        return cls(network.eval(), card)
