"""The paper's studies as commands: our figures beside the paper's, and which of its findings hold here."""

from __future__ import annotations

from understudy.errors import UnderstudyError
from understudy.reproduce import conditioning, direction, table1, table2
from understudy.reproduce.study import Study

STUDIES: dict[str, Study] = {
    study.name: study for study in (table1.STUDY, conditioning.STUDY, direction.STUDY, table2.STUDY)
}


def study(name: str) -> Study:
    """A study by its name."""
    if name not in STUDIES:
        raise UnderstudyError(f"There is no study {name!r}: there are {', '.join(STUDIES)}.")
    return STUDIES[name]
