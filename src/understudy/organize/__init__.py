"""How a network is organised, read from a run: oracles, coverage, rank, direction, and their tables."""

from understudy.organize.candidates import candidates, partial, valid
from understudy.organize.compare import compare
from understudy.organize.coverage import coverage, representatives
from understudy.organize.direction import gap, one_sided
from understudy.organize.oracles import matched_oracle, raw_oracle
from understudy.organize.organization import organization
from understudy.organize.rank import effective_rank
from understudy.organize.summary import summary

__all__ = [
    "candidates",
    "compare",
    "coverage",
    "effective_rank",
    "gap",
    "matched_oracle",
    "one_sided",
    "organization",
    "partial",
    "raw_oracle",
    "representatives",
    "summary",
    "valid",
]
