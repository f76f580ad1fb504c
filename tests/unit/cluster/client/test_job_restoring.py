"""A job's way from its machine to a copy on a host, and from there to another machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_runs import Insitu
from recorded_calls import record_calls

from insitu.base.errors import ClusterError, GridError, InputError, UnknownJob
from insitu.base.paths import JobPaths, Paths
from insitu.base.spec import NodeId
from insitu.cluster import submit
from insitu.cluster.client import job_restoring, submission
from insitu.cluster.client.job_restoring import find_or_restore_job, list_copied_jobs
from insitu.cluster.decide import SubmittedEvent, advance
from insitu.cluster.files import View
from insitu.cluster.job_backup import sender, store
from insitu.cluster.job_backup.reader import CopyReader
from insitu.cluster.job_backup.sender import JobCopying
from insitu.cluster.job_backup.store import (
    JobCopyFolder,
    describe_copies,
    drop_old_copies,
    list_copies,
)
from insitu.cluster.job_files import Journal, read_environment
from insitu.cluster.leases.job_terms import read_term
from insitu.cluster.nodes.agent import answer_about_copies
from insitu.cluster.wire.records import change_head
from insitu.options import JobOptions


class Link:
    """A connection to a host that keeps a copy in a home of its own."""

    shares_folder = False
    is_near = False
    is_lost = False
    unsent_bytes = 0
    heard = 1e9

    def __init__(self, name: str, home: Path, job_id: str) -> None:
        self.node = NodeId(name)
        self.paths = Paths(home)
        self.copy_failed = ""
        self.folder = JobCopyFolder(self.paths, job_id)
        self.parts: list[str] = []

    def tell(self, message: dict[str, Any]) -> None:
        found = json.loads(json.dumps(message))
        assert found.pop("do") == "copy"
        self.parts.append(found["of"])
        self.folder.take(found)


class Hosts:
    """What answers for the homes of hosts, as their agents would."""

    def __init__(self, *links: Link) -> None:
        self._paths = {link.node: link.paths for link in links}
        self.view = View(dict.fromkeys(self._paths), len(links))

    def find(self, node: NodeId, view: View) -> Hosts:
        self._asked = node
        return self

    def act(self, kind: str, fields: dict[str, Any], payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
        answer, data = answer_about_copies(self._paths[self._asked], kind, fields)
        return json.loads(json.dumps(answer)), data

    def close(self) -> None: ...


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPaths:
    """A job whose supervisor does nothing, with what tasks could have written."""
    insitu = Insitu(tmp_path / "own")
    insitu.script("print('hello')")
    monkeypatch.setattr(submission, "start_supervisor", lambda job, lock: None)
    monkeypatch.setattr(sender, "LOOK_SECONDS", 0.0)
    found = insitu.job(
        submit(insitu.paths, JobOptions("data/train", insitu.folder, ("train.py",), workers=1))
    )
    write(found.checkpoints / "fit-00000" / "state.json", "1")
    write(found.ledger / "epoch-00000.shard-00000.json", "{}")
    return found


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def send(copying: JobCopying, *links: Link) -> None:
    """Have the supervisor look for changes, until it has sent all."""
    for _ in range(3):
        copying.advance(links)


@pytest.fixture
def copying(job: JobPaths, monkeypatch: pytest.MonkeyPatch) -> JobCopying:
    clock = iter(range(1_000_000))
    monkeypatch.setattr(sender.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(sender, "LOOK_SECONDS", 0.5)
    return JobCopying(job)


def begin(job: JobPaths) -> None:
    """Record one more event."""
    journal = Journal(job.journal)
    state, actions = advance(journal.state(), SubmittedEvent(), 1.0)
    journal.record(1.0, SubmittedEvent(), actions, state)


def test_a_copy_follows_the_job_and_has_neither_the_secret_of_its_tasks_nor_its_logs(
    job: JobPaths, copying: JobCopying, tmp_path: Path
) -> None:
    links = [Link(name, tmp_path / name, job.root.name) for name in "abc"]
    send(copying, *links)
    first, second, third = (link.paths.job_copy(job.root.name) for link in links)
    assert describe_copies(links[0].paths) == [[job.root.name, 0, 1]]
    assert not third.root.exists()  # two are enough
    begin(job)
    write(job.checkpoints / "fit-00000" / "state.json", "22")
    (job.ledger / "epoch-00000.shard-00000.json").unlink()
    before = links[0].parts.count("journal")
    send(copying, *links)
    for copy in (first, second):
        assert Journal(copy.journal).state() == Journal(job.journal).state()
        assert (copy.checkpoints / "fit-00000" / "state.json").read_text() == "22"
        assert list(copy.ledger.glob("*")) == [] and copy.root.stat().st_mode & 0o777 == 0o700
        assert not copy.secret.exists() and not copy.output.exists()
        for private in (copy.signing_secret, copy.environment):
            assert private.stat().st_mode & 0o777 == 0o600
        assert read_environment(copy) == read_environment(job)
    assert links[0].parts.count("journal") == before + 1  # entries are sent once
    links[0].is_lost = True
    send(copying, *links)
    assert Journal(third.journal).state() == Journal(job.journal).state()
    links[1].folder.remove()
    assert list_copies(links[1].paths) == []


def test_a_copy_on_the_machine_of_the_job_is_the_last_choice(
    job: JobPaths, copying: JobCopying, tmp_path: Path
) -> None:
    links = [Link(name, tmp_path / name, job.root.name) for name in "abc"]
    links[0].is_near = True
    send(copying, *links)
    assert [len(list_copies(link.paths)) for link in links] == [0, 1, 1]


def test_a_copy_that_is_begun_again_takes_the_place_of_the_old_one_when_it_is_whole(
    job: JobPaths, copying: JobCopying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link("a", tmp_path / "a", job.root.name)
    send(copying, link)
    copy = link.paths.job_copy(job.root.name)
    write(copy.checkpoints / "stale", "")
    again = JobCopyFolder(link.paths, job.root.name)
    files = {"spec": job.spec, "placement": job.placement, "environment": job.environment}
    texts = {name: file.read_text() for name, file in files.items()}
    again.take({"of": "begin", **texts, "term": [0, ""]})
    assert describe_copies(link.paths) == [[job.root.name, 0, 1]]  # the old one, whatever comes now
    # The new one is on the disk before the old one's name is given to it, and the old one goes last.
    steps: list[str] = []
    record_calls(monkeypatch, store, steps, "sync_tree", "replace_folder", "sync_folder")
    record_calls(monkeypatch, store.shutil, steps, "rmtree")
    again.take({"of": "whole"})
    name = job.root.name
    assert steps == [
        f"sync_tree .{name}",
        f"replace_folder .{name}",
        f"sync_folder {copy.root.parent.name}",
        f"rmtree .{name}",
    ]
    assert not (copy.checkpoints / "stale").exists()
    again.drop()
    assert copy.root.exists()


@pytest.mark.parametrize(
    "message",
    [
        {"of": "whole"},
        {"of": "file", "file": "../x", "start": 0, "part": "", "last": True},
        {"of": "file", "file": "secret", "start": 0, "part": "", "last": True},
        {"of": "journal", "rows": [[1, 0.0, "{}", "[]"]]},
        {"of": "journal", "rows": [[5, 0.0, "{}", "[]", "{}"]]},
        {"of": "nothing"},
    ],
)
def test_what_is_no_part_of_a_copy_is_refused(job: JobPaths, tmp_path: Path, message: dict[str, Any]) -> None:
    folder = JobCopyFolder(Paths(tmp_path / "a"), job.root.name)
    if message["of"] != "whole":
        folder.take({"of": "begin", "spec": "{}", "placement": "{}", "environment": "{}", "term": None})
    with pytest.raises(ClusterError):
        folder.take(message)


def test_a_failure_of_this_machine_is_tried_again_from_the_beginning(
    job: JobPaths, copying: JobCopying, tmp_path: Path
) -> None:
    hidden = job.spec.with_name("hidden")
    job.spec.rename(hidden)
    link = Link("a", tmp_path / "a", job.root.name)
    send(copying, link)
    assert list_copies(link.paths) == []
    hidden.rename(job.spec)
    for _ in range(5):
        send(copying, link)
    assert describe_copies(link.paths) == [[job.root.name, 0, 1]]


@pytest.fixture
def head(tmp_path: Path) -> Paths:
    """The home of a head on another machine."""
    paths = Paths(tmp_path / "head")
    change_head(paths)
    return paths


def use(monkeypatch: pytest.MonkeyPatch, *links: Link) -> Hosts:
    hosts = Hosts(*links)

    @contextlib.contextmanager
    def open_reader(paths: Paths) -> Iterator[CopyReader]:
        yield CopyReader(hosts, hosts.view)  # type: ignore[arg-type]

    monkeypatch.setattr(job_restoring, "open_copy_reader", open_reader)
    return hosts


def test_a_job_is_brought_from_the_newest_copy_in_a_new_term_with_another_secret(
    job: JobPaths, copying: JobCopying, tmp_path: Path, head: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (Link(name, tmp_path / name, job.root.name) for name in "ab")
    send(copying, old, new)
    begin(job)
    old.is_lost = True
    send(copying, old, new)
    use(monkeypatch, old, new)
    assert list_copied_jobs(head) == [job.root.name]
    said: list[str] = []
    brought = find_or_restore_job(head, job.root.name[:8], said.append)
    assert (
        said == [f"{job.root.name} was brought from the copy on b"]
        and brought.root == head.job(job.root.name).root
    )
    assert Journal(brought.journal).state() == Journal(job.journal).state()
    assert (brought.code / "train.py").read_text() == "print('hello')"
    assert (brought.checkpoints / "fit-00000" / "state.json").read_text() == "1"
    assert brought.secret.stat().st_mode & 0o777 == 0o600
    assert len(brought.secret.read_bytes()) == 32 and brought.secret.read_bytes() != job.secret.read_bytes()
    assert brought.signing_secret.read_bytes() == job.secret.read_bytes()  # as checkpoints were signed
    assert brought.signing_secret.stat().st_mode & 0o777 == 0o600
    term = read_term(brought.term)
    assert term.number == 1 and term.instance
    assert list_copied_jobs(head) == [] and not brought.code_archive.exists()
    assert find_or_restore_job(head, job.root.name) == brought  # it is here now


def test_a_job_that_has_gone_on_elsewhere_is_brought_again(
    job: JobPaths, copying: JobCopying, tmp_path: Path, head: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder here is that of a supervisor before."""
    link = Link("a", tmp_path / "a", job.root.name)
    use(monkeypatch, link)
    send(copying, link)
    stale = find_or_restore_job(head, job.root.name)
    (stale.root / "stale").touch()
    (head.home / "metadata.json").touch()  # the metadata is in etcd
    begin(job)
    send(copying, link)
    monkeypatch.setattr(job_restoring, "is_outdated", lambda job: True)
    brought = find_or_restore_job(head, job.root.name)
    assert Journal(brought.journal).state() == Journal(job.journal).state()
    assert brought == stale and not (stale.root / "stale").exists()


