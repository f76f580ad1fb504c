from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.errors import ClusterError
from insitu.cluster.job_backup import folder_copies
from insitu.cluster.job_backup.folder_copies import (
    FolderCopy,
    is_copied,
    list_changes,
    read_parts,
    scan_folder,
)


@pytest.mark.parametrize(
    ("path", "copied"),
    [
        ("checkpoints/fit-00000/epoch-00001.step-00000000/state.json", True),
        ("checkpoints/fit-00000/.staging-1-2/state.json", False),
        ("ledger/epoch-00000.shard-00000.json", True),
        ("ledger/.epoch.json.12.abcdef01", False),
        ("tasks/worker-0/samples.jsonl", True),
        ("tasks/worker-0/progress", False),
        ("tasks/worker-0/failure.json", False),
        ("tasks/worker-0/attempt-1.log", False),
        ("evaluations.jsonl", True),
        ("trainings.jsonl", True),
        ("statistics/00000-0123456789abcdef/00003.npz", True),
        ("statistics/00000-0123456789abcdef/.00003.npz.1", False),
        ("tasks/worker-0/progress/x", False),
        ("tasks/worker-0/attempt-1.log/x", False),
        ("secret", False),
        ("code/train.py", False),
        ("journal.sqlite", False),
    ],
)
def test_what_tasks_write_for_others_is_copied(path: str, copied: bool) -> None:
    assert is_copied(PurePosixPath(path)) is copied


class Pair:
    """A folder and its copy on another host."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "source", folder / "target"
        for root in (self.source, self.target):
            root.mkdir(parents=True)
        self.known: dict[str, folder_copies.Mark] = {}
        self.copy = FolderCopy(self.target)
        self.sent = 0

    def write(self, path: str, data: bytes, *, grow: bool = False) -> None:
        file = self.source / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if grow and file.exists():
            with file.open("ab") as opened:
                opened.write(data)
            return
        fresh = file.with_name(".new")
        fresh.write_bytes(data)
        fresh.replace(file)

    def send(self) -> None:
        found = scan_folder(self.source, self.known)
        changed, gone = list_changes(found, self.known)
        self.known = found
        for path in gone:
            self.copy.remove(path)
        for path, start in changed:
            for message in read_parts(self.source, path, start):
                self.sent += len(message["part"])
                self.copy.take(message)

    def contents(self, root: Path) -> dict[str, bytes]:
        return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


WRITES = st.lists(
    st.tuples(
        st.sampled_from(
            ["ledger/a.json", "checkpoints/x/arrays.bin", "tasks/worker-0/samples.jsonl", "evaluations.jsonl"]
        ),
        st.sampled_from(["write", "grow", "remove", "send"]),
        st.binary(max_size=40),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps=WRITES)
def test_a_copy_follows_whatever_happens(
    steps: list[tuple[str, str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    part, folder_copies.PART_BYTES = folder_copies.PART_BYTES, 16
    try:
        pair = Pair(tmp_path_factory.mktemp("pair"))
        for path, action, data in steps:
            if action == "send":
                pair.send()
            elif action == "remove":
                (pair.source / path).unlink(missing_ok=True)
            else:
                pair.write(path, data, grow=action == "grow" and path.endswith(".jsonl"))
        pair.send()
        assert pair.contents(pair.target) == pair.contents(pair.source)
    finally:
        folder_copies.PART_BYTES = part


def test_a_file_that_grows_is_sent_from_where_it_grew(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("tasks/worker-0/samples.jsonl", b"x" * 9000)
    pair.send()
    before = pair.sent
    pair.write("tasks/worker-0/samples.jsonl", b"line\n", grow=True)
    pair.send()
    assert pair.sent - before < 20 and pair.contents(pair.target) == pair.contents(pair.source)


@pytest.mark.parametrize("again", [b"other", b"other and longer"])
def test_a_file_that_begins_anew_on_the_same_inode_is_sent_whole(again: bytes, tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("evaluations.jsonl", b"lines")
    pair.send()
    file = pair.source / "evaluations.jsonl"
    times = file.stat()
    file.write_bytes(again)  # in place, as where a number of an inode is used again
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    pair.send()
    assert pair.contents(pair.target) == {"evaluations.jsonl": again}


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.write("ledger/a.json", b"old")
    pair.send()
    first = {"file": "ledger/a.json", "start": 0, "part": "bmV3", "last": False}
    pair.copy.take(first)
    assert (pair.target / "ledger/a.json").read_bytes() == b"old"
    pair.copy.take({"file": "ledger/a.json", "start": 3, "part": "", "last": False, "dropped": True})
    assert pair.contents(pair.target) == {"ledger/a.json": b"old"}


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "code/train.py", "secret", "ledger/../secret", 7, None, "ledger/a\0b", ""]
)
def test_nothing_is_written_elsewhere(path: object, tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path)
    with pytest.raises(ClusterError):
        copy.take({"file": path, "start": 0, "part": "", "last": True})
    with pytest.raises(ClusterError):
        copy.remove(path)
    assert os.listdir(tmp_path) == []


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "kept").write_text("kept")
    copy = FolderCopy(tmp_path / "out")
    (tmp_path / "out" / "evaluations.jsonl").symlink_to(tmp_path / "kept")
    with pytest.raises(OSError, match=r"symbolic links"):
        copy.take({"file": "evaluations.jsonl", "start": 4, "part": "bmV3", "last": True})
    copy.take({"file": "evaluations.jsonl", "start": 0, "part": "bmV3", "last": True})
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "out" / "evaluations.jsonl").read_text() == "new"


def test_nothing_is_written_through_a_link_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "export").mkdir(parents=True)
    (tmp_path / "out" / "export" / "x").symlink_to(tmp_path / "elsewhere")
    copy = FolderCopy(tmp_path / "out")
    for path in ("export/x/a", "export/x/y/a"):
        with pytest.raises(ClusterError, match="through a link"):
            copy.take({"file": path, "start": 0, "part": "bmV3", "last": True})
        with pytest.raises(ClusterError, match="through a link"):
            copy.remove(path)
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_follows_a_part_that_could_not_be_written_makes_no_file_with_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros stood in the place of what a full disk hadn't taken, in a file that counted as whole."""
    monkeypatch.setattr(folder_copies, "PART_BYTES", 4)
    pair = Pair(tmp_path)
    pair.write("export/model.keras", b"aaaabbbbcc")
    write, starts = folder_copies._write_at, []

    def fail_once(path: Path, start: int, data: bytes, **options: bool) -> None:
        starts.append(start)
        if starts == [0, 4]:
            raise OSError(28, "No space left on device")
        write(path, start, data, **options)

    monkeypatch.setattr(folder_copies, "_write_at", fail_once)
    first, second, third = read_parts(pair.source, "export/model.keras")
    pair.copy.take(first)
    for part in (second, third):
        with pytest.raises(OSError):
            pair.copy.take(part)
        assert pair.contents(pair.target) == {}
    pair.send()
    assert pair.contents(pair.target) == pair.contents(pair.source)


