"""Runs Keras' own tests plainly and with each test inside a strategy's scope, and says which fail only there.

The tests are in the installed package of Keras, beside what they test. With --source they are those of a
checkout, which then also is the Keras that they test. A test counts if plain Keras passes it. It then passes
under the strategy, or is refused as `keras_suite_refused.json` says, or it is a failure, of one of these
classes:

  refused    an error of insitu that isn't listed
  different  an assertion failed
  crash      another error, or the process ended
  endless    no end in time

Strategies: `one` (OneDeviceStrategy), `mirrored` (MirroredStrategy over two virtual devices), `shards`
(MultiWorkerMirroredStrategy in one process that has both of two shards).

Examples:

  keras_suite.py --group trainers callbacks
  keras_suite.py --backend jax --strategy mirrored shards --plain plain.json --json out.json
  keras_suite.py --again out.json
  keras_suite.py --strategy mirrored --test models/model_test.py::ModelTest::test_reviving
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = "https://github.com/keras-team/keras"
LISTED = Path(__file__).with_name("keras_suite_refused.json")
STRATEGIES = ("one", "mirrored", "shards")
GROUPS = {
    "trainers": ["trainers"],
    "callbacks": ["callbacks"],
    "models": ["models", "distillation", "wrappers"],
    "optimizers": ["optimizers"],
    "saving": ["saving", "legacy", "export"],
    "layers": ["layers"],
    "metrics": ["metrics", "losses"],
    "backend": ["backend", "random", "initializers", "dtype_policies"],
    "quantizers": ["quantizers"],
    "utils": ["utils"],
}
"""Folders of keras/src by group. Others, such as ops, make no variables and train nothing."""
CONFTEST = """\
import pytest
from keras import backend

def skip_if_backend(given_backend, reason):
    return pytest.mark.skipif(backend.backend() == given_backend, reason=reason)
"""
"""What tests import of Keras' own conftest.py, which the installed package lacks too."""
TORCH_ONLY = ("export/torch_test.py", "export/litert_torch_test.py")
"""Files that load parts of PyTorch which crash after TensorFlow. Their tests are for the backend PyTorch."""
TEST_TIMEOUT = 120
"""Seconds for one test."""
SILENCE = 2 * TEST_TIMEOUT + 60
"""Seconds without a line from the process, for example while it imports, after which it is killed."""
PYTEST_SETTINGS = """\
[pytest]
python_files = *_test.py
markers =
    requires_trainable_backend: all three backends are
    multi_device: needs several devices
filterwarnings =
    error
    ignore::DeprecationWarning
    ignore::ImportWarning
    ignore::RuntimeWarning
    ignore::PendingDeprecationWarning
    ignore::FutureWarning
    ignore::UserWarning
    ignore:Custom mask layers require a config
"""
"""As in the pyproject.toml of Keras' repository, which the package lacks."""
CLASSES = ("passes", "listed", "refused", "different", "crash", "endless")


@dataclass(frozen=True)
class Result:
    """How one test ended."""

    #: "passed", "skipped" or "failed"; "not collected" of a file that can't be imported
    status: str
    #: the class of failure; empty unless failed
    kind: str = ""
    #: type and first lines of the error
    detail: str = ""
    #: the last line of insitu in the traceback, as file:line
    place: str = ""
    seconds: float = 0.0


Results = dict[str, Result]


@dataclass(frozen=True)
class Listed:
    """Tests that a strategy needn't pass."""

    #: what a user reads about it: why, and what to do
    reason: str
    #: "refused", or "different" where the test looks at what a strategy does otherwise on purpose
    kind: str
    #: patterns of names, as of a shell
    tests: list[str]
    #: none stands for all
    strategies: list[str] = field(default_factory=list)
    #: none stands for all
    backends: list[str] = field(default_factory=list)

    def matches(self, test: str, kind: str, strategy: str, backend: str) -> bool:
        """Return True if a failure of `kind` of this test is listed here."""
        return (
            kind == self.kind
            and (not self.strategies or strategy in self.strategies)
            and (not self.backends or backend in self.backends)
            and any(fnmatch.fnmatchcase(test, pattern) for pattern in self.tests)
        )


def read_listed(path: Path = LISTED) -> list[Listed]:
    """Return the tests that needn't pass."""
    return [Listed(**entry) for entry in json.loads(path.read_text())]


# The sources


def find_installed() -> Path:
    """Return the folder that holds the installed package of Keras."""
    spec = importlib.util.find_spec("keras")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "Keras isn't installed. Run `make test-keras`, which installs it, or pass a checkout as --source."
        )
    return Path(spec.origin).parents[1]


