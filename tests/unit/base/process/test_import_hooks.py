"""Functions are called right after an import, once, or at once where the module is there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from insitu.base.process import import_hooks
from insitu.base.process.import_hooks import call_after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The name of a module that nobody has imported."""
    (tmp_path / "hooked_module.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(import_hooks, "_waiting", {})
    yield "hooked_module"
    sys.modules.pop("hooked_module", None)


def test_functions_wait_for_the_import_and_see_the_whole_module(module: str) -> None:
    seen: list[int] = []

    def function() -> None:
        seen.append(sys.modules[module].VALUE)

    call_after_import(module, function)
    call_after_import(module, function)
    assert seen == []
    importlib.import_module(module)
    assert seen == [7]
    call_after_import(module, function)
    assert seen == [7, 7]


def test_a_function_may_ask_for_another_one_after_the_same_import(module: str) -> None:
    seen: list[int] = []

    def function() -> None:
        call_after_import(module, lambda: seen.append(sys.modules[module].VALUE))

    call_after_import(module, function)
    importlib.import_module(module)
    assert seen == [7]


def test_a_module_that_is_not_there_stays_an_import_error(module: str) -> None:
    call_after_import("hooked_module_of_nobody", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_module_of_nobody")
    assert importlib.import_module(module).VALUE == 7
