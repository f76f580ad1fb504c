"""`insitu --url`: commands that a page elsewhere answers, over HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu
from typer.testing import CliRunner

pytest.importorskip("uvicorn")

from insitu.cli import build_app
from insitu.cli.rest import TOKEN_FILE_ENV, URL_ENV, RestClient, open_client, read_ui_token
from insitu.cluster import Journal, Request, submit
from insitu.cluster.client import submission
from insitu.cluster.decide.events import SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.errors import ClusterError, InputError, JobEnded, UnknownJob
from insitu.paths import JobPaths, Paths
from insitu.spec import TaskId
from insitu.ui.access import Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.guard import AuditLog
from insitu.ui.imports import Imports
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads


class Elsewhere:
    """A page that serves a home on another machine, as far as the commands know."""

    def __init__(self, url: str, job: JobPaths) -> None:
        self.url = url
        self.job = job

    def run(self, *arguments: str, code: int = 0) -> str:
        app: Any = build_app()
        done = CliRunner().invoke(app, ["--url", self.url, *arguments])
        assert done.exit_code == code, (done.stdout, done.exception)
        return done.stdout


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    job = insitu.job(submit(insitu.paths, Request("data/train", insitu.folder, ("train.py",), workers=1)))
    journal = Journal(job.journal)
    state = journal.state()
    for at, event in enumerate([SubmittedEvent(), TaskExitedEvent(TaskId("worker", 0), 0)], 1):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    job.output.write_bytes(b"".join(b"[worker:0] line %d \x1b[31m\n" % number for number in range(5000)))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    access, uploads = Access(), Uploads()
    state_of_page = UIState(
        paths=insitu.paths,
        access=access,
        cookie="insitu",
        secure=False,
        url=url,
        uploads=uploads,
        imports=Imports({}),
        boards=Boards({}),
    )
    app = make_application(state_of_page, AuditLog(tmp_path / "audit"), frozenset({url}))
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    record = tmp_path / "ui.json"
    record.write_text(json.dumps({"operate": access.make_bearer("operate"), "view": "x"}))
    monkeypatch.setenv(TOKEN_FILE_ENV, str(record))
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "nothing-here"))
    yield Elsewhere(url, job)
    server.should_exit = True
    thread.join(20)
    listening.close()
    uploads.close()


def test_jobs_caches_and_nodes_are_those_of_the_page(elsewhere: Elsewhere) -> None:
    name = elsewhere.job.root.name
    assert elsewhere.run("ps", "--all").splitlines()[1].startswith(name) and name not in elsewhere.run("ps")
    assert json.loads(elsewhere.run("ps", "--all", "--json"))[0]["job_id"] == name
    said = elsewhere.run("describe", name, "--goodput", "--events")
    assert "State:       finished" in said and "TaskExited" in said
    assert "data/train" in elsewhere.run("caches")
    assert "node-0" in elsewhere.run("describe", "data/train") and "node-0" in elsewhere.run("nodes")
    assert json.loads(elsewhere.run("describe", "data/train", "--json"))["kind"] == "cache"


def test_a_log_comes_as_a_whole_without_what_a_terminal_obeys(elsewhere: Elsewhere) -> None:
    lines = elsewhere.run("logs", elsewhere.job.root.name, "--follow").splitlines()
    assert len(lines) == 5000 and lines[0] == "[worker:0] line 0 " and lines[-1] == "[worker:0] line 4999 "


def test_errors_are_those_of_the_command_line(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    client = open_client(elsewhere.url)
    with pytest.raises(JobEnded):
        client.post("jobs", elsewhere.job.root.name, "stop")
    with pytest.raises(UnknownJob):
        client.get("jobs", "nothing")
    with pytest.raises(InputError, match=TOKEN_FILE_ENV):
        RestClient(elsewhere.url, "wrong").get("jobs")
    with pytest.raises(InputError, match="Received: start with --url"):
        build_app()(["--url", elsewhere.url, "start", "-", "a", "b"], standalone_mode=False)  # type: ignore[operator]
    # What is about this machine stays here where only the variable points elsewhere.
    monkeypatch.setenv(URL_ENV, elsewhere.url)
    app: Any = build_app()
    assert "insitu start" in CliRunner().invoke(app, ["examples"]).stdout
    assert elsewhere.job.root.name in CliRunner().invoke(app, ["ps", "--all"]).stdout
    assert "Usage" in CliRunner().invoke(app, ["ps", "--help"]).stdout


def test_an_address_must_keep_the_token_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE_ENV, raising=False)
    for url in (
        "http://grid-1:8780",
        "ftp://127.0.0.1",
        "https://",
        "https://a:b@c",
        "https://a:99999",
        "https://a/b",
    ):
        with pytest.raises(InputError, match="Received: "):
            open_client(url)
    with pytest.raises(InputError, match=f"no .{TOKEN_FILE_ENV}"):
        open_client("https://grid-1:8780")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match="doesn't answer"):
        RestClient(f"http://127.0.0.1:{port}", "t").get("jobs")


@pytest.mark.parametrize("text", ["", "{}", "{", "two words", '{"operate": "a b"}', "\x00"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(InputError, match=TOKEN_FILE_ENV):
        read_ui_token(tmp_path / "token")
    with pytest.raises(InputError, match=TOKEN_FILE_ENV):
        read_ui_token(tmp_path / "missing")


def test_the_token_with_more_rights_is_taken(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("abc\n")
    assert read_ui_token(tmp_path / "token") == "abc"
    (tmp_path / "token").write_text('{"view": "v", "operate": "o"}')
    assert read_ui_token(tmp_path / "token") == "o"
    assert Paths(tmp_path).home == tmp_path
