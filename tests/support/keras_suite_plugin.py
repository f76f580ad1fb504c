"""A plugin of pytest that runs each test inside a strategy's scope, and writes down how it ended.

`keras_suite.py` starts pytest with it, inside a checkout of Keras. It reads its orders from the environment.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError):
    import torch  # noqa: F401 - before TensorFlow: the other way round both crash

import pytest

import insitu
from insitu.base.errors import InsituError

STRATEGY_ENV = "KERAS_SUITE_STRATEGY"
RESULTS_ENV = "KERAS_SUITE_RESULTS"
"""The file that gets a line of JSON when a test begins and one when it ends."""
CHOSEN_ENV = "KERAS_SUITE_CHOSEN"
"""A file with a JSON list of patterns of the tests to run; without it all run."""
DONE_ENV = "KERAS_SUITE_DONE"
"""A file with a JSON list of tests that an earlier process has run."""
PREFIX = "keras/src/"
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def make_strategy(name: str) -> Any:
    """Return a new strategy, or None for plain Keras. Its devices and shards are set by the environment."""
    makers = {
        "one": insitu.OneDeviceStrategy,
        "mirrored": insitu.MirroredStrategy,
        "shards": insitu.MultiWorkerMirroredStrategy,
    }
    strategy = makers[name]() if name != "plain" else None
    wanted = 2 if name in ("mirrored", "shards") else 1
    if strategy is not None and strategy.num_replicas_in_sync != wanted:
        raise RuntimeError(f"{name} has {strategy.num_replicas_in_sync} replicas, not {wanted}")
    return strategy


def is_first_process() -> bool:
    """Return False in a process that PyTorch's MirroredStrategy has started for a further device."""
    return insitu.context().index == 0


def short_name(item: Any) -> str:
    """Return the test's name without the folders that all of Keras' tests are in, and without addresses of
    objects, which differ in each process."""
    return _ADDRESS.sub("0x", str(item.nodeid).removeprefix(PREFIX))


def matches(name: str, pattern: str) -> bool:
    """Return True for the test of this name; brackets in it are those of parameters, not of a pattern."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


class SuitePlugin:
    """Chooses tests, gives each a scope, and records the results."""

    def __init__(self) -> None:
        self.strategy_name = os.environ[STRATEGY_ENV]
        self.results = Path(os.environ[RESULTS_ENV])
        chosen, done = os.environ.get(CHOSEN_ENV), os.environ.get(DONE_ENV)
        #: Patterns of the names of the tests to run.
        self.chosen = json.loads(Path(chosen).read_text()) if chosen else ["*"]
        #: Names of tests that have run before.
        self.done = set(json.loads(Path(done).read_text())) if done else set()

    @pytest.fixture(autouse=True)
    def _in_scope(self) -> Iterator[None]:
        # A test begins with a strategy that has seen nothing.
        strategy = make_strategy(self.strategy_name)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            yield

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Leave out what isn't chosen, and tests of Keras' own distribution, which need several devices."""
        kept = [
            item
            for item in items
            if "multi_device" not in item.keywords
            and short_name(item) not in self.done
            and any(matches(short_name(item), pattern) for pattern in self.chosen)
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_collectreport(self, report: Any) -> None:
        """Record a file that can't be imported, such as for want of a library."""
        if report.failed:
            name = report.nodeid.removeprefix(PREFIX)
            lines = [line.removeprefix("E ").strip() for line in str(report.longrepr).splitlines()]
            self._write({"test": name, "status": "not collected", "detail": lines[-1]})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        """Record that a test begins: the process may end in it."""
        self._write({"test": short_name(item), "status": "begun"})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        """Record what came of a phase of a test."""
        report = yield
        if report.failed:
            self._write({"test": short_name(item), "status": "failed", **describe_error(call.excinfo)})
        elif report.skipped or item.get_closest_marker("xfail"):
            # What Keras expects to fail may pass by luck.
            self._write({"test": short_name(item), "status": "skipped"})
        elif report.when == "teardown":
            self._write({"test": short_name(item), "status": "ended", "seconds": round(report.duration, 3)})
        elif report.when == "call":
            self._write({"test": short_name(item), "status": "passed", "seconds": round(report.duration, 3)})
        return report

    def _write(self, line: dict[str, Any]) -> None:
        if is_first_process():
            with self.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def describe_error(excinfo: Any) -> dict[str, Any]:
    """Return what is known of an error: its type, first line and place, and the class of failure."""
    error = excinfo.value
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    own = [entry for entry in excinfo.traceback if f"{os.sep}insitu{os.sep}" in str(entry.path)]
    place = f"{Path(own[-1].path).name}:{own[-1].lineno + 1}" if own else ""
    if isinstance(error, InsituError):
        kind = "refused"
    elif lines[0].startswith("Timeout"):
        kind = "endless"
    else:
        kind = "different" if isinstance(error, AssertionError) else "crash"
    detail = f"{type(error).__name__}: {' '.join(lines[:3])}"[:400]
    return {"kind": kind, "detail": detail, "place": place}


def pytest_configure(config: Any) -> None:
    """Take part in the run."""
    config.pluginmanager.register(SuitePlugin())
