"""How a client asks, with a controller that does as the test says."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu

from insitu.base.errors import ClusterError, InputError, JobEnded, JobRunning, JobSpecError, StoreUnavailable
from insitu.base.paths import JobPaths, Paths
from insitu.base.process.processes import ProcessIdentity, identify_process, read_host
from insitu.cluster import Shell, delete_job, end_job, read_status, resume_job, scale_job, stop_job, submit
from insitu.cluster.client import job_requests, submission
from insitu.cluster.decide import ControllerLostEvent, advance
from insitu.cluster.job_files import Journal, read_environment, write_environment
from insitu.cluster.job_files.lock import take_lock
from insitu.cluster.job_files.request_socket import listen_for_requests
from insitu.options import JobOptions

PATIENCE = 60.0


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    insitu = Insitu(tmp_path)
    insitu.script("")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    return insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=2)))


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
    monkeypatch.setattr(job_requests, "REPLY_TIMEOUT", 0.2)
    with listen_for_requests(job) as listener:
        if not accepts:
            listener.close()
        with pytest.raises(ClusterError, match=r"did not reply within 0\.2 s"):
            scale_job(job, 1)


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


@pytest.fixture
def ended(job: JobPaths) -> JobPaths:
    """A job that has failed. It was started with a rate and a token."""
    journal = Journal(job.journal)
    event = ControllerLostEvent("gone")
    state, actions = advance(journal.state(), event, 1.0)
    journal.record(1.0, event, actions, state)
    kept = replace(read_environment(job), variables={"RATE": "0.5"}, secrets=("A_TOKEN",))
    write_environment(job, kept)
    return job


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """The shells with which supervisors are started."""
    found: list[Mapping[str, str]] = []
    monkeypatch.setattr(job_requests, "start_supervisor", lambda job, lock, shell: found.append(shell))
    return found


def test_a_job_that_is_resumed_is_about_to_run_and_says_what_differs(
    ended: JobPaths, started: list[Mapping[str, str]]
) -> None:
    said: list[str] = []
    shell = Shell({"RATE": "rate-1", "A_TOKEN": "geheim"})
    with pytest.raises(JobSpecError, match="without A_TOKEN"):
        resume_job(ended, Shell({}))
    assert read_status(ended).state.phase == "failed" and not started
    resume_job(ended, shell, said.append)
    assert started == [shell.variables] and Journal(ended.journal).state().phase == "pending"
    assert [line.partition(": ")[2] for line in said] == ["A_TOKEN", "RATE. --env NAME takes one"]
    assert all(line in ended.output.read_text() for line in said)
    for file in (path for path in ended.root.rglob("*") if path.is_file()):
        assert b"geheim" not in file.read_bytes() and b"rate-1" not in file.read_bytes(), file
    assert ended.environment.stat().st_mode & 0o777 == 0o600


def test_a_head_has_no_job_go_on_that_has_ended_or_lacks_what_it_needs(
    ended: JobPaths, job: JobPaths, started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobEnded, match="has failed: there is nothing to continue with"):
        resume_job(ended, Shell({"A_TOKEN": ""}), revision=5)
    resume_job(ended, Shell({"A_TOKEN": ""}))  # a user does
    with pytest.raises(JobSpecError, match="without A_TOKEN"):
        resume_job(job, Shell({}), revision=5)
    assert Journal(job.journal).state().phase == "pending"  # so it is tried again
    claimed: list[int | None] = []
    monkeypatch.setattr(job_requests, "claim_job", lambda job, revision: claimed.append(revision))
    resume_job(job, Shell({"A_TOKEN": ""}), revision=5)
    assert claimed == [5] and len(started) == 2


def test_what_is_stopped_is_not_started_again(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor is lost, and the head would have started another one."""
    forgotten: list[str] = []

    def forget(paths: Paths, job_id: str) -> bool:
        forgotten.append(job_id)
        return True

    monkeypatch.setattr(job_requests, "forget_job", forget)
    stop_job(job)
    assert forgotten == [job.root.name]
    assert "it was stopped before another supervisor was started" in read_status(job).state.reason


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[JobPaths]:
    """The jobs whose places were removed."""
    found: list[JobPaths] = []

    class Starter:
        def __init__(self, job: JobPaths) -> None:
            self._job = job

        def remove_places(self) -> None:
            found.append(self._job)

    monkeypatch.setattr(job_requests, "load_plugin", lambda group, name: Starter)
    return found


def test_a_paused_job_that_is_deleted_loses_its_places(ended: JobPaths, removed: list[JobPaths]) -> None:
    ended.paused.touch()
    delete_job(Paths(ended.root.parent.parent), ended)
    assert removed == [ended] and not ended.root.exists()


def test_a_paused_job_is_stopped_for_good_and_its_places_go(
    ended: JobPaths, started: list[Mapping[str, str]], removed: list[JobPaths]
) -> None:
    shell = Shell({"A_TOKEN": "geheim"})
    ended.paused.touch()
    with pytest.raises(JobEnded):  # it has ended by itself while it was to pause
        stop_job(ended, pauses=True)
    assert ended.paused.exists() and not removed
    stop_job(ended)
    assert removed == [ended] and not ended.paused.exists()
    with pytest.raises(JobEnded):
        stop_job(ended)
    with pytest.raises(JobEnded):  # what is under way already comes too late
        resume_job(ended, shell, only_paused=True)
    assert not started
    ended.paused.touch()
    resume_job(ended, shell, only_paused=True)
    assert len(started) == 1 and not ended.paused.exists()


