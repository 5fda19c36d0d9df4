"""Teaching routers: a lesson is measured once, and a router of each seed learns from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path

import numpy as np
import torch
from torch import nn

from understudy.anatomy import Anatomy, anatomy
from understudy.errors import UnderstudyError
from understudy.identity import fingerprint
from understudy.inputs.batch import Inputs
from understudy.lens.joint import gated_together
from understudy.lens.subsets import default_budgets
from understudy.meter import Progress
from understudy.outcome import Outcome, resolve
from understudy.routing.fit import Settings, fit
from understudy.routing.lesson import Lesson, joint_masks, lesson, summaries
from understudy.routing.network import RouterNetwork
from understudy.routing.router import CARD, Card, Router
from understudy.routing.splits import apart
from understudy.routing.subsets import select

MASKS = 48  # of each input and budget, as in the paper

# Where the paper is silent.
CHOICES = (
    "network: summaries standardized; an encoder of two layers; two layers on the pair features that three linear "
    "heads share",
    "inputs are weighed by the root of their total deletion effect, in the joint losses by the root of the distance "
    "from best to median mask",
    "ranking: logistic on pairs of substitutes, weighed by their lead; regression: smooth L1",
    "source weight: mean over j of a head on the pair features; cross-entropy with D_drop / sum D_drop",
    "compensation: smooth L1, weighed by S",
    "structured: cross-entropy of softmaxes over 64 random subsets of each budget, utilities divided by 0.02",
    "joint: cross-entropy with the softmax of -KL over 0.05 of the distance from best to median mask, and the expected "
    "KL above the best mask",
    "masks: 4 by CFS, 4 by R1, 2 each by Taylor, size and dissimilarity, 6 hard negatives, the rest random",
    "epoch: the one of least mean log KL over the budgets on the validation inputs",
)

Bar = Callable[[str], Progress | None]


@dataclass(frozen=True)
class Teacher:
    """A measured lesson, and how routers are made from it.

    >>> import understudy as us
    >>> from understudy.routing.splits import digits_splits
    >>> parts = digits_splits(4096)
    >>> teacher = Teacher.of(us.load("digits-12"), parts.training, parts.validation)  # doctest: +SKIP
    >>> first = teacher.pairs(seed=17)  # R1  # doctest: +SKIP
    >>> router = teacher.subsets(first)  # R2  # doctest: +SKIP
    """

    body: Anatomy
    layer: int
    outcome: Outcome
    keep: tuple[int, ...]
    settings: Settings
    training: Inputs
    validation: Inputs
    taught: Lesson
    seen: torch.Tensor  # summaries of the validation inputs
    search: str
    folder: Path | None
    bar: Bar

    @classmethod
    def of(
        cls,
        model: nn.Module,
        training: Inputs,
        validation: Inputs,
        *,
        layer: int = -1,
        keep: Sequence[int] | None = None,
        search: str = "refine",
        outcome: str = "auto",
        settings: Settings | None = None,
        folder: Path | None = None,
        bar: Bar | None = None,
    ) -> Teacher:
        """Measure the lesson. keep: the budgets; by default a quarter, a half and three quarters of the heads.

        folder: where what was measured and fitted is kept; the same work is then not done twice.
        """
        apart(training, validation, "training", "validation")
        body = anatomy(model)
        index = body.layer_index(layer)
        budgets = checked_budgets(keep, body.layers[index].units)
        bars = bar or (lambda _step: None)
        chosen = resolve(body, outcome)
        kept = None if folder is None else folder / "pairs"
        taught = lesson(model, training, layer=index, search=search, outcome=chosen, out=kept, progress=bars("pairs"))
        return cls(
            body=body,
            layer=index,
            outcome=chosen,
            keep=budgets,
            settings=settings or Settings(),
            training=training,
            validation=validation,
            taught=taught,
            seen=summaries(model, validation, layer=index, outcome=chosen),
            search=search,
            folder=folder,
            bar=bars,
        )

    def pairs(self, *, seed: int) -> Router:
        """Fit R1: ranking, regression, source weights, compensation, and the utility of subsets from pairs."""
        return self._fitted(self._card("R1", seed), lambda: self.taught)

    def subsets(self, first: Router, *, masks: int = MASKS) -> Router:
        """Fit R2 with the same seed as an R1: the same, and what happens when subsets are kept together.

        The R1 names some of the subsets that the teacher runs; its weights are not used.
        """
        seed = first.card.seed

        def taught() -> Lesson:
            found = joint_masks(
                self.body.model,
                self.training,
                self.taught,
                keep=self.keep,
                said=first.predict(self.taught.z),
                layer=self.layer,
                outcome=self.outcome,
                count=masks,
                seed=seed,
                progress=self.bar(f"subsets, seed {seed}"),
            )
            return replace(self.taught, masks=found)

        return self._fitted(self._card("R2", seed, masks=masks), taught)

    def _fitted(self, card: Card, taught: Callable[[], Lesson]) -> Router:
        place = None if self.folder is None else self.folder / f"{card.stage}-{card.seed}"
        if place is not None and (place / CARD).exists():
            known = Router.load(place)
            if known.card == card:
                return known
        network = fit(
            taught(),
            keep=self.keep,
            seed=card.seed,
            settings=self.settings,
            score=self._score,
            progress=self.bar(f"{card.stage}, seed {card.seed}"),
        )
        router = Router(network, card)
        if place is not None:
            router.save(place)
        return router

    def _card(self, stage: str, seed: int, **more: int) -> Card:
        how = {
            "training": {**self.training.about, "inputs": len(self.training)},
            "validation": {**self.validation.about, "inputs": len(self.validation)},
            "fingerprints": [self.training.fingerprint(), self.validation.fingerprint()],
            "search": self.search,
            "settings": asdict(self.settings),
            **more,
            "choices": list(CHOICES),
        }
        return Card(
            model=self.body.name,
            model_hash=fingerprint(self.body),
            layer=self.layer,
            units=self.taught.units,
            width=self.taught.z.shape[1] // 3,
            outcome=self.outcome,
            keep=self.keep,
            stage=stage,
            seed=seed,
            how=how,
        )

    @torch.no_grad()
    def _score(self, network: RouterNetwork) -> float:
        """The mean over the budgets of the logarithm of mean KL on the validation inputs."""
        said = network(self.seen)
        masks = np.stack([select(said.S, said.share, size).numpy() for size in self.keep], 1)
        found = gated_together(self.body.model, self.validation, masks, layer=self.layer, outcome=self.outcome)
        return float(np.mean([log(max(kl, 1e-30)) for kl in found["kl"].mean("input").to_numpy()]))


def checked_budgets(keep: Sequence[int] | None, units: int) -> tuple[int, ...]:
    """The budgets in rising order; refused where they are not possible."""
    given = default_budgets(units) if keep is None else tuple(keep)
    wrong = [size for size in given if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= units]
    if wrong or not given:
        raise UnderstudyError(
            f"keep={wrong[0] if wrong else '()'} is not possible: of {units} heads, 1 to {units} can be kept."
        )
    return tuple(sorted(set(given)))
