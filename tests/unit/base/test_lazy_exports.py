"""A lazy door loads a module when a name of it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import insitu
from insitu.base.lazy_exports import export_lazily

ROOM = """
if TYPE_CHECKING:
    from insitu import errors
    from insitu.grid import layout
    from insitu.grid.layout.order import (
        Order,
        Rows,
    )
    from insitu.base.spec import TaskId

__getattr__, __dir__ = export_lazily(__name__)
from insitu.grid import nothing
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that gives names of others."""
    package = tmp_path / "a_room"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "own.py").write_text("class Own: pass")
    own = ROOM.replace(
        "TYPE_CHECKING:\n", "TYPE_CHECKING:\n    from a_room import own\n    from a_room.own import Own\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    door = importlib.import_module("a_room")
    (package / "__init__.py").write_text(own)
    yield door.__name__
    for name in [name for name in sys.modules if name.startswith("a_room")]:
        del sys.modules[name]


def test_names_and_modules_are_loaded_when_they_are_asked_for(room: str):
    load, names = export_lazily(room)
    assert names() == ["Order", "Own", "Rows", "TaskId", "errors", "layout", "own"]
    assert load("Rows") is sys.modules["insitu.grid.layout.order"].Rows
    assert load("layout") is sys.modules["insitu.grid.layout"]
    assert load("errors") is sys.modules["insitu.base.errors"]
    assert load("TaskId") is sys.modules["insitu.base.spec"].TaskId
    assert "a_room.own" not in sys.modules
    assert load("own") is sys.modules["a_room.own"] and load("Own") is load("own").Own


def test_another_name_is_no_attribute(room: str):
    load, _ = export_lazily(room)
    with pytest.raises(AttributeError, match=r"module 'a_room' has no attribute 'nothing'"):
        load("nothing")


@pytest.mark.parametrize("name", ["layers", "coordinator", "estimator", "feature_column", "errors", "config"])
def test_what_is_given_whole_can_be_imported(name: str):
    """As `import keras.layers` and `from keras.layers import Dense`."""
    imported = importlib.import_module(f"insitu.{name}")
    assert imported is getattr(insitu, name) is sys.modules[f"insitu.{name}"]
    assert imported.__spec__.name == imported.__name__ != f"insitu.{name}"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'insitu\.nothing'"):
        importlib.import_module("insitu.nothing")
