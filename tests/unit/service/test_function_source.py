"""Functions as scripts: each is run here as a task would run it."""

from __future__ import annotations

import enum
import functools
import importlib.util
import linecache
import math
import re
import runpy
import sys
import threading
import xml.etree.ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.base.serialization import from_bytes, to_bytes
from insitu.service.function_source import SCRIPT, VALUES, write_script

FACTOR = 3
TABLE = {"a": np.arange(3), (1, 2): [None, math.inf, b"x"]}
LOCK = threading.Lock()


def run(folder: Path, function: Callable[..., Any], *arguments: Any) -> Any:
    """Write the script of a function, run it, and return what the function has returned."""
    script = write_script(function, arguments)
    (folder / SCRIPT).write_text(script.text)
    (folder / VALUES).write_bytes(to_bytes(script.values))
    runpy.run_path(str(folder / SCRIPT), run_name="__main__")
    return from_bytes((folder / "returned-worker-0.bin").read_bytes())


def keep(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> list[Any]:
        return [function(*arguments)]

    return call


def hide(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


@dataclass
class Settings:
    factor: int = FACTOR + 1
    names: list[str] = field(default_factory=list)

    def double(self, by: int = FACTOR) -> int:
        return self.factor * 2 * by


class Child(Settings):
    RATE = FACTOR * 10

    def double(self, by: int = 1) -> int:
        return super().double(by) + self.RATE


class Colour(enum.Enum):
    RED = 1


@keep
def decorated(x: int) -> int:
    return x + FACTOR


@hide
def hidden(x: int) -> int:
    return x


def is_even(n: int) -> bool:
    return n == 0 or is_odd(n - 1)


def is_odd(n: int) -> bool:
    return n != 0 and is_even(n - 1)


def use_all(x: Any, y: Any = (FACTOR, -1), *, z: float = math.pi) -> dict[str, Any]:
    # A comment.
    texts = [f"{each}" for each in y]
    root = xml.etree.ElementTree.fromstring("<a/>")
    TABLE["a"][0] = 7
    return {
        "x": x,
        "y": list(y),
        "z": z,
        "texts": texts,
        "decorated": decorated(1),
        "double": Child(5, []).double(),
        "default": Settings().double(),
        "even": is_even(4),
        "tag": root.tag,
        "table": TABLE,
        "colour": Colour.RED.value,
        "found": bool(re.match("a", "ab")),
        "sum": float(np.sum(np.ones(3))),
    }


def test_what_a_function_uses_travels_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Defaults and attributes keep what the name meant when they were made; other uses see what it means now.
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 100)
    found = run(tmp_path, use_all, {"n": [1]})
    assert TABLE["a"][0] == 0  # a copy travels
    table = found.pop("table")
    assert table["a"].tolist() == [7, 1, 2] and table[(1, 2)] == [None, math.inf, b"x"]
    assert found == {
        "x": {"n": [1]},
        "y": [3, -1],
        "z": math.pi,
        "texts": ["3", "-1"],
        "decorated": [101],
        "double": 40,
        "default": 24,
        "even": True,
        "tag": "a",
        "colour": 1,
        "found": True,
        "sum": 3.0,
    }
    assert "# A comment." not in (tmp_path / SCRIPT).read_text()  # its defaults were replaced
    assert "import xml.etree.ElementTree" in (tmp_path / SCRIPT).read_text()


def test_functions_in_functions_travel_with_what_they_use(tmp_path: Path) -> None:
    count = 4

    def inner(x: int) -> str:
        return f"""{x}
    {count}"""

    def outer() -> str:
        return inner(2)

    assert run(tmp_path, outer) == "2\n    4"


def _make(name: str, value: Any) -> Callable[[], Any]:
    def use() -> Any:
        return value

    use.__name__ = name
    return use


def lock() -> bool:
    return LOCK.locked()


def undefined() -> Any:
    return nowhere  # type: ignore[name-defined]  # noqa: F821


def conflict() -> Any:
    return [ONE(), OTHER()]


ONE, OTHER = _make("use", 1), _make("use", 2)


def generate() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda: 1, (), "Received: a lambda"),
        (lock, (), "Received: LOCK, a value of type _thread.lock, used by lock"),
        (undefined, (), "Received: undefined, which uses nowhere"),
        (conflict, (), "A name means one thing"),
        (hidden, (1,), "functools.wraps"),
        (generate, (), "coroutine or generator"),
        (functools.partial(len, ""), (), "takes a function"),
        (Settings().double, (), "takes a function"),
        (Settings, (), "takes a function"),
        (is_even, (LOCK,), "argument 1 of insitu.run"),
        (is_even, (np.ma.masked_array([1], [True]),), "masks would be lost"),
        (is_even, (Colour.RED,), "test_function_source.Colour"),
    ],
)
def test_what_can_not_travel_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        write_script(function, arguments)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user, beside the notebook."""
    file = tmp_path / "my_helpers.py"
    file.write_text("BASE = 5\n\ndef shift(x):\n    return x + BASE\n")
    spec = importlib.util.spec_from_file_location("my_helpers", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "my_helpers", module)
    spec.loader.exec_module(module)
    yield module
    linecache.clearcache()


def test_a_users_module_travels_by_its_functions_and_not_as_a_module(
    tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = module.shift

    def by_function() -> Any:
        return shift(1)

    def by_module() -> Any:
        return module.shift(1)

    assert run(tmp_path, by_function) == 6
    with pytest.raises(InputError, match=r"from my_helpers import \.\.\."):
        write_script(by_module, ())
    # As the message says.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "import my_helpers as module" in write_script(by_module, ()).text


def test_source_that_has_changed_since_is_refused(tmp_path: Path, module: ModuleType) -> None:
    (tmp_path / "my_helpers.py").write_text("BASE = 5\n\ndef shift(x):\n    return x - BASE\n")
    with pytest.raises(InputError, match="has changed"):
        write_script(module.shift, (1,))
    linecache.clearcache()
    (tmp_path / "my_helpers.py").write_text("BASE = 5\n\n\ndef shift(x):\n    return x + BASE\n")
    with pytest.raises(InputError, match="whose source isn't in"):
        write_script(module.shift, (1,))


def test_a_set_in_source_that_has_changed_since_is_refused(tmp_path: Path) -> None:
    text = "def pick(x):\n    return x in {'a', 'b', 'c'}\n"
    file = tmp_path / "picks.py"
    file.write_text(text)
    loaded: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, str(file), "exec"), loaded)
    assert run(tmp_path, loaded["pick"], "a") is True
    linecache.clearcache()
    file.write_text(text.replace("'c'", "'d'"))
    with pytest.raises(InputError, match="has changed"):
        write_script(loaded["pick"], ("a",))


def test_a_task_keeps_what_is_plain_and_says_what_is_not(tmp_path: Path) -> None:
    def leave() -> None:
        sys.exit(0)

    def give() -> Any:
        return LIST_OF_SETS

    def give_a_model() -> Any:
        return threading.Thread()

    assert run(tmp_path, give) == LIST_OF_SETS
    with pytest.raises(SystemExit):
        run(tmp_path, leave)
    assert from_bytes((tmp_path / "returned-worker-0.bin").read_bytes()) is None
    with pytest.raises(InputError, match="give_a_model, which returns a Thread"):
        run(tmp_path, give_a_model)
    assert "Thread" in (tmp_path / "raised-worker-0.json").read_text()


LIST_OF_SETS = [{1, 2}, frozenset({"a"})]
