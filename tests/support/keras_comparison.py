"""Runs the cases of `keras_cases` plainly and under strategies, and says where they differ.

python keras_comparison.py [--backend B] [--strategy S ...] [--case NAME ...] [--json FILE] [--plain FILE]
    compares and prints a table
python keras_comparison.py serve FOLDER STRATEGY
    a process that runs the cases which it finds in FOLDER, one after the other

A group of processes (one, or the workers of a job) runs many cases. It is stopped and started anew after a
case that didn't end, ended one of its processes, or may have left one waiting for another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE = 60.0
"""Seconds for one case, from when the processes hear of it."""
STARTUP = 120.0
"""Seconds until all processes of a group have begun to listen."""
GRACE = 8.0
"""Seconds for the other processes of a group when one has ended a case with an error."""
TOLERANCE = 1e-4
HALF_TOLERANCE = 5e-2
WORKERS = 2
LIFETIME = 200
"""Cases that a group runs: compiled functions of old cases are never freed."""

Outcomes = list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """How a case came out under a strategy, beside plain Keras."""

    case: str
    strategy: str
    backend: str
    #: "right", "different", "refused", "crash" or "endless"; "no plain run" where plain Keras fails itself
    status: str
    #: the first difference, or the first line of the error
    detail: str = ""
    #: whether every number has the same bits; False unless right
    bits: bool = False
    seconds: float = 0.0


# In the processes that train


def serve(folder: Path, strategy_name: str) -> None:
    """Runs the cases that are named in `folder`/command-N.json, in order."""
    import insitu

    parent = os.getppid()
    index = insitu.context().index
    scope, replicas = _scope_of(strategy_name)
    number = 0
    while True:
        _write(folder / f"ready-{number}-{index}.json", {"ready": True})
        command = _wait_for(folder / f"command-{number}.json", parent)
        if command.get("stop"):
            return
        result = _run_case(_case_of(command), strategy_name, replicas, index, command, scope)
        _write(folder / f"result-{number}-{index}.json", result)
        number += 1


def _scope_of(strategy_name: str) -> tuple[Callable[[], Any], int]:
    import insitu

    if strategy_name == "plain":
        return contextlib.nullcontext, 1
    makers = {
        "one": insitu.OneDeviceStrategy,
        "mirrored": insitu.MirroredStrategy,
        "workers": insitu.MultiWorkerMirroredStrategy,
    }
    strategy = makers[strategy_name]()
    replicas = int(strategy.num_replicas_in_sync)
    wanted = {"one": 1, "mirrored": 2, "workers": WORKERS}[strategy_name]
    if replicas != wanted:
        raise RuntimeError(f"{strategy_name} has {replicas} replicas, not {wanted}")
    return strategy.scope, replicas


def _case_of(command: Any) -> Any:
    """The case that a command names or describes."""
    if "description" in command:
        from described_trainings import described_case

        return described_case(command["description"])
    from keras_cases import CASES

    return CASES[command["case"]]


def _run_case(
    case: Any, strategy: str, replicas: int, index: int, command: Any, scope: Any
) -> dict[str, Any]:
    import keras
    from keras_case_tools import Endless, Run

    from insitu.errors import InsituError

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    run = Run(strategy, replicas, index, Path(command["folder"]), scope)
    started = time.monotonic()
    try:
        answer: dict[str, Any] = {"status": "done", "result": _plain_data(case.train(run))}
    except Exception as error:
        kinds = ((InsituError, "refused"), (Endless, "endless"), (Exception, "crash"))
        status = next(status for kind, status in kinds if isinstance(error, kind))
        trace = "".join(traceback.format_exception(error))[-4000:]
        answer = {"status": status, "detail": _first_line(error), "trace": trace}
    return {**answer, "seconds": time.monotonic() - started}


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def _plain_data(value: Any) -> Any:
    """Numbers, texts, lists and dicts. An array becomes a list; its dtype is not compared."""
    if isinstance(value, dict):
        return {str(name): _plain_data(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(each) for each in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    import keras

    array = np.asarray(
        value if isinstance(value, np.ndarray | np.generic) else keras.ops.convert_to_numpy(value)
    )
    return (array.astype("float64") if array.dtype.kind not in "iub" else array).tolist()


def _wait_for(path: Path, parent: int) -> Any:
    while not path.exists():
        time.sleep(0.01)
        if os.getppid() != parent:
            raise SystemExit("whoever gave the commands has ended")
    return json.loads(path.read_text())


def _write(path: Path, value: Any) -> None:
    part = path.with_suffix(f".part-{os.getpid()}")
    part.write_text(json.dumps(value))
    part.rename(path)


# In the process that compares


def members(strategy: str, backend: str) -> int:
    """How many processes train together. On PyTorch the script runs once for each further device."""
    by_processes = strategy == "mirrored" and backend == "torch"
    return WORKERS if strategy == "workers" else 2 if by_processes else 1


class Processes:
    """A group of processes that train together."""

    def __init__(self, strategy: str, backend: str, root: Path) -> None:
        self.strategy, self.backend = strategy, backend
        self.folder = Path(tempfile.mkdtemp(prefix=f"{strategy}-", dir=root))
        self.number = 0
        self.members = members(strategy, backend)
        self._log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            self._command(),
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        if not self._wait_for_all("ready", STARTUP):
            self.stop()
            raise RuntimeError(f"processes of {strategy} on {backend} don't start: {self._last_lines()}")

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("INSITU_") and k != "TF_CONFIG"}
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "NPROC", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), "1"
        )
        own = {
            "KERAS_BACKEND": self.backend,
            "INSITU_HOME": str(self.folder / "home"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self.strategy == "mirrored":
            own["INSITU_VIRTUAL_DEVICES"] = "cpu:2"
        return {**kept, **threads, **own, "NO_COLOR": "1"}

    def _command(self) -> list[str]:
        script = [str(Path(__file__).resolve()), "serve", str(self.folder), self.strategy]
        if self.strategy != "workers":
            return [sys.executable, *script]
        self._make_job()
        options = ["--workers", str(WORKERS), "--threads", "1", "--max-restarts", "0"]
        job = [str(self.folder / "job"), sys.executable, *script]
        return [sys.executable, "-m", "insitu", "start", *options, "rows", *job]

    def _make_job(self) -> None:
        """A job needs a cache, of which the cases take no rows."""
        from insitu.grid import bring_up, import_cache
        from insitu.paths import Paths

        paths = Paths(self.folder / "home")
        (self.folder / "job").mkdir()
        (self.folder / "job" / "README").write_text("The script lies elsewhere.")
        np.save(self.folder / "rows.npy", np.zeros((8, 2), "float32"))
        bring_up(paths, WORKERS)
        import_cache(paths, "rows", [str(self.folder / "rows.npy")], partitions=WORKERS)

    def run(self, command: dict[str, Any]) -> Outcomes:
        """What each process says of the case that the command names or describes; an empty list where it
        never came to an end."""
        room = self.folder / f"case-{self.number}"
        room.mkdir()
        _write(self.folder / f"command-{self.number}.json", {**command, "folder": str(room)})
        found = self._wait_for_all("result", DEADLINE)
        self.number += 1
        if found:
            self._wait_for_all("ready", GRACE)
        return found

    def is_sound_after(self, answers: Outcomes) -> bool:
        """Whether the group can run more cases. An error leaves a process that trains alone as it was, but
        others may still be waiting in the middle of the case."""
        states = {answer["status"] for answer in answers}
        if len(answers) < self.members or self._process.poll() is not None or self.number >= LIFETIME:
            return False
        return self.members == 1 or (states <= {"done", "refused"} and len(states) == 1)

    def _wait_for_all(self, what: str, seconds: float) -> Outcomes:
        """The answers of all members in time, or fewer where one of them ended with an error."""
        deadline = time.monotonic() + seconds
        paths = [self.folder / f"{what}-{self.number}-{index}.json" for index in range(self.members)]
        while True:
            found = [json.loads(path.read_text()) for path in paths if path.exists()]
            if len(found) == self.members:
                return found
            if any(answer.get("status", "done") != "done" for answer in found):
                deadline = min(deadline, time.monotonic() + GRACE)
            ended = self._process.poll() is not None
            if ended and not found:
                return [
                    {"status": "crash", "detail": f"the process ended: {self._last_lines()}", "seconds": 0.0}
                ] * (what == "result")
            if ended or time.monotonic() >= deadline:
                return found
            time.sleep(0.02)

    def _last_lines(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-300:]

    def stop(self) -> None:
        """Ends all processes of the group, well or not."""
        _write(self.folder / f"command-{self.number}.json", {"stop": True})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(3)
        if self.strategy == "workers":
            self._stop_job()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _stop_job(self) -> None:
        from insitu.cluster import list_job_ids, stop_job
        from insitu.errors import JobEnded
        from insitu.paths import Paths

        paths = Paths(self.folder / "home")
        for job_id in list_job_ids(paths):
            for _ in range(2):  # a second stop kills at once
                with contextlib.suppress(JobEnded):
                    stop_job(paths.job(job_id))


class Comparer:
    """Runs cases when they are asked for, and keeps the processes and the answers for the next ones."""

    def __init__(self, plain: dict[str, Outcomes] | None = None) -> None:
        """`plain` are answers of plain Keras from a run before, by backend and name."""
        self._root = Path(tempfile.mkdtemp(prefix="insitu-cases-"))
        self._groups: dict[tuple[str, str], Processes] = {}
        self._answers: dict[tuple[str, str, str], Outcomes] = {}
        #: answers of plain Keras and of the strategy to the last description
        self.last: tuple[Outcomes, Outcomes] = ([], [])
        for name, answers in (plain or {}).items():
            backend, case = name.split(" ")
            self._answers[case, "plain", backend] = answers

    def plain(self) -> dict[str, Outcomes]:
        """The answers of plain Keras so far, by backend and name."""
        return {f"{key[2]} {key[0]}": value for key, value in self._answers.items() if key[1] == "plain"}

    def verdict(self, name: str, strategy: str, backend: str) -> Verdict:
        """How the case of this name comes out."""
        from keras_cases import CASES

        plain = self.answers(name, "plain", backend)
        others = self.answers(name, strategy, backend) if _is_done(plain) else []
        return judge(CASES[name], strategy, backend, plain, others)

    def verdict_of(self, description: dict[str, Any], strategy: str, backend: str) -> Verdict:
        """How the training that `random_models` describes comes out."""
        command = {"description": description}
        plain = self._run(command, "plain", backend)
        others = self._run(command, strategy, backend) if _is_done(plain) else []
        self.last = plain, others
        return judge(_case_of(command), strategy, backend, plain, others)

    def answers(self, name: str, strategy: str, backend: str) -> Outcomes:
        """What each process says of the case; fewer where some never came to an end."""
        key = (name, strategy, backend)
        if key not in self._answers:
            self._answers[key] = self._run({"case": name}, strategy, backend)
        return self._answers[key]

    def _run(self, command: dict[str, Any], strategy: str, backend: str) -> Outcomes:
        # A machine that stood still for a while looks like a case that never ends: once more.
        return self._run_once(command, strategy, backend) or self._run_once(command, strategy, backend)

    def _run_once(self, command: dict[str, Any], strategy: str, backend: str) -> Outcomes:
        group = self._group(strategy, backend)
        answers = group.run(command)
        if not group.is_sound_after(answers):
            self._groups.pop((strategy, backend)).stop()
        return answers

    def _group(self, strategy: str, backend: str) -> Processes:
        for key in [key for key in self._groups if key[1] != backend]:
            self._groups.pop(key).stop()
        if (strategy, backend) not in self._groups:
            self._groups[strategy, backend] = Processes(strategy, backend, self._root)
        return self._groups[strategy, backend]

    def close(self) -> None:
        """Ends all processes."""
        while self._groups:
            self._groups.popitem()[1].stop()
        shutil.rmtree(self._root, ignore_errors=True)


def _is_done(plain: Outcomes) -> bool:
    return bool(plain) and plain[0]["status"] == "done"


def first_difference(plain: Any, other: Any, where: str = "", tolerance: float = TOLERANCE) -> str:
    """Where two results differ first, or an empty text."""
    if isinstance(plain, dict) and isinstance(other, dict):
        if plain.keys() != other.keys():
            lost, new = sorted(plain.keys() - other.keys()), sorted(other.keys() - plain.keys())
            return f"{where or 'result'}: lost {lost}, new {new}"
        for name, value in plain.items():
            kind = HALF_TOLERANCE if name == "half" else tolerance
            if found := first_difference(value, other[name], f"{where}.{name}".lstrip("."), kind):
                return found
        return ""
    if isinstance(plain, list) and isinstance(other, list):
        return _list_difference(plain, other, where, tolerance)
    if _is_number(plain) and _is_number(other):
        return _list_difference([plain], [other], where, tolerance)
    return "" if plain == other else f"{where}: {plain!r} became {other!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list_difference(plain: list[Any], other: list[Any], where: str, tolerance: float) -> str:
    try:
        left, right = np.asarray(plain, "float64"), np.asarray(other, "float64")
    except (TypeError, ValueError):
        if len(plain) != len(other):
            return f"{where}: length {len(plain)} became {len(other)}"
        pairs = enumerate(zip(plain, other, strict=True))
        return next(
            (d for i, (a, b) in pairs if (d := first_difference(a, b, f"{where}[{i}]", tolerance))), ""
        )
    if left.shape != right.shape:
        return f"{where}: shape {left.shape} became {right.shape}"
    if left.size == 0:
        return ""
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return f"{where}: {_shown(left)} became {_shown(right)}"
    exact = all(_is_whole(value) for value in _flat(plain))
    room = 0.0 if exact else tolerance * max(float(np.abs(left[finite]).max(initial=0.0)), 1e-3)
    if np.abs(left[finite] - right[finite]).max(initial=0.0) > room:
        return f"{where}: {_shown(left)} became {_shown(right)}"
    return ""


def _flat(values: Any) -> Iterable[Any]:
    if not isinstance(values, list):
        return [values]
    return [leaf for value in values for leaf in _flat(value)]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int)


def _shown(values: Any) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values.reshape(-1)[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]"


def judge(case: Any, strategy: str, backend: str, plain: Outcomes, others: Outcomes) -> Verdict:
    """What the answers of a group mean beside the answer of plain Keras."""

    def verdict(status: str, detail: str = "", bits: bool = False) -> Verdict:
        seconds = max((answer.get("seconds", 0.0) for answer in others), default=DEADLINE)
        return Verdict(case.name, strategy, backend, status, detail, bits, round(seconds, 2))

    if not _is_done(plain):
        return verdict("no plain run", plain[0]["detail"] if plain else "endless")
    for status in ("endless", "crash", "refused"):
        for answer in others:
            if answer["status"] == status:
                alone = "" if len(others) == members(strategy, backend) else " (the others go on)"
                return verdict(status, answer["detail"] + alone)
    if len(others) < members(strategy, backend):
        return verdict("endless", f"not done after {DEADLINE:g} s")
    bits = True
    for index, answer in enumerate(others):
        keys = case.compared(strategy, backend, index, plain[0]["result"])
        left, right = ({k: v for k, v in a["result"].items() if k in keys} for a in (plain[0], answer))
        if found := first_difference(left, right):
            return verdict("different", found if not index else f"on worker {index}: {found}")
        bits = bits and left == right
    return verdict("right", bits=bits)


def compare(
    comparer: Comparer, backend: str, strategies: Iterable[str], names: Collection[str] = (), tell: Any = None
) -> list[Verdict]:
    """Runs the cases (all, or those with these names) plainly and under each strategy."""
    from keras_cases import CASES

    chosen = [c for n, c in CASES.items() if backend in c.backends and (n in names or not names)]
    verdicts = []
    for strategy in strategies:
        for case in chosen:
            if strategy in case.strategies:
                verdicts.append(comparer.verdict(case.name, strategy, backend))
                if tell is not None:
                    tell(verdicts[-1])
    return verdicts


def table(verdicts: Iterable[Verdict]) -> str:
    """Counts by strategy and backend, then each case that isn't right."""
    verdicts = list(verdicts)
    states = ("right", "different", "refused", "crash", "endless", "no plain run")
    lines = [f"{'':24}" + "".join(f"{state:>14}" for state in (*states, "same bits"))]
    for group in dict.fromkeys((v.backend, v.strategy) for v in verdicts):
        own = [v for v in verdicts if (v.backend, v.strategy) == group]
        counts = [sum(v.status == state for v in own) for state in states]
        lines.append(
            f"{' '.join(group):24}" + "".join(f"{n:>14}" for n in (*counts, sum(v.bits for v in own)))
        )
    lines.append("")
    lines += [
        f"{v.backend:10} {v.strategy:8} {v.status:9} {v.case}: {v.detail}"
        for v in verdicts
        if v.status != "right"
    ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="tensorflow")
    parser.add_argument("--strategy", nargs="*", default=["one", "mirrored"])
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="write all verdicts")
    parser.add_argument("--plain", type=Path, help="answers of plain Keras: read if it exists, and written")
    options = parser.parse_args()

    def tell(verdict: Verdict) -> None:
        print(f"{verdict.strategy:8} {verdict.status:9} {verdict.case} {verdict.detail}", flush=True)

    # This process trains nothing, and the lightest backend will do.
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    known = options.plain is not None and options.plain.exists()
    comparer = Comparer(json.loads(options.plain.read_text()) if known else None)
    try:
        verdicts = compare(comparer, options.backend, options.strategy, options.case, tell)
    finally:
        comparer.close()
        if options.plain is not None:
            options.plain.write_text(json.dumps(comparer.plain()))
    print(table(verdicts))
    if options.json:
        options.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
