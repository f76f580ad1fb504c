"""What a task loads: later, without a trace in its random numbers, and the script does the same."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from insitu.cluster.task import lazy_imports
from insitu.cluster.task.lazy_imports import gc_paused, install_lazy_imports, split_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `some` whose modules `late` and `draws` are treated as Keras' are."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "__init__.py").touch()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(lazy_imports, "DEFERRED", frozenset({"some.late"}))
    monkeypatch.setattr(lazy_imports, "RANDOM_AT_IMPORT", frozenset({"some.draws"}))
    install_lazy_imports()
    install_lazy_imports()
    return tmp_path / "some"


def test_what_is_hardly_needed_is_loaded_when_it_is_touched(package: Path) -> None:
    told = package / "told"
    (package / "late.py").write_text(f"open({str(told)!r}, 'w').close(); answer = 42")
    from some import late  # type: ignore[import-not-found]

    assert not told.exists()
    assert late.answer == 42
    assert told.exists()


def test_what_draws_while_it_is_loaded_changes_no_random_number(package: Path) -> None:
    (package / "draws.py").write_text("import random; drawn = random.random()")
    random.seed(5)
    before = random.getstate()
    from some import draws

    assert random.getstate() == before
    assert draws.drawn == random.random()


def test_keras_draws_nothing_and_leaves_plots_alone() -> None:
    program = """
import random, sys
from insitu.cluster.task.lazy_imports import install_lazy_imports
install_lazy_imports()
random.seed(1)
before = random.getstate()
import keras
assert random.getstate() == before
assert not {"matplotlib", "sklearn"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


SCRIPTS = {
    "plain": '"""Told."""\nimport json\nx = 1\nimport math\n"no description"\ny = math.floor(2.5) + x\n',
    "defines": "import json\ndef f(): return json.dumps(1)\nimport math\ny = f()\n",
    "future": "from __future__ import annotations\nimport math\nx = 1\ndef f(a: Missing): pass\n",
    "tries": "try:\n    import missing_altogether\nexcept ImportError:\n    x = 2\ny = x\n",
    "nothing": "",
    "text": '"""Told."""\n',
    "no import": "x = 3\n",
    "garbage": "import gc\ngc.disable()\nimport math\nx = gc.isenabled()\ngc.enable()\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_two_does_what_it_does_in_one(name: str) -> None:
    def plain(namespace: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in namespace.items() if isinstance(v, int | str | bool | None.__class__)}

    source = SCRIPTS[name]
    expected: dict[str, Any] = {"__doc__": None}
    exec(compile(source, "script", "exec", dont_inherit=True), expected)
    found: dict[str, Any] = {"__doc__": None}
    begins, rest = split_imports(source.encode(), "script")
    with gc_paused():
        exec(begins, found)
    exec(rest, found)
    assert plain(found) == plain(expected)
    assert gc.isenabled()


def test_lines_of_both_parts_are_the_scripts() -> None:
    begins, rest = split_imports(b"import math\n\nx = 1\nimport json\n\nraise ValueError\n", "script")
    namespace: dict[str, Any] = {}
    exec(begins, namespace)
    assert namespace["x"] == 1 and "json" in namespace
    with pytest.raises(ValueError) as caught:
        exec(rest, namespace)
    assert caught.tb.tb_next is not None and caught.tb.tb_next.tb_lineno == 6
    with pytest.raises(SyntaxError, match="script"):
        split_imports(b"import\n", "script")
