"""What a task writes to `insitu://` while the head is away, and what has become of it once it is back."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_nodes import FileNodes
from recorded_calls import record_calls

from insitu.base.errors import ClusterError, GridError, Unpublished
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.cluster.files import (
    FileClient,
    NameService,
    TaskFileClient,
    names_client,
    publisher,
    task_client,
    waiting_folder,
)
from insitu.cluster.files import client as client_module
from insitu.cluster.files.waiting_changes import WaitingChange
from insitu.grid.shared_files import entries, parse_manifest
from insitu.metadata import Put
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give those who ask for names a clock that continues while they sleep alone."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(names_client, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(names_client, "RETRY_SECONDS", 5.0)
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[FileNodes]:
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c"))) as nodes:
        yield nodes


class Task:
    """A task of a job, whose head goes away and comes back."""

    def __init__(self, lab: FileNodes) -> None:
        self.lab = lab
        self.client: TaskFileClient = lab.connect_task()
        self.publisher = self.client.publisher
        self.publisher.load()
        self.system = InsituFileSystem(home=str(lab.folder))
        self.system.client = self.client

    def leave(self) -> None:
        """Have the head go away."""
        self.lab.headless = set(self.lab.nodes)

    def come_back(self) -> None:
        """Have the head come back, and publish all that waits."""
        self.lab.headless.clear()
        self.lab.losing = set()
        while self.publisher.is_waiting:
            assert self.publisher.advance(raises=True)

    def die(self) -> Task:
        """Have the process be killed, and another one start."""
        folder = self.publisher.folder
        assert folder._lock is None or os.close(folder._lock) is None
        return Task(self.lab)


@pytest.fixture
def task(lab: FileNodes) -> Task:
    return Task(lab)


def open_elsewhere(lab: FileNodes) -> InsituFileSystem:
    """The files as another process sees them."""
    system = InsituFileSystem(home=str(lab.folder))
    system.client = lab.connect()
    return system


def list_manifests(lab: FileNodes) -> set[tuple[str, int]]:
    """The path and size of each file that nodes could name if the head's names were lost."""
    found = set()
    for store in lab.stores.values():
        for key in store.blocks.list_held("v", manifests=True):
            manifest = parse_manifest(store.blocks.get("v", key))
            found.add((manifest.path, manifest.entry.size))
    return found


