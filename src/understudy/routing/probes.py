"""How far CFS can be told from features: one predictor for all of them, and what its predictions are worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from understudy.errors import UnderstudyError
from understudy.lens.proxies import within_source
from understudy.organize.pooled import Array
from understudy.routing import losses
from understudy.routing.descent import Descent, descend
from understudy.routing.network import RouterNetwork


@dataclass(frozen=True)
class Examples:
    """Inputs with their features `[inputs, numbers]` and their measured S `[inputs, source, substitute]`."""

    features: Tensor
    S: Tensor

    def known(self) -> Examples:
        """Those with any valid source: the others have nothing to say."""
        some = torch.isfinite(self.S).any(-1).any(-1)
        if not bool(some.any()):
            raise UnderstudyError(
                f"On none of {len(some)} inputs is a source valid, so there is no S to predict: take other inputs, "
                "another layer, or a lower threshold."
            )
        return Examples(self.features[some], self.S[some])


# Briefly, since a comparison needs many, and so with a larger step than a router.
BRIEF = Descent(epochs=12, batch=32, learning_rate=3e-3)


@dataclass(frozen=True)
class Score:
    """What predicted scores are worth, over valid source-input pairs.

    recovery: the mean measured S of the predicted representative. accuracy: the share whose representative is a truly
    best one. spearman: the mean within-source rank correlation. sources: how many are valid. unscored: those of them
    without any score. constant: those without a rank correlation.
    """

    recovery: float
    accuracy: float
    spearman: float
    sources: int
    unscored: int
    constant: int


def probe(training: Examples, validation: Examples, *, seed: int, by: Descent = BRIEF) -> RouterNetwork:
    """Fit the router's network to S by the ranking and the regression loss. The same seed gives the same network.

    Features are standardized by the training inputs. The network of the epoch whose loss on the validation inputs was
    least is returned.
    """
    training, validation = training.known(), validation.known()

    def build() -> RouterNetwork:
        network = RouterNetwork(training.features.shape[1], training.S.shape[-1])
        network.mean.copy_(training.features.mean(0))
        network.scale.copy_(_spread(training.features))
        return network

    return descend(
        build,
        len(training.S),
        lambda network, index: _loss(network, training.features[index], training.S[index]),
        seed=seed,
        by=by,
        score=lambda network: float(_loss(network, validation.features, validation.S)),
    )


def predicted(network: RouterNetwork, features: Tensor) -> np.ndarray:
    """The predicted S of every pair: `[inputs, source, substitute]`; the diagonal means nothing."""
    with torch.no_grad():
        return np.concatenate([network(part).S.numpy() for part in torch.split(features, 256)])


def score(scores: np.ndarray, S: np.ndarray) -> Score:
    """Hold scores of candidates against measured S, `[inputs, source, substitute]` each.

    >>> S = np.array([[[np.nan, 0.1, 0.4], [0.2, np.nan, -0.2], [np.nan] * 3]])
    >>> score(np.array([[[0.0, 0.3, 0.5], [0.1, 0.0, 0.2], [0.0, 0.1, 0.0]]]), S)
    Score(recovery=0.1, accuracy=0.5, spearman=0.0, sources=2, unscored=0, constant=0)

    The representative of a source is the candidate with the largest score, the first of equals, among those whose S was
    measured; S is NaN for all others. Its S counts as it is, negative or not. Where no candidate has a score nothing
    stands in, which recovers nothing and is never right. Of candidates that are equally good each is right.
    """
    given: Array = np.broadcast_to(scores, S.shape).astype(np.float64)
    S = S.astype(np.float64)
    known = np.isfinite(S)
    valid = known.any(-1)
    if not valid.any():
        raise UnderstudyError(f"On none of {len(S)} inputs is a source valid: there is no S to hold scores against.")
    ranked = known & np.isfinite(given)
    chosen = np.where(ranked, given, -np.inf).argmax(-1)
    reached = np.take_along_axis(S, chosen[..., None], -1)[..., 0]
    scored = ranked.any(-1)
    most = np.where(known, S, -np.inf).max(-1)
    correlation = within_source(S, given)[valid]
    ordered = np.isfinite(correlation)
    return Score(
        recovery=float(np.where(scored, reached, 0.0)[valid].mean()),
        accuracy=float((scored & (reached >= most))[valid].mean()),
        spearman=float(correlation[ordered].mean()) if ordered.any() else float("nan"),
        sources=int(valid.sum()),
        unscored=int((valid & ~scored).sum()),
        constant=int((~ordered).sum()),
    )


def _loss(network: RouterNetwork, features: Tensor, S: Tensor) -> Tensor:
    said = network(features).S
    return losses.ranking(said, S) + losses.regression(said, S)


def _spread(features: Tensor) -> Tensor:
    """The standard deviation of each feature; one where it is rounding alone, since gradients may be tiny all over."""
    deviation = features.std(0)
    return torch.where(deviation > 1e-6 * features.abs().amax(0), deviation, torch.ones_like(deviation))