def test_a_paused_job_whose_supervisor_does_not_start_stays_paused(
    ended: JobPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is tried again."""

    def fail(*arguments: object) -> None:
        raise ClusterError("no memory")

    monkeypatch.setattr(job_requests, "start_supervisor", fail)
    ended.paused.touch()
    with pytest.raises(ClusterError, match="no memory"):
        resume_job(ended, Shell({"A_TOKEN": "geheim"}), only_paused=True)
    assert ended.paused.exists()


def test_a_job_is_stopped_though_etcd_is_silent(
    job: JobPaths, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(paths: Paths, job_id: str) -> bool:
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(job_requests, "forget_job", forget)
    said: list[str] = []
    with Controller(job, reply(text="stopping every task")):
        stop_job(job, said.append)
    assert said == ["Another supervisor may be started when etcd answers. Stop the job again then: no answer"]


def test_what_the_user_names_becomes_the_job_s_own(ended: JobPaths, started: list[Mapping[str, str]]) -> None:
    resume_job(ended, Shell({"RATE": "9"}, ("RATE", "A_TOKEN")))
    kept = read_environment(ended)
    assert kept.variables == {"RATE": "9"} and kept.secrets == ()


def test_a_server_gives_a_job_the_secrets_of_its_caller_and_nothing_else(
    ended: JobPaths, started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATE", "9")
    monkeypatch.setenv("A_TOKEN", "of the server")
    said: list[str] = []
    with pytest.raises(JobSpecError, match="From elsewhere --env gives secrets"):
        resume_job(ended, Shell.of_server({"RATE": "8", "LD_PRELOAD": "x"}))
    resume_job(ended, Shell.of_server({"A_TOKEN": "geheim"}), said.append)
    (shell,) = started
    assert shell["A_TOKEN"] == "geheim" and len(said) == 1 and said[0].endswith(": A_TOKEN")
    assert read_environment(ended).variables == {"RATE": "0.5"}


def test_a_caller_without_a_secret_has_the_job_go_on_without_it(
    ended: JobPaths, started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "of the server")
    resume_job(ended, Shell.of_server({"A_TOKEN": None}))
    assert "A_TOKEN" not in started[0] and read_environment(ended).secrets == ()


def test_a_job_that_cannot_go_on_says_why(ended: JobPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ClusterError("no process")

    monkeypatch.setattr(job_requests, "start_supervisor", fail)
    with pytest.raises(ClusterError, match="no process"):
        resume_job(ended, Shell({"A_TOKEN": "geheim"}))
    state = read_status(ended).state
    assert (state.phase, state.reason) == ("failed", "no process")


def test_a_job_that_runs_is_not_resumed(ended: JobPaths, lock: Lock) -> None:
    with pytest.raises(JobRunning, match="is running"):
        resume_job(ended)


HOLDER = """
import sys, time
from pathlib import Path
from insitu.cluster.job_files.lock import take_lock
lock = take_lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def identity_of(child: subprocess.Popen[bytes]) -> ProcessIdentity:
    identity = identify_process(child.pid)
    assert identity is not None
    return identity


@pytest.fixture
def hung(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """[supervisor, controller] of the job: the one holds the lock, neither answers."""
    for name in ("STOP_TIMEOUT", "REPLY_TIMEOUT"):
        monkeypatch.setattr(job_requests, name, 0.3)
    command = [sys.executable, "-c", HOLDER, str(job.controller)]
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert supervisor.stdout is not None and supervisor.stdout.readline() == b"locked\n"
    controller = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine, its = identity_of(supervisor), identity_of(controller)
    record = {
        "host": read_host(),
        "pid": its.pid,
        "start": its.start,
        "supervisor": [mine.pid, mine.start],
    }
    job.controller.write_text(json.dumps(record))
    yield [supervisor, controller]
    for child in (supervisor, controller):
        child.kill()
        child.communicate()


def test_stop_kills_a_suspended_controller_and_asks_the_next(
    job: JobPaths, hung: list[subprocess.Popen[bytes]]
) -> None:
    supervisor, controller = hung
    controller.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, controller.pid, os.WSTOPPED | os.WNOWAIT)
    notices: list[str] = []

    def be_the_next() -> None:
        assert controller.wait(PATIENCE) == -signal.SIGKILL
        with Controller(job, reply(ok=True, text="")):
            pass

    following = threading.Thread(target=be_the_next)
    following.start()
    stop_job(job, notices.append)
    following.join(PATIENCE)
    (notice,) = notices
    assert "controller of" in notice and "is suspended: killing it" in notice
    assert supervisor.poll() is None


def test_stop_kills_a_supervisor_that_has_no_controller_that_answers(
    job: JobPaths, hung: list[subprocess.Popen[bytes]]
) -> None:
    supervisor, controller = hung
    notices: list[str] = []
    stop_job(job, notices.append)
    assert supervisor.wait(PATIENCE) == controller.wait(PATIENCE) == -signal.SIGKILL
    assert [n.partition(":")[0].rpartition(" ")[2] for n in notices] == ["answer", "answer"]
    status = read_status(job)
    assert (status.running, status.state.phase) == (False, "failed")
    assert "didn't answer to `insitu stop` and were killed" in status.state.reason


def test_a_job_that_takes_the_request_and_never_ends_is_killed(
    job: JobPaths, hung: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_requests, "STOP_TIMEOUT", PATIENCE)
    monkeypatch.setattr(job_requests, "END_TIMEOUT", 0.3)
    with Controller(job, reply(ok=True, text="")):
        end_job(job)
    assert hung[0].wait(PATIENCE) == -signal.SIGKILL
