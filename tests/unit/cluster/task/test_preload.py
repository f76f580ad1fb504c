"""What a standby does ahead is read off the script; the script's own code is never run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from insitu.base.process import preload_hooks
from insitu.cluster.task.preload import Import, Setting, find_preload_actions, preload_script


def steps(folder: Path, text: str, **others: str) -> list[Import | Setting]:
    for name, content in {"train": text, **others}.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(content))
    return list(find_preload_actions(folder / "train.py"))


def test_imports_are_found_in_order_also_those_of_the_jobs_own_modules(tmp_path: Path) -> None:
    found = steps(
        tmp_path,
        """
        import json, os.path as path
        from helper import double
        try:
            from keras import layers
        except ImportError:
            import none_of_this
        import insitu
        def f():
            import late
        strategy = insitu.MultiWorkerMirroredStrategy()
        """,
        helper="import decimal, train\nprint('never run')\nraise RuntimeError",
    )
    assert found == [
        Import("json"),
        Import("os.path"),
        Import("decimal"),
        Import("keras", "layers"),
        Import("insitu"),
        Import("insitu", "MultiWorkerMirroredStrategy"),
    ]


def test_what_the_script_sets_before_an_import_is_set_too(tmp_path: Path) -> None:
    text = """
        import os
        os.environ["A"] = "b"
        os.environ.setdefault("C", "d")
        print(os.environ["HOME"], os.environ.get("X"))
        import keras
    """
    assert steps(tmp_path, text) == [
        Import("os"),
        Setting("A", "b", False),
        Setting("C", "d", True),
        Import("keras"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['A'] = f()",
        "os.environ.update(A='b')",
        "os.putenv('A', 'b')",
        "del os.environ['A']",
        "if x: os.environ['KERAS_BACKEND'] = 'jax'",
        "environ.pop('A')",
    ],
)
def test_beyond_what_cannot_be_foreseen_nothing_is_imported(tmp_path: Path, line: str) -> None:
    assert steps(tmp_path, f"import os\n{line}\nimport keras") == [Import("os")]


def test_a_script_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    assert steps(tmp_path, "this is no Python") == []
    assert list(find_preload_actions(tmp_path / "none.py")) == []


def test_what_cannot_be_done_ahead_is_left_for_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def fails() -> None:
        called.append("fails")
        raise RuntimeError

    monkeypatch.setattr(preload_hooks, "_functions", [])
    preload_hooks.register_preload(fails)
    preload_hooks.register_preload(lambda: called.append("works"))
    (tmp_path / "train.py").write_text("import no_such_module\nimport json")
    preload_script(tmp_path / "train.py")
    assert called == ["fails", "works"]


@pytest.mark.parametrize("signs", [2_000, 100_000])
def test_a_script_too_deep_for_the_parser_is_left_alone(tmp_path: Path, signs: int) -> None:
    assert steps(tmp_path, "import json\nx = " + "-" * signs + "1") in ([], [Import("json")])