def test_what_no_host_has_is_an_unknown_job(
    job: JobPaths, copying: JobCopying, tmp_path: Path, head: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link("a", tmp_path / "a", job.root.name)
    use(monkeypatch, link)
    with pytest.raises(UnknownJob, match="No job's id is or begins with"):
        find_or_restore_job(head, job.root.name)
    send(copying, link)
    with pytest.raises(UnknownJob, match="No job's id is or begins with 'other'"):
        find_or_restore_job(head, "other")
    with pytest.raises(UnknownJob):  # not the home of a head
        find_or_restore_job(Paths(tmp_path / "elsewhere"), job.root.name)


def test_a_copy_that_cannot_be_used_leaves_nothing_here(
    job: JobPaths, copying: JobCopying, tmp_path: Path, head: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link("a", tmp_path / "a", job.root.name)
    send(copying, link)
    link.paths.job_copy(job.root.name).placement.write_text("{")
    use(monkeypatch, link)
    with pytest.raises(ClusterError, match="placement can't be read"):
        find_or_restore_job(head, job.root.name)
    assert list(head.jobs.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("job_copy_files", {}),
        ("job_copy_files", {"job": "../jobs"}),
        ("job_copy_files", {"job": "unknown-job"}),
        ("job_copy_part", {"job": "known", "path": "../secret", "start": 0}),
        ("job_copy_part", {"job": "known", "path": "job.json", "start": -1}),
        ("job_copy_part", {"job": "known", "path": None, "start": 0}),
    ],
)
def test_nothing_but_files_of_copies_is_read(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    paths = Paths(tmp_path)
    write(paths.job_copies / "secret", "s")
    write(paths.job_copy("known").spec, "{}")
    with pytest.raises((InputError, GridError)):
        answer_about_copies(paths, kind, fields)


def test_a_copy_that_nothing_has_come_to_for_long_is_dropped(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    for name in ("old", "new"):
        write(paths.job_copy(name).spec, "{}")
        write(paths.job_term(name), '[0, ""]')
    os.utime(paths.job_copy("old").root, (0, 0))
    drop_old_copies(paths)
    assert sorted(path.name for path in paths.job_copies.iterdir()) == ["new", "new.term"]


def test_a_copy_that_others_may_write_is_not_believed(tmp_path: Path) -> None:
    paths = Paths(tmp_path)
    write(paths.job_copy("job").spec, "{}")
    assert [each.root.name for each in list_copies(paths)] == ["job"]
    paths.job_copy("job").root.chmod(0o777)
    assert list_copies(paths) == []
    with pytest.raises(GridError, match="no copy of job"):
        answer_about_copies(paths, "job_copy_files", {"job": "job"})


@pytest.mark.parametrize("listed", [None, [1], [["/etc/x", 1]], [["../x", 1]], [["x", "1"]], [["", 1]]])
def test_a_host_cannot_have_files_written_elsewhere(tmp_path: Path, listed: Any) -> None:
    class Lying(Hosts):
        def act(self, kind: str, fields: dict[str, Any], payload: bytes = b"") -> Any:
            return {"files": listed}, b"x"

    reader = CopyReader(Lying(), View({NodeId("a"): None}, 1))  # type: ignore[arg-type]
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(ClusterError):
        reader.copy(NodeId("a"), "job", target)
    assert [p.name for p in tmp_path.iterdir()] == ["target"] and list(target.iterdir()) == []
