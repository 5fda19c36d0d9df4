"""The paper's studies as commands: our figures beside the paper's, and which of its findings hold here."""

from __future__ import annotations

from understudy.errors import UnderstudyError
from understudy.reproduce import (
    conditioning,
    direction,
    figure2,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
)
from understudy.reproduce.many import ManyStudy
from understudy.reproduce.study import Study

OF_ONE_MODEL = (table1.STUDY, conditioning.STUDY, direction.STUDY, table2.STUDY, table6.STUDY, table7.STUDY)
OF_MANY = (table3.STUDY, table4.STUDY, table5.STUDY, figure2.STUDY)
STUDIES: dict[str, Study | ManyStudy] = {study.name: study for study in (*OF_ONE_MODEL, *OF_MANY)}


def study(name: str) -> Study | ManyStudy:
    """A study by its name."""
    if name not in STUDIES:
        raise UnderstudyError(f"There is no study {name!r}: there are {', '.join(STUDIES)}.")
    return STUDIES[name]
