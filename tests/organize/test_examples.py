import doctest
import importlib
import pkgutil

import pytest

import understudy.organize as organize


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(organize.__path__)])
def test_the_examples_in_docstrings_hold(name):
    result = doctest.testmod(importlib.import_module(f"understudy.organize.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