def list_here(lab: FileNodes) -> list[str]:
    folder = lab.folder / "task"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_written_meanwhile_is_said_once_read_by_the_task_and_published(
    lab: FileNodes, task: Task, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.cluster.client.open_files.BLOCK_BYTES", 100)
    task.system.pipe({"v/old": b"old", "v/log": b"1"})
    task.leave()
    big = os.urandom(1234)
    task.system.pipe("v/deep/big", big)
    with task.system.open("v/log", "ab") as log:
        for number in (2, 3):
            log.write(b"%d" % number)
            log.flush()
    task.system.pipe("v/old", b"new")
    task.system.mv("v/old", "v/moved")
    with pytest.raises(FileNotFoundError):
        task.system.rm("v/old")
    assert task.system.cat("v/deep/big") == big and task.system.cat("v/log") == b"123"
    assert task.system.cat("v/moved") == b"new" and not task.system.exists("v/old")
    assert task.system.isdir("v/deep") and task.system.info("v/log")["size"] == 3
    for unknown in (lambda: task.system.ls("v"), lambda: task.system.exists("v/never")):
        with pytest.raises(ClusterError, match="the head was last heard 9 s ago"):
            unknown()
    with pytest.raises(ClusterError):
        task.system.open("v/only", "xb")
    assert not task.publisher.advance()
    said = capsys.readouterr().err
    assert said.count("Training continues") == 1 and str(lab.folder / "task") in said
    other = open_elsewhere(lab)
    lab.headless.clear()
    assert other.find("v") == ["v/log", "v/old"]
    task.come_back()
    assert other.find("v") == ["v/deep/big", "v/log", "v/moved"] == task.system.find("v")
    assert other.cat("v/deep/big") == big and other.cat("v/log") == b"123" and other.cat("v/moved") == b"new"
    assert "Published what waited" in capsys.readouterr().err
    assert list_manifests(lab) >= {("deep/big", 1234), ("log", 3), ("old", 3)}, "what is lost can be rebuilt"
    task.publisher.finish(1.0)
    assert not (lab.folder / "task").exists()
    lab.repair("v")
    assert other.cat("v/deep/big") == big


def test_what_another_thread_changes_while_the_head_is_asked_in_vain_counts(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took longer than a look may take until then, and ended the training."""
    task.leave()
    monkeypatch.setattr(task_client, "CLIENT_SECONDS", -1.0)
    look = FileClient.look

    def look_late(self: FileClient, volume: str, path: str) -> Any:
        if not task.publisher.count():
            task.publisher.add(WaitingChange("folder", "v", "d/e", 0.0))
        return look(self, volume, path)

    monkeypatch.setattr(FileClient, "look", look_late)
    assert task.system.isdir("v/d")


def test_a_file_that_was_begun_before_is_whole_and_one_that_ends_afterwards(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.cluster.client.open_files.BLOCK_BYTES", 10)
    monkeypatch.setattr(client_module, "BLOCKS_A_LIST", 50)
    data = os.urandom(2005)
    for first, then, last in ((True, False, False), (True, True, False), (False, True, True)):
        with task.system.open("v/x", "wb") as file:
            file.write(data[:1000])
            for part, comes in ((data[1000:1500], then), (data[1500:], last)):
                if first != comes:
                    (task.come_back if comes and first is False else task.leave)()
                file.write(part)
            task.leave() if not last else task.come_back()
        assert task.system.cat("v/x") == data
        task.come_back()
        assert open_elsewhere(lab).cat("v/x") == data
        task.system.rm("v/x")
    assert not [name for name in list_here(lab) if name.startswith("blocks")]


def test_a_change_whose_answer_was_lost_is_made_once(lab: FileNodes, task: Task) -> None:
    task.system.pipe({"v/x": b"0", "v/log": b"0"})
    log = task.system.open("v/log", "ab")
    for kind, change in (
        ("publish", lambda: task.system.pipe("v/x", b"1")),
        ("publish", lambda: log.write(b"1") and log.flush()),
        ("rename", lambda: task.system.mv("v/x", "v/y")),
    ):
        assert task.publisher.count() == 0
        lab.losing = {kind}
        change()
        lab.losing = set()
        assert task.publisher.count() == 1
        if kind == "publish":
            task.come_back()
    # The rename was made. Another process puts a file there, which isn't moved again.
    open_elsewhere(lab).pipe("v/x", b"other")
    task.come_back()
    other = open_elsewhere(lab)
    assert other.cat("v/x") == b"other" and other.cat("v/y") == b"1" and other.cat("v/log") == b"01"


def test_a_head_that_knows_no_names_until_they_are_put_back_is_waited_for(lab: FileNodes, task: Task) -> None:
    """It has replaced one that was lost, while the training continued."""
    task.system.pipe({"v/x": b"0", "v/log": b"0"})

    def refuse() -> None:
        raise GridError("The names were lost with the head of before")

    service, lab.service = lab.service, NameService(lab.metadata, refuse)
    task.system.pipe("v/x", b"1")
    with task.system.open("v/log", "ab") as log:
        log.write(b"1")
    assert task.system.cat("v/x") == b"1" and task.publisher.count() == 2
    assert not task.publisher.advance()
    lab.service = service
    task.come_back()
    other = open_elsewhere(lab)
    assert other.cat("v/x") == b"1" and other.cat("v/log") == b"01"


def test_the_names_of_blocks_are_on_the_disk_before_the_change_that_names_them(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    record_calls(monkeypatch, waiting_folder, done, "write_synced", "sync_folder", "replace_file")
    task.leave()
    task.system.pipe("v/x", b"1")
    folders = [each.removeprefix("sync_folder ") for each in done if each.startswith("sync_folder")]
    assert folders[: folders.index("blocks")] == ["task", lab.folder.name], "the way to them"
    *_, block, sync, change = done
    assert block.startswith("write_synced ") and sync == "sync_folder blocks"
    assert change == "replace_file 0000000001.json"


@pytest.mark.parametrize("kind", ["publish", "rename", "remove"])
@pytest.mark.parametrize("is_newer", [False, True])
def test_a_change_that_the_head_has_forgotten_is_not_made_again_over_something_newer(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch, kind: str, is_newer: bool
) -> None:
    """Its answer was lost, and the head away for longer than it remembers the ids of changes."""
    monkeypatch.setattr(publisher, "_REMEMBERED_SECONDS", 0.0)
    task.system.pipe("v/x", b"0")
    changes = {
        "publish": lambda: task.system.pipe("v/x", b"1"),
        "rename": lambda: task.system.mv("v/x", "v/y"),
        "remove": lambda: task.system.rm("v/x"),
    }
    lab.losing = {kind}
    changes[kind]()
    assert task.publisher.count() == 1, "its answer was lost"
    lab.losing = set()
    lab.metadata._made.clear()
    other = open_elsewhere(lab)
    if is_newer:
        other.pipe("v/x", b"other")
    task.come_back()
    expected = {"publish": {"v/x": b"1"}, "rename": {"v/y": b"0"}, "remove": {}}[kind]
    if is_newer:
        expected |= {"v/x": b"other"}
    assert {path: other.cat(path) for path in other.find("v")} == expected
    assert list_here(lab) == ["lock"], "nothing is set aside as refused"


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_appended_comes_once_also_if_the_head_has_forgotten_the_change(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Another writer has written its block again, so keys don't tell."""
    monkeypatch.setattr(publisher, "_REMEMBERED_SECONDS", 0.0)
    task.system.pipe("v/log", b"0")
    log = task.system.open("v/log", "ab")
    lab.losing = {"publish"}
    with monkeypatch.context() as patch:
        if is_lost:  # the question, not the answer
            patch.setattr(lab.service, "answer", lambda *_: {"lost": "no answer"})
        log.write(b"1")
        log.flush()
    lab.losing = set()
    log.write(b"2")
    log.flush()
    with open_elsewhere(lab).open("v/log", "ab") as other:
        other.write(b"x" * (300 << 10))
    lab.metadata._made.clear()
    task.come_back()
    found = open_elsewhere(lab).cat("v/log")
    assert found.replace(b"x", b"") == b"012" and len(found) == 3 + (300 << 10)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_is_appended_comes_once_also_if_the_names_were_put_back(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The head was replaced within minutes: names are as they were, with other versions, and no id is
    known."""
    task.system.pipe("v/log", b"0")
    log = task.system.open("v/log", "ab")
    lab.losing = {"publish"}
    with monkeypatch.context() as patch:
        if is_lost:  # the question, not the answer
            patch.setattr(lab.service, "answer", lambda *_: {"lost": "no answer"})
        log.write(b"1")
        log.flush()
    lab.metadata._made.clear()
    puts = [Put(each.key, each.value) for each in lab.metadata.range("files/")[0]]
    lab.metadata.transact([], puts, "0" * 32)
    task.come_back()
    assert open_elsewhere(lab).cat("v/log") == b"01"


def test_checkpoints_that_wait_take_the_room_of_those_that_are_kept(lab: FileNodes, task: Task) -> None:
    import numpy as np

    store = CheckpointStore(lab.folder, 0, key=b"k" * 32)
    from insitu.train.checkpoint.store import _RemoteFolder

    store._folder = _RemoteFolder(task.system, "ckpt/run/fit-00000")

    def save(step: int) -> None:
        store.save(Checkpoint(0, step, {"w": np.full(3, step, np.float32)}))

    for step in range(3):
        save(step)
    task.leave()
    for step in range(3, 14):
        save(step)
        task.system.pipe("ckpt/model", b"%d" % step)
        with task.system.open("ckpt/log", "ab") as log:
            log.write(b"%d," % step)
    blocks = [name for name in list_here(lab) if name.startswith("blocks")]
    assert len(blocks) == 2 * 2 + 1 + 1
    task.come_back()
    assert store.positions() == [(0, 12), (0, 13)]
    store._folder = _RemoteFolder(open_elsewhere(lab), "ckpt/run/fit-00000")
    found = store.load_latest()
    assert found is not None and found.values["w"].tolist() == [13.0] * 3
    assert open_elsewhere(lab).cat("ckpt/log") == b"".join(b"%d," % step for step in range(3, 14))
    save(14)
    assert store.positions() == [(0, 13), (0, 14)]


def test_the_next_process_publishes_what_a_killed_one_has_left_but_over_nothing_newer(
    lab: FileNodes, task: Task, capsys: pytest.CaptureFixture[str]
) -> None:
    task.system.pipe({"v/a": b"0", "v/d/x": b"0", "v/e/x": b"0"})
    task.leave()
    task.system.pipe({"v/a": b"1", "v/b": b"1"})
    task.system.rm("v/d", recursive=True)
    task.system.rm("v/e", recursive=True)
    unfinished = task.system.open("v/c", "wb")
    unfinished.write(b"c" * entries.BLOCK_BYTES)
    lab.headless.clear()
    other = open_elsewhere(lab)
    other.pipe({"v/a": b"2", "v/d/y": b"2"})
    task = task.die()
    assert task.publisher.count() == 4 and task.system.cat("v/b") == b"1"
    task.come_back()
    assert other.find("v") == ["v/a", "v/b", "v/d/x", "v/d/y"]
    assert other.cat("v/a") == b"2" and other.cat("v/b") == b"1"
    assert capsys.readouterr().err.count("was written again since") == 2
    assert list_here(lab) == ["lock"]


def test_a_script_ends_once_all_is_published_or_fails_by_name_and_files_stay(
    lab: FileNodes, task: Task
) -> None:
    task.publisher.finish(0.0)
    task.leave()
    task.system.pipe("v/x", b"1")
    with pytest.raises(Unpublished, match=r"insitu://v/x.*insitu fs publish .*/task") as late:
        task.publisher.finish(0.01)
    assert late.value.is_final
    kept = lab.connect_task(in_thread=True)
    os.close(task.publisher.folder._lock or 0)
    assert kept.publisher.load() == 1
    lab.headless.clear()
    kept.publisher.finish(60.0)
    assert open_elsewhere(lab).cat("v/x") == b"1" and not (lab.folder / "task").exists()


def test_what_the_head_refuses_then_is_said_and_stays_and_what_is_full_is_tried_again(
    lab: FileNodes, task: Task, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task.leave()
    task.system.pipe({"v/a/b": b"1", "v/x": b"2"})
    lab.headless.clear()
    open_elsewhere(lab).pipe("v/a", b"a file")
    full = [True]
    for store in lab.stores.values():
        put = store.blocks.put

        def refuse(volume: str, key: str, data: bytes, put=put) -> None:  # type: ignore[no-untyped-def]
            if full[0] and data == b"2":
                raise OSError(errno.ENOSPC, "the quota is reached")
            put(volume, key, data)

        monkeypatch.setattr(store.blocks, "put", refuse)
    assert task.publisher.advance() and not task.publisher.advance() and not task.publisher.advance()
    said = capsys.readouterr().err
    assert said.count("was refused") == 1 and "0000000001.refused" in said
    assert said.count("the quota is reached") == 1
    full[0] = False
    task.come_back()
    assert open_elsewhere(lab).find("v") == ["v/a", "v/x"]
    assert [name for name in list_here(lab) if "refused" in name]
    task = task.die()
    assert task.publisher.count() == 0 and len(list_here(lab)) == 3


def test_a_full_disk_refuses_what_is_written_and_nothing_of_it_waits(
    lab: FileNodes, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    task.leave()
    task.system.pipe("v/x", b"1")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr("insitu.cluster.files.waiting_folder.replace_file", refuse)
    with pytest.raises(OSError, match="no room"):
        task.system.pipe("v/x", b"2")
    monkeypatch.undo()
    assert task.system.cat("v/x") == b"1" and task.publisher.count() == 1


def test_a_fork_and_another_process_have_no_part_in_it(lab: FileNodes, task: Task) -> None:
    task.leave()
    task.system.pipe("v/x", b"1")
    child = os.fork()
    if child == 0:
        try:
            task.client.look("v", "x")
        except ClusterError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    child = os.fork()
    if child == 0:
        try:
            lab.connect_task().publisher.load()
        except ClusterError as error:
            os._exit(7 if "another one" in error.message else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_what_can_not_be_read_is_named(lab: FileNodes, task: Task) -> None:
    task.leave()
    task.system.pipe("v/x", b"1")
    file = lab.folder / "task" / "0000000001.json"
    for text in ("{", "[]", json.dumps({**json.loads(file.read_text()), "path": "../x"})):
        file.write_text(text)
        with pytest.raises(ClusterError, match=r"0000000001.json, which can't be read.*Remove"):
            lab.connect_task().publisher.load()


NAMES = ("a", "b", "d", "d/a", "d/b", "d/e", "d/e/a")


def act(system: InsituFileSystem, rng: random.Random, drawn: list[str]) -> None:
    """Do something at random."""
    kind = rng.choice(["write", "write", "append", "append", "rename", "remove", "remove all", "make"])
    path, target = f"v/{rng.choice(NAMES)}", f"v/{rng.choice(NAMES)}"
    data = rng.randbytes(rng.choice([0, 3, 30]))
    drawn.append(f"{kind} {path} {target} {data!r}")
    if kind == "write":
        system.pipe(path, data)
    elif kind == "append":
        with system.open(path, "ab") as file:
            file.write(data)
            file.flush()
            file.write(b"!")
    elif kind == "rename":
        system.client.rename("v", path[2:], target[2:])
    elif kind == "make":
        system.makedirs(path, exist_ok=True)
    else:
        system.client.remove("v", path[2:], recursive=kind == "remove all")


def read_tree(system: InsituFileSystem) -> dict[str, object]:
    found = {each.path: each.kind for each in system.client.list_below("v", "")}
    return {
        path: system.cat_file(f"v/{path}") if kind == "file" else "folder" for path, kind in found.items()
    }


@pytest.mark.parametrize("seed", range(25))
def test_a_head_that_goes_and_comes_leaves_the_same_tree_as_one_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for module in ("cluster.client.open_files", "cluster.files.publisher"):
        monkeypatch.setattr(f"insitu.{module}.BLOCK_BYTES", 10)
    monkeypatch.setattr("insitu.cluster.files.publisher._SMALL_BYTES", 5)
    monkeypatch.setattr("insitu.cluster.client.open_files.SMALL_BYTES", 5)
    with (
        contextlib.closing(FileNodes(tmp_path / "1", ("a", "b"))) as lab,
        contextlib.closing(FileNodes(tmp_path / "2", ("a", "b"))) as plain,
    ):
        task, reference = Task(lab), InsituFileSystem(home=str(plain.folder))
        reference.client = plain.client
        drawn: list[str] = []
        for system in (reference, task.system):
            system.pipe("v/begun", b"1")
        for turn in range(6):
            rng = random.Random(100 * seed + turn)
            event = rng.choice(["leave", "leave", "lose", "come", "die", "part"])
            drawn.append(event)
            if event == "leave":
                task.leave()
            elif event == "lose":
                lab.losing = {rng.choice(["publish", "rename", "remove"])}
            elif event == "come":
                task.come_back()
            elif event == "die":
                task = task.die()
            else:
                lab.headless.clear()
                task.publisher.advance()
            for _ in range(rng.randrange(1, 12)):
                state = rng.getstate()
                try:
                    act(reference, rng, [])
                except OSError:
                    continue  # what a script may do wrong
                rng.setstate(state)
                act(task.system, rng, drawn)
            lab.losing = set()
        task.come_back()
        assert read_tree(open_elsewhere(lab)) == read_tree(reference), "\n".join(drawn)
        assert set(list_here(lab)) <= {"lock"}
