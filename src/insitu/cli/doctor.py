"""The command that checks this machine: doctor."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from insitu.base.config import BACKENDS
from insitu.base.errors import InsituError
from insitu.base.paths import MEMORY, Paths
from insitu.cli.console import JsonOption, paint, print_json
from insitu.service import (
    BackendFacts,
    Finding,
    can_train,
    find_allowed,
    judge_backend,
    judge_clock,
    judge_cluster,
    judge_compiled,
    judge_gpus,
    judge_home,
    judge_late,
    judge_libraries,
    judge_limits,
    judge_ports,
    judge_python,
    judge_shared_memory,
    report_findings,
)

_BACKEND_SECONDS = 90.0
"""How long a backend may take to say which devices it has."""
_DRIVER_SECONDS = 10.0
_SECONDS = {"backends": _BACKEND_SECONDS + 5.0}
_MOST_SECONDS = 20.0
"""How long one check may take, but for those of `_SECONDS`."""
_COLOURS = {"ok": 32, "warning": 33, "problem": 31}
_LIBRARIES = ("exchange/kernels.c", "parameters/kernels.c")


def doctor(as_json: JsonOption = False) -> None:
    """Check whether this machine can train, and say how to mend what prevents it.

    Looks at Python, libraries, Keras' backends and their devices, memory, the disk of $INSITU_HOME, ports,
    limits, the clock, and the head of a cluster. A backend is loaded in a process of its own, and nothing is
    waited for longer than two minutes. Each line is ok, a warning or a problem, with what to do about it.
    Exits with 1 if a problem prevents a training.

    Examples:

        insitu doctor
        insitu doctor --json
    """
    findings = []
    for finding in examine(Paths.default()):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print_json(report_findings(findings))
    raise typer.Exit(0 if can_train(findings) else 1)


def _print(finding: Finding) -> None:
    level = paint(f"{finding.level:7}", _COLOURS[finding.level], sys.stdout)
    typer.echo(f"{level}  {finding.check}: {finding.text}")
    if finding.remedy:
        typer.echo(f"{'':7}  -> {finding.remedy}")
    sys.stdout.flush()


def examine(paths: Paths) -> Iterator[Finding]:
    """Yield all findings about this machine, in a fixed order, as soon as they are there."""
    checks: dict[str, Callable[[], list[Finding]]] = {
        "python": _check_libraries,
        "compiled code": _check_compiled,
        "shared memory": _check_shared_memory,
        "home": lambda: _check_home(paths),
        "ports": _check_ports,
        "limits": _check_limits,
        "cluster": lambda: _check_cluster(paths),
        "backends": _check_backends,
    }
    began = time.monotonic()
    answers = {name: _begin(name, check) for name, check in checks.items()}
    for name, answer in answers.items():
        seconds = _SECONDS.get(name, _MOST_SECONDS)
        try:
            yield from answer.get(timeout=max(0.0, began + seconds - time.monotonic()))
        except queue.Empty:
            yield judge_late(name, seconds)


def _begin(name: str, check: Callable[[], list[Finding]]) -> queue.SimpleQueue[list[Finding]]:
    """Run a check in a thread that nobody has to wait for: a call of the system may never return."""
    answer: queue.SimpleQueue[list[Finding]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(check())
        except Exception as error:  # such as a damaged library: the other checks say more
            text = f"the check failed by {type(error).__name__}: {error}"
            answer.put([Finding(name, "problem", text, "pip install --force-reinstall insitu")])

    threading.Thread(target=run, daemon=True).start()
    return answer


def _check_libraries() -> list[Finding]:
    import platform
    from importlib import metadata

    package = metadata.metadata("insitu")
    versions = {str(each.name).lower(): each.version for each in metadata.distributions()}
    return [
        judge_python(platform.python_version(), package["Requires-Python"], sys.executable),
        judge_libraries(metadata.requires("insitu") or [], versions),
    ]


def _check_compiled() -> list[Finding]:
    import ctypes

    from insitu.base.compiled import load_library, locate_library

    room, built = Path(__file__).parents[1], 0.0
    try:
        for name in _LIBRARIES:
            load_library(room / name, lambda library: ctypes.CDLL(str(library)))
            built = locate_library(room / name).stat().st_mtime
    except InsituError as error:
        return [judge_compiled(error.message)]
    return [judge_compiled(""), judge_clock(time.time(), built)]


def _check_shared_memory() -> list[Finding]:
    failure = ""
    try:
        os.close(os.memfd_create("insitu-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        failure = str(error)
    try:
        room = shutil.disk_usage(MEMORY)
    except OSError:
        return [judge_shared_memory(None, 0, failure)]
    return [judge_shared_memory(room.total, room.free, failure)]


def _check_home(paths: Paths) -> list[Finding]:
    folder = paths.home
    with contextlib.suppress(OSError):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"insitu")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return judge_home(str(paths.home), 0, error.strerror or str(error))
    return judge_home(str(paths.home), free, "")


def _check_ports() -> list[Finding]:
    import socket

    from insitu.base.net.ports import hold_port

    try:
        with hold_port("127.0.0.1") as listener:
            listener.listen(1)
            with socket.create_connection(listener.getsockname(), timeout=_DRIVER_SECONDS):
                return [judge_ports("")]
    except (InsituError, OSError) as error:
        return [judge_ports(str(error))]


def _check_limits() -> list[Finding]:
    from insitu.cluster import check_file_size_limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mappings, file_size = None, ""
    with contextlib.suppress(OSError, ValueError):
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    try:
        check_file_size_limit()
    except InsituError as error:
        file_size = error.message
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return judge_limits(_limit(soft), _limit(hard), _limit(processes), mappings, file_size)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _check_cluster(paths: Paths) -> list[Finding]:
    from insitu.service import list_nodes

    notices: list[str] = []
    try:
        return judge_cluster(list_nodes(paths, notices.append), " ".join(notices))
    except InsituError as error:
        return [Finding("cluster", "problem", error.message.rstrip("."), "insitu up --help")]


def _check_backends() -> list[Finding]:
    from importlib import metadata

    from insitu.cluster import read_versions
    from insitu.train.backends import active_name

    versions, requirements, active = read_versions(), metadata.requires("insitu") or [], active_name()
    asked = {name: _begin_backend(name) for name in BACKENDS if name in versions}
    driver = _begin_driver()
    facts = []
    for name in BACKENDS:
        found, failure = asked[name].get() if name in asked else ([], "")
        allowed = find_allowed(name, requirements)
        facts.append(
            BackendFacts(name, versions.get(name, ""), allowed, name == active, tuple(found), failure)
        )
    installed = [each.name for each in facts if each.version and not each.failure and not each.active]
    findings = [judge_backend(each, installed) for each in facts]
    if active not in BACKENDS:
        text = f"insitu runs on {', '.join(BACKENDS)}. Keras uses {active} here"
        findings.append(Finding("backend", "problem", text, f"export KERAS_BACKEND={BACKENDS[0]}"))
    models, failure = driver.get()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return [*findings, judge_gpus(models, failure, hidden, next((f for f in facts if f.active), None))]


def _begin_backend(name: str) -> queue.SimpleQueue[tuple[list[dict[str, object]], str]]:
    from insitu.cli.devices import ask

    answer: queue.SimpleQueue[tuple[list[dict[str, object]], str]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put((ask(name, _BACKEND_SECONDS), ""))
        except InsituError as error:
            answer.put(([], error.message.rstrip(".")))

    threading.Thread(target=run, daemon=True).start()
    return answer


def _begin_driver() -> queue.SimpleQueue[tuple[list[str], str]]:
    """Ask nvidia-smi for the GPUs of this machine, and put their models, or why it fails."""
    answer: queue.SimpleQueue[tuple[list[str], str]] = queue.SimpleQueue()

    def run() -> None:
        from insitu.cluster import list_gpus

        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        listed = list(list_gpus())
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            silent = isinstance(error, subprocess.TimeoutExpired)
            answer.put((listed, f"no answer within {_DRIVER_SECONDS:g} s" if silent else ""))
            return
        lines = done.stdout.strip().splitlines()
        failed = done.returncode != 0
        reason = (done.stderr.strip().splitlines() or lines or ["no message"])[-1] if failed else ""
        answer.put((listed if failed else lines, reason))

    threading.Thread(target=run, daemon=True).start()
    return answer


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command()(doctor)
