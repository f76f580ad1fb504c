"""How a client asks, with a controller that does as the test says."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu

from insitu.cluster import Request, resume_job, scale_job, stop_job, submit
from insitu.cluster.client import job_requests, submission
from insitu.cluster.job_files.lock import take_lock
from insitu.cluster.job_files.request_socket import listen_for_requests
from insitu.errors import ClusterError, InputError, JobEnded
from insitu.paths import JobPaths

PATIENCE = 60.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    insitu = Insitu(tmp_path)
    insitu.script("")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    return insitu.job(submit(insitu.paths, Request("data/train", insitu.folder, ("train.py",), workers=2)))


class Lock:
    """Held as long as the job runs."""

    def __init__(self, job: JobPaths) -> None:
        self._descriptors = [take_lock(job.controller)]

    def release(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


@pytest.fixture
def lock(job: JobPaths) -> Iterator[Lock]:
    taken = Lock(job)
    yield taken
    taken.release()


Act = Callable[[socket.socket, dict[str, Any]], None]


class Controller:
    """Takes one connection for each of `acts`, reads a request off it, and acts."""

    def __init__(self, job: JobPaths, *acts: Act) -> None:
        self._listener = listen_for_requests(job)
        self._acts = acts
        self.requests: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._listener.settimeout(PATIENCE)
        for act in self._acts:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(PATIENCE)
                data = b""
                while not data.endswith(b"\n"):
                    data += connection.recv(4096)
                self.requests.append(json.loads(data))
                act(connection, self.requests[-1])

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._listener.close()


def reply(**message: object) -> Act:
    return lambda connection, _: connection.sendall(json.dumps(message).encode() + b"\n")


def die(connection: socket.socket, _: dict[str, Any]) -> None:
    """The controller is killed before it replies."""


def test_a_request_is_sent_again_with_the_same_id_until_there_is_a_reply(job: JobPaths, lock: Lock) -> None:
    with Controller(job, die, die, reply(ok=True, text="from 2 to 1")) as controller:
        assert scale_job(job, 1) == "from 2 to 1"
    first, *others = controller.requests
    assert others == [first, first] and (first["do"], first["workers"]) == ("scale", 1)


def test_each_stop_is_a_request_of_its_own(job: JobPaths, lock: Lock) -> None:
    with Controller(job, reply(ok=True, text=""), reply(ok=True, text="")) as controller:
        stop_job(job)
        stop_job(job)
    first, second = controller.requests
    assert first["do"] == second["do"] == "stop" and first["id"] != second["id"]


def test_a_job_that_has_only_begun_is_waited_for(job: JobPaths, lock: Lock) -> None:
    done = threading.Thread(target=stop_job, args=(job,))
    done.start()
    with Controller(job, reply(ok=True, text="")):
        done.join(PATIENCE)
        assert not done.is_alive()


def test_a_refusal_is_an_error_of_the_user(job: JobPaths, lock: Lock) -> None:
    with (
        Controller(job, reply(error="refused", text="not scaled")),
        pytest.raises(InputError, match="not sca"),
    ):
        scale_job(job, 1)


def test_a_job_that_is_over_says_so(job: JobPaths, lock: Lock) -> None:
    with Controller(job, reply(error="ended", text="finished")), pytest.raises(JobEnded, match="finished"):
        stop_job(job)
    lock.release()
    with pytest.raises(JobEnded, match="has ended already"):
        stop_job(job)


def test_a_job_that_ends_while_a_request_waits(job: JobPaths, lock: Lock) -> None:
    def end(connection: socket.socket, _: dict[str, Any]) -> None:
        lock.release()

    with Controller(job, end), pytest.raises(JobEnded, match="has ended already"):
        scale_job(job, 1)


@pytest.mark.parametrize("accepts", [False, True])
def test_a_controller_that_does_not_reply_is_an_error(
    job: JobPaths, lock: Lock, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    monkeypatch.setattr(job_requests, "_REPLY_TIMEOUT", 0.2)
    with listen_for_requests(job) as listener:
        if not accepts:
            listener.close()
        with pytest.raises(ClusterError, match=r"did not reply within 0\.2 s"):
            stop_job(job)


def test_an_answer_that_is_none_is_not_taken_for_one(job: JobPaths, lock: Lock) -> None:
    def garbage(connection: socket.socket, _: dict[str, Any]) -> None:
        connection.sendall(b"no json\n")

    with (
        Controller(job, garbage, reply(error="invalid", text="?")),
        pytest.raises(ClusterError, match="not take"),
    ):
        stop_job(job)


def test_a_job_of_another_host_is_asked_there(job: JobPaths) -> None:
    job.controller.write_text(json.dumps({"host": "far-1"}))
    for ask in (stop_job, resume_job):
        with pytest.raises(InputError, match="runs on another host, far-1"):
            ask(job)
    # That host is gone for good.
    job.controller.unlink()
    with pytest.raises(JobEnded):
        stop_job(job)
