"""The command line: one file a verb. Progress and tables live here and nowhere else."""

from understudy.cli.app import app

__all__ = ["app"]
