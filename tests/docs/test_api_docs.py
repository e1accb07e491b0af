"""The API pages say something of every public name: they are made from docstrings."""

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest

import tiered_zero
from tests.support.inspection.insides import record
from tiered_zero.deepspeed import comm, utils, zero


def undocumented(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        value = getattr(module, name)
        if (isinstance(value, type | ModuleType) or callable(value)) and not inspect.getdoc(value):
            yield name
        for member in dir(value) if isinstance(value, type) else ():
            found = inspect.getattr_static(value, member)
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            is_own = inspect.isfunction(function) and function.__module__.startswith("tiered_zero")
            if is_own and not member.startswith("_") and not inspect.getdoc(function):
                yield f"{name}.{member}"


@pytest.mark.parametrize("module", [tiered_zero, record, comm, utils, zero], ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert list(undocumented(module)) == []
