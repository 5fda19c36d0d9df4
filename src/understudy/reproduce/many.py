"""The frame of a study over many models: trained, measured and kept in a folder, so that it can be interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.meter import Progress
from understudy.reproduce.study import Report


@dataclass(frozen=True)
class ManySetting:
    """What a study over many models runs on; what is None is as the scale has it."""

    scale: str
    folder: Path  # models, tokens and runs are kept below it, and used again
    seeds: int = 1
    corpus: str | None = None  # for language models that are trained
    family: str | None = None
    images: Path | None = None
    labels: Mapping[str, int] | None = None
    texts: str | Path | None = None
    checkpoints: Path | None = None  # a folder of saved checkpoints
    count: int | None = None
    engine: str = "local"
    progress: Callable[[str], Progress] | None = None

    def bar(self, step: str) -> Progress | None:
        """The progress callback of a step."""
        return None if self.progress is None else self.progress(step)


@dataclass(frozen=True)
class ManyStudy:
    """One of the paper's studies over many models. options: those that it knows, at each scale."""

    name: str
    title: str
    options: Mapping[str, tuple[str, ...]]
    needs: Mapping[str, str]
    run: Callable[[ManySetting], Report]

    def takes(self, scale: str) -> tuple[str, ...]:
        """The options that it knows at a scale."""
        return self.options[scale]


def spread_of(seeds: int) -> str:
    """What the ends below a figure are, and what a verdict goes by."""
    if seeds == 1:
        return "one seed: no trend can be told from chance (--seeds 3); intervals, where there are, are over inputs"
    return f"{seeds} seeds: below each figure its least and largest; verdicts by 95% intervals over seeds, each alone"
