"""How the runner of Keras' own tests reads results and compares them."""

from __future__ import annotations

import fnmatch
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import keras_suite
import pytest
from keras_suite import Listed, Result, collect_results, compare, find_needless

PASSED = Result("passed")
ENTRY = Listed("a sum isn't a mean", "refused", ["models/*::test_sum*"], strategies=["mirrored"])


def failed(kind: str) -> Result:
    return Result("failed", kind, "Error: text")


def begun(test: str) -> dict[str, str]:
    return {"test": test, "status": "begun"}


def ended(test: str) -> dict[str, str]:
    return {"test": test, "status": "ended"}


def failing(test: str, detail: str) -> dict[str, str]:
    return {"test": test, "status": "failed", "kind": "crash", "detail": detail, "place": "x.py:1"}


def test_the_first_error_of_a_test_counts():
    lines = [begun("a"), failing("a", "cause"), failing("a", "cleaning up"), ended("a")]
    assert collect_results(lines, None) == {"a": Result("failed", "crash", "cause", "x.py:1")}


def test_an_error_after_a_test_has_passed_counts():
    lines = [begun("a"), {"test": "a", "status": "passed"}, failing("a", "cleaning up"), ended("a")]
    assert collect_results(lines, None)["a"].status == "failed"


@pytest.mark.parametrize(("ended_as", "kind"), [("crash", "crash"), ("endless", "endless")])
def test_a_test_in_which_the_process_ended_has_failed(ended_as: str, kind: str):
    lines = [begun("a"), {"test": "a", "status": "passed"}, ended("a"), begun("b")]
    results = collect_results(lines, ended_as)
    assert results["a"] == PASSED
    assert (results["b"].status, results["b"].kind) == ("failed", kind)


def test_only_tests_that_plain_keras_passes_are_counted():
    plain = {"a": PASSED, "b": failed("crash"), "c": Result("skipped"), "d": PASSED}
    own = {"a": PASSED, "b": failed("crash"), "c": failed("crash")}
    comparison = compare("models", "jax", "one", plain, own, [])
    assert (comparison.counted, comparison.failures) == (1, {})


def test_a_test_that_is_skipped_under_a_strategy_only_is_a_failure():
    comparison = compare("models", "jax", "one", {"a": PASSED}, {"a": Result("skipped")}, [])
    assert comparison.classes == {"a": "different"}


def test_failures_are_listed_by_strategy_and_class():
    name = "models/model_test.py::test_sum"
    for strategy, kind, wanted in [
        ("mirrored", "refused", "listed"),
        ("mirrored", "different", "different"),
        ("one", "refused", "refused"),
    ]:
        comparison = compare("models", "jax", strategy, {name: PASSED}, {name: failed(kind)}, [ENTRY])
        assert comparison.classes == {name: wanted}


def test_a_listed_test_that_passes_is_found():
    name = "models/model_test.py::test_sum"
    passes = compare("models", "jax", "mirrored", {name: PASSED}, {name: PASSED}, [ENTRY])
    fails = compare("models", "jax", "mirrored", {name: PASSED}, {name: failed("refused")}, [ENTRY])
    assert find_needless([passes], [ENTRY]) == ENTRY.tests
    assert find_needless([fails], [ENTRY]) == []
    assert find_needless([], [ENTRY]) == []


def test_the_list_of_the_project_is_well_formed():
    listed = keras_suite.read_listed()
    folders = {folder for group in keras_suite.GROUPS.values() for folder in group}
    for entry in listed:
        assert entry.reason and entry.tests
        assert entry.kind in ("refused", "different")
        assert set(entry.strategies) <= set(keras_suite.STRATEGIES)
        assert set(entry.backends) <= {"tensorflow", "jax", "torch"}
        assert all(any(fnmatch.fnmatch(test, f"{folder}/*") for folder in folders) for test in entry.tests)


@pytest.mark.parametrize("version", ["3.0.0", None])
def test_other_sources_are_refused(tmp_path: Path, version: str | None):
    if version:
        for name, text in (("version.py", f'__version__ = "{version}"\n'), ("trainers/trainer_test.py", "")):
            path = tmp_path / "keras" / "src" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    with pytest.raises(SystemExit, match=r"Received: (3\.0\.0 in )?/"):
        keras_suite.check_sources(tmp_path, "3.15.1")


def test_results_are_written_and_read(tmp_path: Path):
    results = {"jax one models": {"a": failed("crash"), "b": PASSED}}
    keras_suite.write_results(tmp_path / "results.json", results)
    assert keras_suite.read_results(tmp_path / "results.json") == results
    assert json.loads((tmp_path / "results.json").read_text())["jax one models"]["b"]["status"] == "passed"
    assert keras_suite.read_results(tmp_path / "none.json") == {}


def test_the_installed_package_holds_the_tests():
    installed = keras_suite.find_installed()
    keras_suite.check_sources(installed, metadata.version("keras"))


def test_a_file_that_can_not_be_imported_is_tried_once(tmp_path: Path):
    """On PyTorch with two devices the first error ends the process."""
    run = keras_suite.SuiteRun(tmp_path, "torch", "mirrored", tmp_path)
    command = run._command(
        ["export"], {"export/onnx_test.py": Result("not collected"), "export/a.py::b": PASSED}
    )
    ignored = [option for option in command if option.startswith("--ignore")]
    assert ignored == [f"--ignore={tmp_path / 'keras' / 'src' / 'export/onnx_test.py'}"]


def test_processes_that_get_no_further_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = keras_suite.SuiteRun(tmp_path, "jax", "one", tmp_path)

    def crash(*_: Any) -> str:
        run.lines.write_text(json.dumps({"test": "export/x_test.py", "status": "not collected"}))
        return "crash"

    monkeypatch.setattr(run, "_run_process", crash)
    with pytest.raises(SystemExit, match="No test could be run under one: crash"):
        run.run(["export"])
