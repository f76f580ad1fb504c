"""`insitu --url`: commands that a page elsewhere answers, over HTTP."""

from __future__ import annotations

import json
import socket
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import CliRunner, make_command
from job_runs import Insitu

pytest.importorskip("uvicorn")

from insitu.base.errors import ClusterError, InputError, JobEnded, JobSpecError, UnknownCache, UnknownJob
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import TaskId
from insitu.cli.by_url import send_job
from insitu.cli.rest import TOKEN_FILE_ENV, URL_ENV, RestClient, open_client, read_ui_token
from insitu.cluster import Journal, read_spec, submit
from insitu.cluster.client import submission
from insitu.cluster.decide.events import SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.options import JobOptions
from insitu.ui.access import Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.guard import AuditLog
from insitu.ui.imports import Imports
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads


class Elsewhere:
    """A page that serves a home on another machine, as far as the commands know."""

    def __init__(self, url: str, job: JobPaths, uploads: Uploads, tokens: Path) -> None:
        self.url = url
        self.job = job
        self.uploads = uploads
        self.tokens = tokens

    def run(self, *arguments: str, code: int = 0) -> str:
        done = CliRunner().run(["--url", self.url, *arguments])
        assert done.exit_code == code, (done.stdout, done.exception)
        return done.stdout


def end_job(job: JobPaths, code: int) -> None:
    """Note that the only worker of a job has run and ended."""
    journal = Journal(job.journal)
    state = journal.state()
    for at, event in enumerate([SubmittedEvent(), TaskExitedEvent(TaskId("worker", 0), code)], 1):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    insitu = Insitu(tmp_path)
    insitu.script("print('greeting')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1)))
    end_job(job, 0)
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
    record.write_text(json.dumps({role: access.make_bearer(role) for role in ("operate", "view")}))
    monkeypatch.setenv(TOKEN_FILE_ENV, str(record))
    monkeypatch.setenv("INSITU_HOME", str(tmp_path / "nothing-here"))
    yield Elsewhere(url, job, uploads, record)
    server.should_exit = True
    thread.join(60)
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
    with pytest.raises(InputError, match="Received: import with --url"):
        make_command()(["--url", elsewhere.url, "import", "a", "b"], standalone_mode=False)
    # What is about this machine stays here where only the variable points elsewhere.
    monkeypatch.setenv(URL_ENV, elsewhere.url)
    assert "insitu start" in CliRunner().run(["examples"]).stdout
    assert elsewhere.job.root.name in CliRunner().run(["ps", "--all"]).stdout
    assert "Usage" in CliRunner().run(["ps", "--help"]).stdout


def make_folder(root: Path) -> Path:
    folder = root / "my job"
    (folder / "tools").mkdir(parents=True)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").touch()
    (folder / "train.py").write_text("print(1)")
    (folder / "tools" / "run.sh").write_text("true")
    (folder / "tools" / "run.sh").chmod(0o755)
    return folder


def test_a_folder_is_sent_and_its_job_followed_to_the_end(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[JobPaths] = []

    def run_job(job: JobPaths, lock: int) -> None:
        job.output.write_bytes(b"[worker:0] hello\n[insitu] ended\n")
        end_job(job, 7)
        started.append(job)

    monkeypatch.setattr(submission, "start_supervisor", run_job)
    options = ("--workers", "1", "--max-restarts", "0", "--memory-per-worker", "1", "--memory-limit", "512")
    arguments = ("-", str(make_folder(tmp_path)), "train.py", "--seed", "9", "-h")
    assert elsewhere.run("start", *options, *arguments, code=7) == "[worker:0] hello\n"
    (job,) = started
    spec = read_spec(job)
    assert spec.command == ("train.py", "--seed", "9", "-h") and spec.job_id.startswith("my_job-")
    assert (spec.max_restarts, spec.seed, spec.memory_per_worker) == (0, 0, 1)
    assert spec.settings["INSITU_MEMORY_LIMIT"] == "512"
    assert sorted(each.name for each in job.code.iterdir()) == ["tools", "train.py"]
    assert (job.code / "tools" / "run.sh").stat().st_mode & 0o111
    assert not elsewhere.uploads._files


def test_a_zip_is_sent_as_it_is_and_the_job_may_be_left_alone(elsewhere: Elsewhere, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sums.zip", "w") as archive:
        archive.writestr("train.py", "print(1)")
    started = elsewhere.run("start", "--detach", "data/train", str(tmp_path / "sums.zip"), "train.py")
    assert started.startswith("data-train-")
    assert len(elsewhere.run("ps", "--all").splitlines()) == 3  # a header, the fixture's, and this one


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (("nothing", "FOLDER", "train.py"), UnknownCache, "nothing"),
        (("data/train", "MISSING", "train.py"), JobSpecError, "doesn't exist"),
        (("data/train", "BROKEN", "train.py"), JobSpecError, "isn't a .zip"),
        (("--workers", "0", "data/train", "FOLDER", "train.py"), InputError, "workers"),
        (("data/train", "FOLDER", "other.py"), JobSpecError, "other.py"),
    ],
)
def test_a_job_that_can_not_start_leaves_nothing_there(
    elsewhere: Elsewhere, tmp_path: Path, given: tuple[str, ...], error: type[InputError], words: str
) -> None:
    (tmp_path / "broken.zip").write_text("x")
    places = {"FOLDER": make_folder(tmp_path), "MISSING": "/missing", "BROKEN": tmp_path / "broken.zip"}
    with pytest.raises(error, match=words):
        arguments = [str(places.get(each, each)) for each in given]
        make_command()(["--url", elsewhere.url, "start", *arguments], standalone_mode=False)
    assert not elsewhere.uploads._files and len(elsewhere.run("ps", "--all").splitlines()) == 2


def test_who_may_only_view_sends_nothing(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere.tokens.write_text(json.loads(elsewhere.tokens.read_text())["view"])
    monkeypatch.setattr(RestClient, "send", None)
    with pytest.raises(InputError, match=r"role operate. Received: one of the role view"):
        send_job(open_client(elsewhere.url), make_folder(tmp_path), {})


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
