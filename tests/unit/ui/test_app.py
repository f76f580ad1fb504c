"""The REST interface and the page, and what attackers try on both."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asgi_client import HOST, ORIGIN, Client
from job_runs import Insitu

pytest.importorskip("fastapi")

from insitu.base.measure.task_samples import Sample, SampleWriter
from insitu.base.paths import JobPaths
from insitu.base.spec import TaskId
from insitu.cluster import Journal, submit
from insitu.cluster.client import job_requests, submission
from insitu.cluster.control import finalize_job
from insitu.cluster.decide.events import SubmittedEvent, TaskExitedEvent
from insitu.cluster.decide.job import advance
from insitu.cluster.job_files import read_environment, take_lock, write_environment
from insitu.grid import ShardLedger
from insitu.options import ImportOptions, JobOptions, options_at
from insitu.ui import events, guard
from insitu.ui.access import IDLE_SECONDS, Access
from insitu.ui.app import make_application
from insitu.ui.boards import Boards
from insitu.ui.forms import StartForm, read_fields
from insitu.ui.guard import AuditLog
from insitu.ui.pages import read_clone
from insitu.ui.started_commands import StartedCommands
from insitu.ui.state import UIState
from insitu.ui.uploads import Uploads

COOKIE = "insitu-session-8780"


class Server:
    """An application on a home of its own, with clients of either role."""

    def __init__(self, insitu: Insitu) -> None:
        self.insitu = insitu
        self.access = Access()
        self.uploads = Uploads()
        self.audit = insitu.paths.ui_audit(0)
        self.state = UIState(
            paths=insitu.paths,
            access=self.access,
            cookie=COOKIE,
            secure=False,
            url=ORIGIN,
            uploads=self.uploads,
            commands=StartedCommands(insitu.environment),
            boards=Boards(insitu.environment),
        )
        self.app = make_application(self.state, AuditLog(self.audit), frozenset({ORIGIN}))
        self.operator = Client(self.app, bearer=self.access.make_bearer("operate"))
        self.viewer = Client(self.app, bearer=self.access.make_bearer("view"))
        self.stranger = Client(self.app)

    def browser(self, role: str = "operate") -> Client:
        """A browser that has signed in."""
        link = self.access.make_link(role, time.monotonic())  # type: ignore[arg-type]
        answer = self.stranger.submit("/login", {"token": link})
        assert answer.status == 303
        cookie = (answer.header("set-cookie") or "").partition(";")[0]
        return Client(self.app, cookie=cookie)

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    insitu = Insitu(tmp_path)
    insitu.script("print('hello')")
    monkeypatch.setenv("INSITU_HOME", str(insitu.paths.home))
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    made = Server(insitu)
    yield made
    made.uploads.close()


def make_job(server: Server, *, ended: bool = True) -> JobPaths:
    """A job whose only worker was killed and then ended well."""
    insitu = server.insitu
    job = insitu.job(submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1)))
    journal = Journal(job.journal)
    state = journal.state()
    given = [SubmittedEvent(), TaskExitedEvent(TaskId("worker", 0), -9, progress=(1, 4))]
    for at, event in enumerate(given if ended else given[:1], 1):
        state, actions = advance(state, event, float(at))
        journal.record(float(at), event, actions, state)
    return job


def test_rows_fed_are_those_of_the_ledger_or_of_all_processes(server: Server) -> None:
    job = make_job(server)
    worker = TaskId("worker", 0)
    writer = SampleWriter(job.samples(worker))
    for attempt, rows in ((1, 50), (1, 1200), (2, 34)):  # the first one was killed
        writer.write(Sample(float(attempt), attempt, 0.0, rows=rows))
    assert "<dt>Rows fed</dt><dd>1,234</dd>" in server.viewer.get(f"/jobs/{job.root.name}").text
    for epoch in range(3):
        ledger = ShardLedger(epoch, 0)
        ledger.add(0, np.arange(700))
        ledger.publish(job)
    again = server.viewer.get(f"/jobs/{job.root.name}?search=hello").text  # no page of a moment ago
    assert "<dt>Rows fed</dt><dd>2,100</dd>" in again


def test_jobs_caches_and_nodes_are_those_of_the_command_line(server: Server) -> None:
    job = make_job(server)
    (listed,) = server.viewer.get("/api/v1/jobs").json()
    assert listed["job_id"] == job.root.name and listed["cache"] == "data/train"
    described = server.viewer.get(f"/api/v1/jobs/{job.root.name[:8]}?ledger=true&events=true").json()
    assert described["kind"] == "job" and described["events"] and described["ledger"] == []
    assert server.viewer.get(f"/api/v1/jobs/{job.root.name}/curve").json() == []
    assert "wall" in server.viewer.get(f"/api/v1/jobs/{job.root.name}?goodput=true").json()["goodput"]
    assert [c["name"] for c in server.viewer.get("/api/v1/caches").json()] == ["data/train"]
    assert server.viewer.get("/api/v1/caches/data/train").json()["kind"] == "cache"
    assert server.viewer.get("/api/v1/nodes").json()[0]["node"] == "node-0"
    assert server.viewer.get("/api/v1/session").json()["role"] == "view"


def test_pages_of_jobs_are_counted(server: Server) -> None:
    for _ in range(3):
        make_job(server)
    answer = server.viewer.get("/api/v1/jobs?limit=2&offset=1")
    assert len(answer.json()) == 2 and answer.header("x-total-count") == "3"
    assert server.viewer.get("/api/v1/jobs?state=nothing").json() == []


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/api/v1/jobs/nothing", 404, "UnknownJob"),
        ("/api/v1/caches/nothing", 404, "UnknownCache"),
        ("/api/v1/previews/nothing", 404, "UnknownCache"),
        ("/api/v1/imports/nothing", 404, "HTTPException"),
        ("/api/v1/jobs?limit=0", 422, "Invalid"),
        ("/api/v1/nothing", 404, "HTTPException"),
    ],
)
def test_errors_have_one_form(server: Server, path: str, status: int, kind: str) -> None:
    answer = server.viewer.get(path)
    assert (answer.status, answer.json()["error"]["kind"]) == (status, kind)
    assert answer.json()["error"]["message"]


def start_form(server: Server, **more: Any) -> dict[str, Any]:
    return {"cache": "data/train", "job_dir": str(server.insitu.folder), "command": ["train.py"], **more}


def test_a_job_is_started_as_by_the_command_line(server: Server) -> None:
    answer = server.operator.post("/api/v1/jobs", start_form(server, workers=2, seed=7))
    assert answer.status == 201
    spec = server.viewer.get(f"/api/v1/jobs/{answer.json()['job_id']}").json()
    assert (spec["workers"], spec["seed"]) == (2, 7)
    assert answer.json()["command_line"].startswith("insitu start --detach --workers 2 --seed 7 data/train ")
    entry = server.audited()[-1]
    assert entry["job"] == answer.json()["job_id"] and entry["status"] == 201 and entry["role"] == "operate"


def test_what_is_wrong_is_said_before_the_start(server: Server) -> None:
    given = start_form(server, cache="nothing", command=["missing.py"])
    checked = server.operator.post("/api/v1/jobs/check", given).json()
    assert len(checked["problems"]) == 2 and "missing.py" in checked["problems"][1]
    assert server.operator.post("/api/v1/jobs", start_form(server, surprise=1)).status == 422
    assert server.operator.post("/api/v1/jobs", start_form(server, upload="0" * 32)).status == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus_per_worker": 64},
        {"ps_backups": 3},
        {"workers": 2, "shards": 1},
        {"workers": 99},
        {"name": "a b"},
        {"command": ["missing.py"]},
        {"command": ["python", "missing.py"]},
        {"cores_per_worker": 1000},
    ],
)
def test_a_check_says_what_the_start_refuses(server: Server, wrong: dict[str, Any]) -> None:
    refused = server.operator.post("/api/v1/jobs", start_form(server, **wrong))
    assert refused.status == 400
    checked = server.operator.post("/api/v1/jobs/check", start_form(server, **wrong)).json()
    assert checked["problems"] == [refused.json()["error"]["message"]]
    sent = upload(server, zipped(**{"other.py": ""})).json()
    form = {"upload": sent["upload"], "command": ["train.py"]}
    (problem,) = server.operator.post("/api/v1/jobs/check", form).json()["problems"]
    assert "no script 'train.py'" in problem


def zipped(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def upload(server: Server, data: bytes, name: str = "job.zip") -> Any:
    return server.operator.post(f"/api/v1/uploads?name={name}", data)


def test_a_job_is_started_from_a_zip_that_was_sent(server: Server) -> None:
    sent = upload(server, zipped(**{"train.py": "print(1)"})).json()
    form = {"cache": "data/train", "upload": sent["upload"], "command": ["train.py"], "workers": 1}
    answer = server.operator.post("/api/v1/jobs", form)
    assert answer.status == 201
    code = server.insitu.job(answer.json()["job_id"]).code
    assert (code / "train.py").read_text() == "print(1)"
    assert server.operator.post("/api/v1/jobs", form).status == 400  # an upload is used once


@pytest.mark.parametrize("name", ["../../evil.py", "/tmp/evil.py", "a\\..\\evil.py"])
def test_a_zip_whose_entries_land_outside_is_refused(server: Server, name: str) -> None:
    sent = upload(server, zipped(**{"train.py": "", name: "x"})).json()
    form = {"cache": "data/train", "upload": sent["upload"], "command": ["train.py"]}
    answer = server.operator.post("/api/v1/jobs", form)
    assert answer.status == 400 and answer.json()["error"]["kind"] == "JobSpecError"
    assert server.viewer.get("/api/v1/jobs").json() == []


def test_an_upload_is_removed_when_asked_and_a_job_of_too_many_bytes_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = upload(server, zipped(**{"train.py": "print(1)"})).json()["upload"]
    form = {"cache": "data/train", "upload": token, "command": ["train.py"]}
    monkeypatch.setattr("insitu.ui.actions.MAX_ZIP", 10)
    assert "0 MiB at most" in server.operator.post("/api/v1/jobs", form).json()["error"]["message"]
    assert server.viewer.delete(f"/api/v1/uploads/{token}").status == 403
    assert server.operator.delete(f"/api/v1/uploads/{token}").json() == {"upload": token}
    assert server.operator.delete(f"/api/v1/uploads/{token}").status == 400
    assert server.operator.delete("/api/v1/uploads/x").status == 422


def test_memory_that_is_not_there_is_said_before_the_start(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "read_available_bytes", lambda: 100 << 20)
    form = {"cache": "data/train", "job_dir": str(server.insitu.folder), "command": ["train.py"]}
    for each, said in ((50, 0), (51, 1)):
        asked = {**form, "workers": 2, "memory_per_worker": each}
        found = server.operator.post("/api/v1/jobs/check", asked).json()
        assert len(found["problems"]) == said
        assert f"--memory-per-worker {each}" in found["command_line"]


@pytest.mark.parametrize("name", ["..", "%2e%2e%2f", "", "..."])
def test_an_upload_needs_a_name_that_is_safe(server: Server, name: str) -> None:
    assert upload(server, b"x", name).status in (400, 422)


def test_uploads_lie_in_their_folder_whatever_they_are_called(server: Server) -> None:
    sent = upload(server, b"x", "..%2f..%2fetc%2fpasswd").json()
    path = server.uploads.find(sent["upload"])
    assert path.name == "passwd" and path.parent.name == sent["upload"]
    assert path.parent.stat().st_mode & 0o077 == 0


def test_bodies_are_bounded_whatever_length_they_announce(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = b'{"cache": "' + b"a" * guard.MAX_BODY + b'"}'
    headers = {"content-type": "application/json"}
    assert server.operator.call("POST", "/api/v1/jobs", big, headers=headers, chunks=9).status == 413
    for length in (str(guard.MAX_BODY + 1), "-1", "1e9", "9" * 30):
        answer = server.operator.post("/api/v1/jobs", {}, content_length=length)
        assert answer.status == 413
    assert server.stranger.submit("/login", {"token": "a" * 20_000}).status == 413


def test_strangers_get_nothing(server: Server) -> None:
    for path in ("/api/v1/jobs", "/api/v1/openapi.json", "/api/v1/nodes", "/live/jobs"):
        assert server.stranger.get(path).status == 401
    page = server.stranger.get("/data", accept="text/html")
    assert page.status == 303 and page.header("location") == "/login"
    assert Client(server.app, bearer="wrong").get("/api/v1/jobs").status == 401
    assert Client(server.app, cookie=f"{COOKIE}=wrong").get("/").status == 401


def test_who_may_view_changes_nothing_through_any_route(server: Server) -> None:
    described = server.viewer.get("/api/v1/openapi.json").json()
    changing = [
        (method.upper(), path.replace("{job_id}", "x"))
        for path, methods in described["paths"].items()
        for method in methods
        if method != "get"
    ]
    assert len(changing) >= 8
    for method, path in changing:
        assert server.viewer.call(method, path, headers={}).status == 403, path
    browser = server.browser("view")
    for path in (
        "/start",
        "/import",
        "/jobs/x/stop",
        "/jobs/x/resume",
        "/jobs/x/scale",
        "/jobs/x/tensorboard",
        "/start/preview",
    ):
        assert browser.submit(path, {}).status == 403


def test_reading_changes_nothing(server: Server) -> None:
    """Each GET leaves the home as it was."""
    make_job(server)
    described = server.viewer.get("/api/v1/openapi.json").json()
    home = server.insitu.paths.home

    def state() -> dict[str, int]:
        return {str(p): p.stat().st_mtime_ns for p in home.rglob("*") if p.is_file()}

    before = state()
    for path, methods in described["paths"].items():
        if "get" in methods and not path.endswith("/live"):
            server.operator.get(path.replace("{job_id}", "train").replace("{name}", "data/train"))
    browser = server.browser()
    for path in (
        "/",
        "/data",
        "/data/data/train",
        "/nodes",
        "/start",
        "/start?clone=train",
        "/login?token=x",
    ):
        browser.get(path)
    changed = {path for path in state() if state()[path] != before.get(path)}
    assert changed <= {str(server.audit)}


def test_another_site_cannot_act_with_the_cookie_of_a_browser(server: Server) -> None:
    browser = server.browser()
    job = make_job(server).root.name
    for headers in (
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": ORIGIN, "sec_fetch_site": "cross-site"},
    ):
        assert browser.submit(f"/jobs/{job}/stop", {}, **headers).status == 403
        assert browser.post("/api/v1/links", {"role": "operate"}, **headers).status == 403
    plain = {"content-type": "text/plain"}
    assert browser.call("POST", "/api/v1/links", b'{"role": "operate"}', headers=plain).status == 401
    assert server.stranger.submit("/login", {"token": "x"}, origin="http://evil.example").status == 403


def test_a_name_that_was_rebound_to_this_address_is_refused(server: Server) -> None:
    browser = server.browser()
    assert browser.get("/", host="evil.example:8780").status == 421
    assert server.operator.get("/api/v1/jobs", host="evil.example").status == 421


def test_the_cookie_is_for_this_page_alone(server: Server) -> None:
    link = server.access.make_link("view", time.monotonic())
    answer = server.stranger.submit("/login", {"token": link})
    flags = (answer.header("set-cookie") or "").lower()
    assert all(flag in flags for flag in ("httponly", "samesite=strict", "path=/")) and "domain" not in flags
    again = server.stranger.submit("/login", {"token": link})
    assert again.status == 403 and again.header("set-cookie") is None
    assert link not in server.audit.read_text() and link not in again.text


def test_opening_the_link_uses_nothing_up(server: Server) -> None:
    link = server.access.make_link("view", time.monotonic())
    for _ in range(3):
        shown = server.stranger.get(f"/login?token={link}")
        assert shown.status == 200 and shown.header("set-cookie") is None
    assert server.stranger.submit("/login", {"token": link}).status == 303


def test_a_session_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = server.browser()
    assert browser.get("/").status == 200
    assert browser.submit("/logout", {}).status == 303
    assert browser.get("/").status == 401


def test_every_answer_forbids_scripts_frames_and_guessing(server: Server) -> None:
    browser = server.browser()
    for answer in (
        browser.get("/"),
        browser.get("/nothing"),
        browser.get("/api/v1/jobs/nothing"),
        server.stranger.get("/"),
        server.stranger.get("/static/style.css"),
        server.stranger.get("/", host="evil.example"),
    ):
        policy = answer.header("content-security-policy") or ""
        assert (
            "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        )
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("access-control-allow-origin") is None
    assert browser.get("/").header("cache-control") == "no-store"


def test_pages_hold_no_script_and_no_style_that_the_policy_would_stop(server: Server) -> None:
    job = make_job(server).root.name
    browser = server.browser()
    for path in (
        "/",
        "/data",
        "/nodes",
        "/start",
        f"/jobs/{job}",
        f"/start?clone={job}",
        "/login",
        f"/compare?job={job}",
    ):
        page = browser.get(path)
        assert page.status == 200, path
        assert not re.search(
            r"<script(?! src=\"/static/)|<style| style=| on\w+=|javascript:|https?://", page.text
        )


def test_logs_and_names_are_text(server: Server) -> None:
    job = make_job(server)
    attack = b"[worker:0] \x1b]0;evil\x07\x1b[2J<script>alert(1)</script> \xe2\x80\xae \x9b31m \xff\n"
    job.output.write_bytes(attack)
    (line,) = server.viewer.get(f"/api/v1/jobs/{job.root.name}/logs").json()["lines"]
    assert line["source"] == "worker:0" and "<script>alert(1)</script>" in line["text"]
    assert line["text"].isprintable() and "evil" not in line["text"]
    page = server.browser().get(f"/jobs/{job.root.name}").text
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "\x1b" not in page
    shown = server.browser().get("/?find=%22%3E%3Cscript%3Ealert(2)%3C/script%3E").text
    assert "<script>alert" not in shown


@pytest.mark.parametrize(
    "path",
    [
        "checkpoints/../secret",
        "checkpoints/..%2fsecret",
        "../../catalog.sqlite",
        "secret",
        "/etc/passwd",
        "checkpoints//etc/passwd",
        "checkpoints/link",
        "code/train.py",
        "code/model.keras",
        "checkpoints/folder/secret",
        "checkpoints",
        "checkpoints/%00",
        "",
    ],
)
def test_no_path_leads_out_of_the_files_of_a_job(server: Server, path: str) -> None:
    job = make_job(server)
    (job.checkpoints / "link").symlink_to(job.secret)
    (job.checkpoints / "folder").symlink_to(job.root)
    (job.code / "model.keras").symlink_to(job.secret)
    answer = server.operator.get(f"/api/v1/jobs/{job.root.name}/artifacts/{path}")
    assert answer.status in (400, 404)
    assert job.secret.read_bytes() not in answer.body


def test_checkpoints_can_be_taken_away(server: Server) -> None:
    job = make_job(server)
    (job.checkpoints / "a").mkdir()
    (job.checkpoints / "a" / "state.json").write_text("{}")
    (job.code / "model.keras").write_text("")
    listed, model = server.viewer.get(f"/api/v1/jobs/{job.root.name}/artifacts").json()
    assert listed["path"] == "checkpoints/a/state.json" and model["path"] == "code/model.keras"
    answer = server.viewer.get(f"/api/v1/jobs/{job.root.name}/artifacts/{listed['path']}")
    assert answer.body == b"{}" and "attachment" in (answer.header("content-disposition") or "")


@pytest.mark.parametrize("job_id", ["..", "%2e%2e", "..%2f..", "a%00", "~root", "*"])
def test_no_job_is_found_outside_the_jobs(server: Server, job_id: str) -> None:
    make_job(server)
    assert server.operator.get(f"/api/v1/jobs/{job_id}").status in (400, 404)
    assert server.browser().get(f"/jobs/{job_id}").status in (400, 404)


def test_each_change_has_a_line_in_the_audit_log_also_one_that_was_refused(server: Server) -> None:
    before = len(server.audited()) if server.audit.exists() else 0
    server.viewer.post("/api/v1/jobs", {})
    server.operator.post("/api/v1/links", {"role": "view"})
    server.stranger.post("/api/v1/jobs\n%0a", {})
    entries = server.audited()[before:]
    assert [entry["status"] for entry in entries] == [403, 201, 401]
    assert entries[1]["link"] == "view" and all(entry["client"] for entry in entries)
    assert server.audit.stat().st_mode & 0o077 == 0


def test_a_link_that_is_made_signs_in_with_its_role(server: Server) -> None:
    url = server.operator.post("/api/v1/links", {"role": "view"}).json()["url"]
    assert url.startswith(f"http://{HOST}/login?token=")
    assert server.stranger.submit("/login", {"token": url.partition("=")[2]}).status == 303


def test_import_options_are_no_way_into_the_command_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(cache: str, sources: Any, options: Any, done: Any) -> dict[str, Any]:
        started.append([*options, "--", cache, *sources])
        return {"command_line": ""}

    monkeypatch.setattr(server.state.commands, "start_import", start)
    given = {"cache": "a", "sources": ["--overwrite", "-x"], "key": "--json", "split": "a=1"}
    assert server.operator.post("/api/v1/imports", given).status == 202
    assert started == [["--key=--json", "--split", "a=1.0", "--", "a", "--overwrite", "-x"]]
    for bad in ({"cache": "--help", "sources": ["x"]}, {"cache": "a", "sources": []}):
        assert server.operator.post("/api/v1/imports", bad).status in (400, 422)
    for source in ("http://169.254.169.254/x.csv", "s3://bucket/x", "file:///etc/passwd"):
        answer = server.operator.post("/api/v1/imports", {"cache": "a", "sources": [source]})
        assert answer.status == 400


def test_changes_are_pushed_until_the_session_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(server, ended=False)
    monkeypatch.setattr(events, "INTERVAL", 0.01)
    link = server.access.make_link("view", time.monotonic())
    signed = server.access.sign_in(link, time.monotonic())
    assert signed is not None
    session = server.access._sessions
    browser = Client(server.app, cookie=f"{COOKIE}={signed[0]}")

    async def follow() -> bytes:
        from asgi_client import call

        task = asyncio.create_task(
            call(
                server.app,
                "GET",
                f"/live/jobs/{job.root.name}",
                [("host", HOST), ("cookie", str(browser.cookie))],
                b"",
                1,
            )
        )
        await asyncio.sleep(0)
        job.output.write_text("[worker:0] pushed\n")
        for key, value in list(session.items()):
            session[key] = type(value)(value.role, value.name, value.ends, time.monotonic() + 1.5)
        return (await asyncio.wait_for(task, 60)).body

    body = asyncio.run(follow()).decode()
    names = re.findall(r"^event: (\w+)$", body, re.M)
    assert {"head", "tasks", "log", "history"} <= set(names) and "pushed" in body
    assert IDLE_SECONDS > 60 and server.state.streams == 0


def test_a_line_of_data_begins_no_other_event() -> None:
    encoded = events.encode_event("log", "a\nevent: evil\r\rdata: x\r\n\r\nb").decode()
    assert encoded.count("event: ") == 2 and encoded.splitlines()[0] == "event: log"
    assert all(line.startswith("data: ") for line in encoded.splitlines()[1:-1])


def test_a_form_starts_a_job_and_shows_what_is_wrong(server: Server) -> None:
    browser = server.browser()
    fields = {"cache": "data/train", "job_dir": str(server.insitu.folder), "command": "train.py --x 'a b'"}
    shown = browser.submit("/start/preview", fields).text
    assert "insitu start --detach data/train" in shown and "&#39;a b&#39;" in shown
    wrong = browser.submit("/start", fields | {"workers": "0"})
    assert wrong.status == 400 and "workers: " in wrong.text
    done = browser.submit("/start", fields | {"workers": "1", "chief": "on"})
    assert done.status == 303
    (job,) = server.viewer.get("/api/v1/jobs").json()
    assert done.header("location") == f"/jobs/{job['job_id']}"
    assert job["command"] == ["train.py", "--x", "a b"] and job["tasks"]["chief"] == 1
    clone = browser.get(f"/start?clone={job['job_id']}").text
    assert "train.py --x &#39;a b&#39;" in clone


WORKED_OUT = ("workers", "shards", "threads", "name", "engine")
"""Options whose default depends on the cache and the machine, and is kept with a job."""


def test_a_job_like_another_has_its_options(server: Server) -> None:
    more = {"virtual_devices": "cpu:2", "on_rebalance": "stay", "cores_per_worker": 1, "standby": 2}
    started = server.operator.post(
        "/api/v1/jobs", start_form(server, **more, nodes=["node-0"], workers=1)
    ).json()
    job = server.insitu.job(started["job_id"])
    fields = read_clone(server.insitu.paths, started["job_id"])
    assert {name: fields[name] for name in more} == {name: str(value) for name, value in more.items()}
    assert fields["nodes"] == "node-0"
    filled = StartForm.model_validate(read_fields(JobOptions, fields))
    assert filled.to_options(job.code).virtual_devices == ("cpu", 2)
    options = JobOptions(
        "data/train",
        server.insitu.folder,
        ("train.py",),
        virtual_devices=("cpu", 2),
        log_placement=True,
        soft_placement=False,
        on_rebalance="stay",
        allow_mixed_processors=True,
        evaluator=True,
        evaluator_grace=9.0,
    )
    cloned = submit(server.insitu.paths, options)
    assert 'value="cpu:2"' in (shown := server.browser().get(f"/start?clone={cloned}").text)
    assert "<option selected>stay</option>" in shown
    again = StartForm.model_validate(read_fields(JobOptions, read_clone(server.insitu.paths, cloned)))
    like = again.to_options(server.insitu.folder)
    assert like == replace(options, **{name: getattr(like, name) for name in WORKED_OUT})


def test_the_forms_show_each_option(server: Server) -> None:
    browser = server.browser()
    for path, declaration in (("/start", JobOptions), ("/data", ImportOptions)):
        shown = re.findall(r' name="([\w.]+)"', browser.get(path).text)
        named = {name.partition(".")[0] for name in shown}
        assert {each.name for each in options_at(declaration, "form")} <= named
        assert len(shown) == len(set(shown))


def test_a_button_of_a_page_whose_session_has_ended_leads_to_the_sign_in(server: Server) -> None:
    page = {"accept": "text/html", "origin": ORIGIN, "content-type": "application/x-www-form-urlencoded"}
    answer = server.stranger.call("POST", "/jobs/any/stop", b"", headers=page)
    assert answer.status == 303 and answer.header("location") == "/login"
    assert server.stranger.call("POST", "/api/v1/jobs", b"{}", headers=page).status == 401


def test_a_job_that_has_ended_cannot_be_stopped_or_scaled(server: Server) -> None:
    job = make_job(server).root.name
    assert server.operator.post(f"/api/v1/jobs/{job}/stop", {}).status == 409
    assert server.browser().submit(f"/jobs/{job}/scale", {"workers": "x"}).status == 400
    page = server.browser().submit(f"/jobs/{job}/stop", {})
    assert page.status == 409 and "has ended already" in page.text


def test_a_job_that_runs_cannot_be_resumed(server: Server) -> None:
    job = make_job(server)
    lock = take_lock(job.controller)
    try:
        answer = server.operator.post(f"/api/v1/jobs/{job.root.name}/resume", {})
        page = server.browser().submit(f"/jobs/{job.root.name}/resume", {})
    finally:
        os.close(lock)
    assert answer.status == 409 and answer.json()["error"]["kind"] == "JobRunning"
    assert page.status == 409 and "is running" in page.text


def test_a_job_that_is_resumed_is_given_its_secrets(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(server)
    finalize_job(job)
    write_environment(job, replace(read_environment(job), variables={"RATE": "0.1375"}, secrets=("A_TOKEN",)))
    started: list[Any] = []
    monkeypatch.setattr(job_requests, "start_supervisor", lambda job, lock, shell: started.append(shell))
    path = f"/api/v1/jobs/{job.root.name}/resume"
    lacks = server.operator.post(path, {})
    assert lacks.status == 400 and "a shell without A_TOKEN" in lacks.text
    assert server.operator.post(path, {"env": {"A_TOKEN": 1}}).status == 422
    done = server.operator.post(path, {"env": {"A_TOKEN": "geheim"}})
    assert done.status == 202 and "A_TOKEN" in done.json()["notices"][0]
    assert started[0]["A_TOKEN"] == "geheim"
    shown = server.operator.get(f"/api/v1/jobs/{job.root.name}?events=true").text
    shown += server.browser().get(f"/jobs/{job.root.name}").text
    for value in ("geheim", "0.1375"):
        assert value not in shown and value not in server.audit.read_text()


def test_the_form_is_filled_in_by_an_example_and_names_what_it_lacks(server: Server) -> None:
    browser = server.browser()
    shown = browser.get("/start?example=quickdraw").text
    assert 'value="train.py --epochs 3"' in shown and "examples/quickdraw" in shown
    assert "Import it first" in shown and 'href="/data?example=quickdraw#import"' in shown
    data = browser.get("/data?example=quickdraw").text
    assert 'value="quickdraw"' in data and 'value="train=0.9,test=0.1"' in data and "checked" in data
    assert "Import it first" not in browser.get("/start?example=stripes").text
    assert browser.get("/start?example=nothing").status == 400
    names = [each["name"] for each in server.viewer.get("/api/v1/examples").json()]
    assert "quickdraw" in names


def test_nodes_and_memory_are_options_of_a_start(server: Server) -> None:
    fields = {"cache": "data/train", "job_dir": str(server.insitu.folder), "command": "train.py"}
    fields |= {"nodes": "node-0, node-0", "memory_limit": "512", "workers": "1"}
    started = server.browser().submit("/start", fields)
    assert started.status == 303
    job = (started.header("location") or "").rpartition("/")[2]
    spec = server.viewer.get(f"/api/v1/jobs/{job}").json()
    assert spec["settings"]["INSITU_MEMORY_LIMIT"] == "512"
    assert (
        'name="memory_limit" type="number" min="1" placeholder="all" value="512"'
        in server.browser().get(f"/start?clone={job}").text
    )
    checked = server.operator.post(
        "/api/v1/jobs/check", start_form(server, nodes=["moon"], workers=99)
    ).json()
    assert len(checked["problems"]) == 1 and "moon" in checked["problems"][0]
    refused = server.operator.post("/api/v1/jobs", start_form(server, nodes=["moon"]))
    assert refused.status == 400 and "Received: moon" in refused.json()["error"]["message"]


def test_files_of_one_upload_are_imported_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    token = upload(server, b"a", "cat.npy").json()["upload"]
    path = f"/api/v1/uploads?name=dog.npy&upload={token}"
    assert server.operator.post(path, b"b").json()["upload"] == token
    assert server.operator.post(path, b"b").status == 400  # the same name again
    assert len(server.uploads.list_files(token)) == 2
    assert server.operator.post(f"/api/v1/uploads?name=x.npy&upload={'0' * 32}", b"b").status == 400
    given: list[list[str]] = []
    monkeypatch.setattr(
        server.state.commands,
        "start_import",
        lambda cache, sources, options, done: given.append(sources) or {"command_line": ""},
    )
    assert server.operator.post("/api/v1/imports", {"cache": "pets", "upload": token}).status == 202
    assert [Path(source).name for source in given[0]] == ["cat.npy", "dog.npy"]


def test_statistics_of_columns_are_a_fragment_and_json(server: Server, tmp_path: Path) -> None:
    import numpy as np

    from insitu.grid import import_cache

    np.savez(tmp_path / "rows.npz", x=np.arange(40.0), label=np.arange(40) % 2)
    import_cache(server.insitu.paths, "rows", [str(tmp_path / "rows.npz")], partitions=2)
    found = server.viewer.get("/api/v1/statistics/rows").json()
    assert found["rows"] == 40 and found["columns"][0]["maximum"] == 39.0
    page = server.browser("view")
    assert 'hx-get="/statistics/rows?version=1"' in page.get("/data/rows").text
    shown = page.get("/statistics/rows?version=1").text
    assert "Of all 40 rows" in shown and "histogram" in shown and "0 50%" in shown
    assert server.viewer.get("/api/v1/statistics/nothing").status == 404


def test_a_method_that_a_path_lacks_is_answered_with_those_that_it_has(server: Server) -> None:
    for method in ("PUT", "OPTIONS"):
        answer = server.operator.call(method, "/api/v1/nodes", headers={})
        assert (answer.status, answer.header("allow")) == (405, "GET"), method
        assert answer.json()["error"]["message"]
    assert server.stranger.call("OPTIONS", "/api/v1/nodes", headers={}).status == 401
