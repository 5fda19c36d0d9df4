"""Measure which component of a Transformer can stand in for which, on each input.

    import understudy as us

    model = us.load("digits")
    run = us.measure(model, us.digits(64), layers="all")
    us.summary(run)

Names load what they need on first use, so that importing the package stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.checks import check
    from understudy.errors import UnderstudyError
    from understudy.gates import gated
    from understudy.inputs.batch import Inputs
    from understudy.inputs.digits import digits
    from understudy.inputs.images import images
    from understudy.inputs.stdlib import stdlib
    from understudy.inputs.texts import masked_texts, texts
    from understudy.measurement import measure
    from understudy.models import load
    from understudy.organize.compare import compare
    from understudy.organize.organization import organization
    from understudy.organize.summary import summary
    from understudy.planning import plan
    from understudy.routing.online import routed
    from understudy.store import concat, open_run

_WHERE = {
    "load": "models",
    "Inputs": "inputs.batch",
    "images": "inputs.images",
    "texts": "inputs.texts",
    "masked_texts": "inputs.texts",
    "digits": "inputs.digits",
    "stdlib": "inputs.stdlib",
    "measure": "measurement",
    "plan": "planning",
    "open_run": "store",
    "concat": "store",
    "organization": "organize.organization",
    "summary": "organize.summary",
    "compare": "organize.compare",
    "gated": "gates",
    "routed": "routing.online",
    "check": "checks",
    "UnderstudyError": "errors",
}

__all__ = [
    "Inputs",
    "UnderstudyError",
    "check",
    "compare",
    "concat",
    "digits",
    "gated",
    "images",
    "load",
    "masked_texts",
    "measure",
    "open_run",
    "organization",
    "plan",
    "routed",
    "stdlib",
    "summary",
    "texts",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("understudy")
    if name not in _WHERE:
        raise AttributeError(f"module 'understudy' has no attribute {name!r}")
    return getattr(import_module(f"understudy.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