def check_sources(folder: Path, version: str) -> None:
    """Exit unless `folder` holds Keras with its tests, of `version`."""
    path = folder / "keras" / "src" / "version.py"
    if not path.exists() or not (folder / "keras/src/trainers/trainer_test.py").exists():
        raise SystemExit(
            f"Keras' tests must be beside its sources. Received: {folder}, which has no "
            f"keras/src/trainers/trainer_test.py. Pass a checkout of {REPOSITORY} as --source."
        )
    found = re.search(r'^__version__ = "(.*)"$', path.read_text(), re.MULTILINE)
    if found is None or found[1] != version:
        raise SystemExit(
            f"The tests must be those of the installed Keras, {version}. Received: {found and found[1]} in "
            f"{folder}. Check out the tag v{version}, or leave --source out."
        )


# The runs


class SuiteRun:
    """Runs the tests of some folders in processes of pytest; another one continues where one ends too
    early."""

    def __init__(self, source: Path, backend: str, strategy: str, root: Path) -> None:
        self.source, self.backend, self.strategy = source, backend, strategy
        self.folder = Path(tempfile.mkdtemp(prefix=f"{backend}-{strategy}-", dir=root))
        self.log = self.folder / "log"
        self.lines = self.folder / "results"

    def run(self, folders: Sequence[str], chosen: Collection[str] | None = None) -> Results:
        """Return the results of all tests in `folders` of keras/src, or of those that patterns choose."""
        results: Results = {}
        while True:
            self.lines.write_text("")
            ended = self._run_process(folders, results, chosen)
            lines = [json.loads(line) for line in self.lines.read_text().splitlines()]
            # Files that can't be imported are told of by each process.
            new = {t: result for t, result in collect_results(lines, ended).items() if t not in results}
            results.update(new)
            if ended is not None and not new:
                raise SystemExit(f"No test could be run under {self.strategy}: {ended}. See {self.log}")
            if ended is None:
                return results

    def _run_process(
        self, folders: Sequence[str], done: Results, chosen: Collection[str] | None
    ) -> str | None:
        """Run what isn't done. Returns None at the end, else how the process ended before it."""
        environment = self._environment()
        done_file = self.folder / "done"
        done_file.write_text(json.dumps(list(done)))
        environment["KERAS_SUITE_DONE"] = str(done_file)
        if chosen is not None:
            chosen_file = self.folder / "chosen"
            chosen_file.write_text(json.dumps(list(chosen)))
            environment["KERAS_SUITE_CHOSEN"] = str(chosen_file)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._command(folders, done),
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            heard, size = time.monotonic(), 0
            while process.poll() is None:
                if (now := self.lines.stat().st_size) != size:
                    heard, size = time.monotonic(), now
                if time.monotonic() - heard > SILENCE:
                    process.kill()
                    process.wait()
                    return "endless"
                time.sleep(0.2)
        # 0: all passed; 1: some failed; 5: none was left.
        if process.returncode in (0, 5) or (process.returncode == 1 and not self._stops_at_failures):
            return None
        return "crash" if process.returncode != 1 else "stopped"

    @property
    def _stops_at_failures(self) -> bool:
        """Whether a test that fails may leave another process of the group waiting."""
        return self.strategy == "mirrored" and self.backend == "torch"

    def _command(self, folders: Sequence[str], done: Results) -> list[str]:
        settings = self.folder / "pytest.ini"
        settings.write_text(PYTEST_SETTINGS)
        options = ["-p", "keras_suite_plugin", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT)]
        options += ["-c", str(settings), "--rootdir", str(self.source)]
        options.append("--continue-on-collection-errors")
        if self._stops_at_failures:
            options.append("--exitfirst")
        root = self.source / "keras" / "src"
        # Where the first failure ends the process, a file that can't be imported would end each.
        ignored = [name for name, result in done.items() if result.status == "not collected"]
        if self.backend != "torch":
            ignored += TORCH_ONLY
        options += [f"--ignore={root / path}" for path in ignored]
        return [sys.executable, "-m", "pytest", *options, *(str(root / folder) for folder in folders)]

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_") and k != "TF_CONFIG"}
        source = str(self.source)
        if self.source == find_installed():
            source = str(self.folder / "modules")
            Path(source).mkdir(exist_ok=True)
            (Path(source) / "conftest.py").write_text(CONFTEST)
        path = [source, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        threads = ("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        own = {
            **dict.fromkeys(threads, "1"),
            "KERAS_BACKEND": self.backend,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "INSITU_HOME": str(self.folder / "home"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "NO_COLOR": "1",
            "KERAS_SUITE_STRATEGY": self.strategy,
            "KERAS_SUITE_RESULTS": str(self.lines),
        }
        if self.strategy == "mirrored":
            own["INSITU_VIRTUAL_DEVICES"] = "cpu:2"
        if self.strategy == "shards":
            own["INSITU_SHARDS"] = "0,1/2"
        return {**kept, **own}


def collect_results(lines: Iterable[dict[str, Any]], ended: str | None) -> Results:
    """Return the results that the lines of a process hold; `ended` says how it ended, if it did too early."""
    results: Results = {}
    under_way = None
    for line in lines:
        test, status = line["test"], line["status"]
        if status == "begun":
            under_way = test
        elif status == "ended":
            under_way = None
        elif status == "failed":
            # The first error is the cause; what follows may be an error of cleaning up.
            if test not in results or results[test].status != "failed":
                results[test] = Result("failed", line["kind"], line["detail"], line["place"])
        else:
            known = {key: line[key] for key in ("detail", "seconds") if key in line}
            results.setdefault(test, Result(status, **known))
    if under_way is not None and under_way not in results and ended is not None:
        kind = "endless" if ended == "endless" else "crash"
        results[under_way] = Result(
            "failed", kind, "the process was killed" if kind == "endless" else "it ended"
        )
    return results


# The comparison


@dataclass(frozen=True)
class Comparison:
    """The tests of a group under one strategy, beside plain Keras."""

    group: str
    backend: str
    strategy: str
    #: tests that plain Keras passes
    counted: int
    #: class by test, of those; one of CLASSES
    classes: dict[str, str]
    #: the failures that aren't listed
    failures: Results


def compare(
    group: str, backend: str, strategy: str, plain: Results, own: Results, listed: Iterable[Listed]
) -> Comparison:
    """Return what the results under a strategy mean beside those of plain Keras."""
    listed = list(listed)
    classes: dict[str, str] = {}
    failures: Results = {}
    for test, before in plain.items():
        if before.status != "passed" or test not in own:
            continue
        result = own[test]
        if result.status == "passed":
            classes[test] = "passes"
        elif result.status == "skipped":
            classes[test], failures[test] = "different", Result("failed", "different", "skipped")
        elif any(entry.matches(test, result.kind, strategy, backend) for entry in listed):
            classes[test] = "listed"
        else:
            classes[test], failures[test] = result.kind, result
    return Comparison(group, backend, strategy, len(classes), classes, failures)


def table(comparisons: Iterable[Comparison]) -> str:
    """Return counts by group and strategy, then each failure."""
    comparisons = list(comparisons)
    lines = [f"{'':32}{'counted':>10}" + "".join(f"{name:>11}" for name in CLASSES)]
    for each in comparisons:
        counts = Counter(each.classes.values())
        name = f"{each.backend} {each.strategy} {each.group}"
        lines.append(f"{name:32}{each.counted:>10}" + "".join(f"{counts[c]:>11}" for c in CLASSES))
    lines.append("")
    for each in comparisons:
        lines += [
            f"{each.backend} {each.strategy} {result.kind} {test}: {result.detail} [{result.place}]"
            for test, result in each.failures.items()
        ]
    return "\n".join(lines)


def find_needless(comparisons: Iterable[Comparison], listed: Iterable[Listed]) -> list[str]:
    """Return the patterns that are listed for tests that were run, all of which pass."""
    passing: dict[str, bool] = {}
    for entry in listed:
        for pattern in entry.tests:
            for each in comparisons:
                if entry.strategies and each.strategy not in entry.strategies:
                    continue
                if entry.backends and each.backend not in entry.backends:
                    continue
                for test, kind in each.classes.items():
                    if fnmatch.fnmatchcase(test, pattern):
                        passing[pattern] = passing.get(pattern, True) and kind == "passes"
    return [pattern for pattern, all_pass in passing.items() if all_pass]


# The command line


def read_results(path: Path | None) -> dict[str, Results]:
    """Return results by "backend group" or "backend strategy group", from a file if it exists."""
    if path is None or not path.exists():
        return {}
    data = json.loads(path.read_text())
    return {key: {test: Result(**result) for test, result in tests.items()} for key, tests in data.items()}


def write_results(path: Path, results: dict[str, Results]) -> None:
    """Write results for `read_results`."""
    data = {key: {test: asdict(result) for test, result in tests.items()} for key, tests in results.items()}
    path.write_text(json.dumps(data, indent=1))


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="a checkout of Keras, instead of the installed package")
    parser.add_argument("--backend", default="tensorflow", choices=["tensorflow", "jax", "torch"])
    parser.add_argument("--strategy", nargs="*", default=list(STRATEGIES), choices=[*STRATEGIES, "plain"])
    parser.add_argument("--group", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run plainly only what doesn't pass under a strategy: saves time",
    )
    parser.add_argument(
        "--test", nargs="*", help="names or patterns of the tests to run, as in the list of failures"
    )
    parser.add_argument("--again", type=Path, help="run only what failed in this --json of before")
    parser.add_argument("--plain", type=Path, help="plain Keras' results: read if it exists, and written")
    parser.add_argument("--json", type=Path, help="all results: read if it exists, updated, and written")
    return parser.parse_args()


class Suite:
    """Runs groups under strategies, and keeps what came of them."""

    def __init__(self, options: argparse.Namespace, source: Path) -> None:
        self.options, self.source = options, source
        self.root = Path(tempfile.mkdtemp(prefix="keras-suite-"))
        #: Plain Keras' results, by "backend group". Written by `run_plain`.
        self.plain = read_results(options.plain)
        #: Results under strategies, by "backend strategy group". Written by `run_strategy`.
        self.results = read_results(options.json)
        self._again = read_results(options.again)

    def run(self, listed: Sequence[Listed]) -> Iterator[Comparison]:
        """Run what the options ask for, and yield a comparison for each group and strategy."""
        options = self.options
        for group in options.group:
            folders = [f for f in GROUPS[group] if not options.test or self._names_test_in(f)]
            if not folders:
                continue
            if not options.quick:
                self.run_plain(group, folders, options.test)
            for strategy in options.strategy:
                if strategy == "plain" or not (own := self.run_strategy(strategy, group, folders)):
                    continue
                unlike = [test for test, result in own.items() if result.status != "passed"]
                plain = self.run_plain(group, folders, unlike if options.quick else options.test)
                if options.quick:  # what passes under a strategy is taken to pass plainly
                    plain = {**dict.fromkeys(own, Result("passed")), **plain}
                yield compare(group, options.backend, strategy, plain, own, listed)

    def _names_test_in(self, folder: str) -> bool:
        return any(test.startswith(f"{folder}/") for test in self.options.test)

    def run_plain(self, group: str, folders: Sequence[str], chosen: Collection[str] | None) -> Results:
        """Return plain Keras' results for a group, and run what isn't known of the tests `chosen`."""
        key = f"{self.options.backend} {group}"
        # A group that hasn't been run as a whole is kept apart, under a name of its own.
        known = self.plain.get(key) or self.plain.setdefault(f"{key}, in part", {})
        unknown = None if chosen is None else [test for test in chosen if test not in known]
        if unknown is None and key not in self.plain:
            self.plain[key] = known = self._start("plain").run(folders)
        elif unknown:
            known.update(self._start("plain").run(folders, unknown))
        if self.options.plain:
            write_results(self.options.plain, self.plain)
        return known

    def run_strategy(self, strategy: str, group: str, folders: Sequence[str]) -> Results:
        """Return the results of the tests that the options choose; empty if they choose none."""
        key = f"{self.options.backend} {strategy} {group}"
        chosen = self.options.test
        if self.options.again:
            before = self._again.get(key, {})
            chosen = [test for test, result in before.items() if result.status == "failed"]
            if not chosen:
                return {}
        own = self._start(strategy).run(folders, chosen)
        self.results[key] = {**self.results.get(key, {}), **own}
        if self.options.json:
            write_results(self.options.json, self.results)
        return own

    def _start(self, strategy: str) -> SuiteRun:
        return SuiteRun(self.source, self.options.backend, strategy, self.root)


def main() -> int:
    """Run what the command line asks for. Returns 1 if a test fails that isn't listed."""
    options = parse_options()
    version = metadata.version("keras")
    source = options.source.absolute() if options.source else find_installed()
    check_sources(source, version)
    suite, listed, comparisons = Suite(options, source), read_listed(), []
    for comparison in suite.run(listed):
        print(table([comparison]), flush=True)
        comparisons.append(comparison)
    if len(comparisons) > 1:
        print(table(comparisons))
    needless = find_needless(comparisons, listed)
    if needless:
        print("Listed, but they pass:", *needless, sep="\n  ")
    if any(each.failures for each in comparisons):
        print(f"Logs: {suite.root}")
        return 1
    shutil.rmtree(suite.root, ignore_errors=True)
    return int(bool(needless))


if __name__ == "__main__":
    sys.exit(main())
