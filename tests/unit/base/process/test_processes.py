"""What Linux offers to control processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.base.process import processes


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_children_are_listed_and_suspended_ones_known() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in list(processes.list_children())
        assert not processes.is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert processes.is_stopped(child.pid)
    finally:
        child.kill()
        child.communicate()
    assert not processes.is_stopped(child.pid)


def test_every_descendant_is_ended() -> None:
    code = (
        "import subprocess, sys; from insitu.base.process.processes import *\n"
        "adopt_orphans()\n"
        'inner = \'import subprocess; subprocess.Popen(["sleep", "600"]); print(1, flush=True); input()\'\n'
        "child = subprocess.Popen([sys.executable, '-c', inner], stdin=-1, stdout=-1)\n"
        "child.stdout.readline()\n"
        "end_all_children()\n"
        "print(list(list_children()))\n"
    )
    assert run(code) == "[]\n"


def test_a_process_does_not_outlive_the_parent_that_it_is_tied_to() -> None:
    # The parent has ended before: 1 is not its process id.
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from insitu.base.process.processes import *; die_with_parent(9, 1); print('on')",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "has ended" in done.stderr and done.stdout == ""


def test_memory_is_counted_in_bytes() -> None:
    assert processes.read_resident_bytes(os.getpid()) > 2**20
    assert processes.read_resident_bytes(2**22 + 1) == 0
    assert processes.read_available_bytes() > 0


def test_what_a_cgroup_leaves_is_what_processes_may_get(tmp_path: Path) -> None:
    """Pages of files in it are given up when they are needed, so they count as free."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemAvailable: 900 kB\n")
    (proc / "self" / "cgroup").write_text("1:cpu:/x\n0::/user/job\n")

    def limit(group: str, most: str, used: int, files: int) -> None:
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "memory.max").write_text(most)
        (groups / group / "memory.current").write_text(str(used))
        (groups / group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\n")

    assert processes.read_available_bytes(proc, groups) == 900 * 1024
    limit("user/job", "max", 10, 0)
    limit("user", "5000", 4000, 500)
    assert processes.read_available_bytes(proc, groups) == 1500
    limit("user/job", "1000", 1200, 100)
    assert processes.read_available_bytes(proc, groups) == 0
    (proc / "meminfo").write_text("")
    assert processes.read_available_bytes(proc, groups) == 0


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = processes.identify_process(child.pid)
        assert identity is not None and identity.pid == child.pid
        descriptor = processes.open_process(identity)
        assert descriptor is not None
        os.close(descriptor)
        earlier = processes.ProcessIdentity(child.pid, identity.start - 1)
        assert processes.open_process(earlier) is None
    finally:
        child.kill()
        child.communicate()
    assert processes.open_process(identity) is None
    assert processes.identify_process(child.pid) is None


def test_a_host_has_one_name() -> None:
    assert processes.read_host() == processes.read_host() != ""


def test_children_that_cannot_be_ended_are_named(monkeypatch) -> None:
    """As those that wait for a disk that doesn't answer."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(processes.os, "kill", lambda pid, number: None)
    try:
        assert child.pid in processes.end_all_children(timeout=0.05)
    finally:
        monkeypatch.undo()
        child.kill()
        child.communicate()


def test_the_processor_time_of_a_session_is_that_of_all_its_processes() -> None:
    inner = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); sys.stdin.read()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=-1, stdout=-1, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "1\n"
        assert processes.read_cpu_seconds([child.pid])[child.pid] >= 0.29
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    deadline = time.monotonic() + 60
    while processes.read_cpu_seconds([child.pid]) != {child.pid: 0.0}:  # the inner one dies by itself
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.read_cpu_seconds([]) == {}


def test_a_raylet_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["python", None]
    monkeypatch.setattr(
        "psutil.process_iter", lambda attributes: [SimpleNamespace(info={"name": name}) for name in names]
    )
    assert not processes.runs_raylet()
    names.append("raylet")
    assert processes.runs_raylet()
