"""`python -m understudy` is the command."""

from understudy.cli import app

app()
