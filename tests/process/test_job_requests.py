"""Requests to running jobs whose controllers are killed, suspended and talked to by strangers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_runs import PATIENCE, Insitu, insitu_at, wait_for

from insitu.base.paths import JobPaths
from insitu.base.process.processes import is_stopped
from insitu.cluster import Journal, end_job, stop_job, submit
from insitu.cluster.client import job_requests, submission
from insitu.cluster.job_files import connect_for_requests, take_lock
from insitu.options import JobOptions

WAITS = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def insitu(tmp_path: Path) -> Iterator[Insitu]:
    with insitu_at(tmp_path) as insitu:
        yield insitu


def start(insitu: Insitu, *options: str) -> str:
    """A job whose one task runs."""
    insitu.script(WAITS)
    job_id = insitu.detach("--workers", "1", *options)
    wait_for("the task", lambda: "ready" in insitu.output(job_id))
    return job_id


def begin_to_stop(insitu: Insitu, job_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        insitu.command("stop", job_id),
        env=insitu.environment,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )


def stops(insitu: Insitu, job_id: str) -> int:
    entries = Journal(insitu.job(job_id).journal).entries()
    return sum(entry.event["event"] == "StopRequested" for entry in entries)


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_for("the process to stop", lambda: is_stopped(pid))  # until then it may still answer


def test_a_request_outlives_the_controller_that_it_was_sent_to(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = start(insitu)
    controller = insitu.controller(job_id)
    suspend(controller)
    connected = threading.Event()

    def connect(job: JobPaths, timeout: float) -> socket.socket:
        connection = connect_for_requests(job, timeout)
        connected.set()
        return connection

    monkeypatch.setattr(job_requests, "connect_for_requests", connect)
    client = threading.Thread(target=stop_job, args=(insitu.job(job_id),))
    client.start()
    assert connected.wait(PATIENCE)
    os.kill(controller, signal.SIGKILL)
    client.join(PATIENCE)
    assert not client.is_alive()
    wait_for("the end", lambda: insitu.state(job_id) == "stopped")
    assert stops(insitu, job_id) == 1
    assert "taken over" in insitu.output(job_id)


def test_a_suspended_controller_is_replaced_and_the_job_stopped(
    insitu: Insitu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`insitu stop` ended in an error, and nothing else noticed."""
    insitu.environment["CLOUD_SECRET_KEY"] = "pB7-very-secret"
    job_id = start(insitu)
    tasks = Journal(insitu.job(job_id).journal).state().alive
    environments = [Path(f"/proc/{task.pid}/environ").read_bytes() for task in tasks]
    suspend(insitu.controller(job_id))
    monkeypatch.setattr(job_requests, "STOP_TIMEOUT", 0.5)
    notices: list[str] = []

    def notify(text: str) -> None:
        notices.append(text)
        monkeypatch.setattr(job_requests, "STOP_TIMEOUT", PATIENCE)  # for the next one

    end_job(insitu.job(job_id), notify)
    assert insitu.state(job_id) == "stopped"
    (notice,) = notices
    assert "is suspended: killing it, so that another takes over" in notice
    # Tasks have the whole environment of `start`. Nothing writes it down.
    assert b"pB7-very-secret" in b"".join(environments)
    files = [path for path in insitu.job(job_id).root.rglob("*") if path.is_file()]
    assert [path for path in files if b"pB7-very-secret" in path.read_bytes()] == []


def test_two_clients_at_once_are_both_served(insitu: Insitu) -> None:
    job_id = start(insitu)
    clients = [begin_to_stop(insitu, job_id) for _ in range(2)]
    for client in clients:
        assert "stopped" in client.communicate(timeout=PATIENCE)[1].decode()
        # The second may come when the job has ended already.
        assert client.returncode in (0, 3)
    assert insitu.state(job_id) == "stopped"


def test_strangers_at_the_socket_do_not_hurt_the_job(insitu: Insitu) -> None:
    job_id = start(insitu)
    job = insitu.job(job_id)
    controller = insitu.controller(job_id)
    silent = [connect_for_requests(job, PATIENCE) for _ in range(5)]
    for garbage in (b"\n", b"\xff" * 100_000, b'{"id": "x"}\n', b'{"id": "x", "do": "scale"}\n'):
        with connect_for_requests(job, PATIENCE) as stranger:
            send_and_read(stranger, garbage)
    assert insitu.controller(job_id) == controller
    assert "has ended: stopped" in insitu.run("stop", job_id).stderr
    assert "taken over" not in insitu.output(job_id)
    for connection in silent:
        assert connection.recv(1) == b""
        connection.close()


def send_and_read(stranger: socket.socket, garbage: bytes) -> None:
    try:
        stranger.sendall(garbage)
        while stranger.recv(4096):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass


def test_the_home_may_have_a_long_name(tmp_path: Path) -> None:
    with insitu_at(tmp_path / ("long" * 33)) as insitu:
        job_id = start(insitu)
        assert len(str(insitu.job(job_id).requests)) > 130
        assert "has ended: stopped" in insitu.run("stop", job_id).stderr
        assert not insitu.job(job_id).requests.exists()


def test_a_signal_to_the_controller_stops_the_job_too(insitu: Insitu) -> None:
    job_id = start(insitu)
    os.kill(insitu.controller(job_id), signal.SIGTERM)
    wait_for("the end", lambda: insitu.state(job_id) == "stopped")


ONCE_KILLED = """
import os, pathlib, time
print("life", os.environ["INSITU_ATTEMPT"], os.environ["INSITU_TASK"], flush=True)
while not pathlib.Path(os.environ["INSITU_HOME"], "go").exists():
    time.sleep(0.02)
if os.environ["INSITU_ATTEMPT"] == "1":
    if os.environ["INSITU_TASK"] == "worker:1":
        os.kill(os.getpid(), 9)
    time.sleep(600)
"""


def test_a_job_runs_on_an_engine_in_another_process(insitu: Insitu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a restart, and a controller that is killed."""
    insitu.script(ONCE_KILLED)
    begin = submission.start_supervisor
    with monkeypatch.context() as patch:
        patch.setenv("INSITU_HOME", str(insitu.paths.home))
        patch.setattr(submission, "start_supervisor", lambda job, lock: None)
        request = JobOptions("data/train", insitu.folder, ("train.py",), workers=2)
        job = insitu.job(submit(insitu.paths, request))
        spec = json.loads(job.spec.read_text())
        job.spec.write_text(json.dumps({**spec, "engine": "server"}))
        lock = take_lock(job.controller)
        begin(job, lock)
        os.close(lock)
    job_id = job.root.name
    wait_for("both tasks", lambda: insitu.output(job_id).count("life 1") == 2)
    os.kill(insitu.controller(job_id), signal.SIGKILL)
    (insitu.paths.home / "go").touch()
    assert "life 2 worker:1" in insitu.run("attach", job_id).stdout
    assert insitu.state(job_id) == "finished"
    assert "taken over" in insitu.output(job_id)
    assert insitu.processes() == {}
    wait_for("the supervisor's end", lambda: all(each.poll() is not None for each in submission._supervisors))
