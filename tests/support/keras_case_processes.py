"""Processes that train the cases of `keras_cases`, one after the other, and answer with what came out.

python keras_case_processes.py FOLDER STRATEGY
    a process that runs the cases which it finds in FOLDER

A group of processes (one, or the workers of a job) runs many cases. It is stopped and started anew after a
case that didn't end, ended one of its processes, or may have left one waiting for another.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE = 60.0
"""Seconds for one case, from when the processes hear of it."""
STARTUP = 120.0
"""Seconds until all processes of a group have begun to listen."""
GRACE = 8.0
"""Seconds for the other processes of a group when one has ended a case with an error."""
WORKERS = 2
LIFETIME = 200
"""Cases that a group runs: compiled functions of old cases are never freed."""

COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Lets processes on JAX share compiled programs, which take most of the time: many cases have the same."""

Outcomes = list[dict[str, Any]]
"""Answers of a group's processes to a case: "status", "seconds", and "result", or "detail" with "trace"."""


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
        result = _run_case(case_of(command), strategy_name, replicas, index, command, scope)
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


def case_of(command: Any) -> Any:
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

    from insitu.base.errors import InsituError

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


def members(strategy: str) -> int:
    """How many processes train together."""
    return WORKERS if strategy == "workers" else 1


class Processes:
    """A group of processes that train together."""

    def __init__(self, strategy: str, backend: str, root: Path) -> None:
        self.strategy, self.backend = strategy, backend
        self.root = root
        self.folder = Path(tempfile.mkdtemp(prefix=f"{strategy}-", dir=root))
        self.number = 0
        self.members = members(strategy)
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
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self.root / "compiled"), **COMPILED}
        return {**compiled, **kept, **threads, **own, "NO_COLOR": "1"}

    def _command(self) -> list[str]:
        script = [str(Path(__file__).resolve()), str(self.folder), self.strategy]
        if self.strategy != "workers":
            return [sys.executable, *script]
        self._make_job()
        options = ["--workers", str(WORKERS), "--threads", "1", "--max-restarts", "0"]
        job = [str(self.folder / "job"), sys.executable, *script]
        return [sys.executable, "-m", "insitu", "start", *options, "rows", *job]

    def _make_job(self) -> None:
        """A job needs a cache, of which the cases take no rows."""
        from insitu.base.paths import Paths
        from insitu.grid import bring_up, import_cache

        paths = Paths(self.folder / "home")
        (self.folder / "job").mkdir()
        (self.folder / "job" / "README").write_text("The script is elsewhere.")
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
        from insitu.base.errors import JobEnded
        from insitu.base.paths import Paths
        from insitu.cluster import list_job_ids, stop_job

        paths = Paths(self.folder / "home")
        for job_id in list_job_ids(paths):
            for _ in range(2):  # a second stop kills at once
                with contextlib.suppress(JobEnded):
                    stop_job(paths.job(job_id))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(Path(sys.argv[1]), sys.argv[2])