def test_a_file_that_grows_has_no_hole(tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path)
    part = {"file": "evaluations.jsonl", "start": 4, "part": "bmV3", "last": True}
    with pytest.raises(OSError, match="No such file"):
        copy.take(part)
    (tmp_path / "evaluations.jsonl").write_bytes(b"abc")
    with pytest.raises(OSError, match="isn't here"):
        copy.take(part)
    assert (tmp_path / "evaluations.jsonl").read_bytes() == b"abc"


@pytest.mark.parametrize("path", ["checkpoints/arrays.bin", "evaluations.jsonl"])
def test_one_byte_makes_no_file_of_terabytes(path: str, tmp_path: Path) -> None:
    copy = FolderCopy(tmp_path)
    with pytest.raises(OSError):
        copy.take({"file": path, "start": 1 << 43, "part": "bmV3", "last": True})
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    os.mkfifo(tmp_path / "export" / "pipe")
    (tmp_path / "export" / "model").write_bytes(b"new")
    (tmp_path / "export" / "latest").symlink_to("model")
    found = scan_folder(tmp_path, {})
    assert found.keys() == {"export/model", "export/latest"}
    assert found["export/latest"] == found["export/model"]  # as it is when the link's target changes


def test_what_a_host_deletes_then_is_synced_before_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    synced, sync = list[str](), os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        named = path.relative_to(pair.target)
        synced.append(f"{named}:{path.stat().st_size}" if path.is_file() else str(named))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    pair.write("checkpoints/fit-00000/epoch-00001/state.json", b"x" * 70)
    pair.send()
    *folders, file, last = synced
    assert folders == ["checkpoints/fit-00000", "checkpoints", "."]
    # The file before its name: it is there whole, or not at all.
    assert file.startswith("checkpoints/fit-00000/epoch-00001/.state.json.") and file.endswith(":70")
    assert last == "checkpoints/fit-00000/epoch-00001"
    synced.clear()
    pair.write("trainings.jsonl", b"1\n")
    pair.send()
    pair.write("trainings.jsonl", b"2\n", grow=True)
    pair.send()
    assert synced[-1] == "trainings.jsonl:4"
    for name in ("ledger/fit-00000/epoch-00000.json", "export/model/saved_model.pb", "evaluations.jsonl"):
        synced.clear()
        pair.write(name, b"1")
        pair.send()
        *_, file, last = synced
        assert file.startswith(str(Path(name).parent / f".{Path(name).name}.")) or file == f"{name}:1"
        assert last == str(Path(name).parent)
    synced.clear()
    pair.write("tasks/worker-0/samples.jsonl", b"1\n")
    pair.write("statistics/00000-0123456789abcdef/00003.npz", b"1")
    pair.send()
    assert synced == []
    assert pair.contents(pair.target) == pair.contents(pair.source)
