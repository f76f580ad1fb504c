"""Checkpoints: whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

from insitu.base.disk import checkpoints as base
from insitu.base.disk.signatures import sign
from insitu.base.errors import CheckpointError, ClusterError, StorageFull
from insitu.train.checkpoint import store as module
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore


def a_checkpoint(epoch: int = 1, step: int = 2, value: float = 0.5) -> Checkpoint:
    import ml_dtypes

    values = {
        "trainable/0": np.full((2, 3), value, "float32"),
        "seeds/0": np.array([7, 2**40], "int64"),
        "first/0": np.array(True),
        "mean/0": np.full((3,), value, ml_dtypes.bfloat16),
    }
    return Checkpoint(epoch, step, values, {"memory": {0: {"best": value}}, "list": [1, (2, None)]})


def test_what_was_saved_is_loaded(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0)
    saved = a_checkpoint()
    store.save(saved)
    loaded = store.load_latest()
    assert (loaded.epoch, loaded.step, loaded.more) == (1, 2, saved.more)
    for name, value in saved.values.items():
        assert loaded.values[name].dtype == value.dtype
        assert loaded.values[name].shape == value.shape
        assert loaded.values[name].tobytes() == value.tobytes()


def test_fits_have_checkpoints_of_their_own(tmp_path: Path):
    CheckpointStore(tmp_path, fit=0).save(a_checkpoint())
    assert CheckpointStore(tmp_path, fit=1).load_latest() is None


def test_the_newest_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0, keep=2)
    for epoch, step in ((0, 100), (0, 20), (1, 0), (10, 0)):
        store.save(a_checkpoint(epoch, step))
    names = sorted(p.name for p in (tmp_path / "fit-00000").iterdir())
    assert names == ["epoch-00001.step-00000000", "epoch-00010.step-00000000"]
    with pytest.raises(CheckpointError, match="keep must be at least 1"):
        CheckpointStore(tmp_path, fit=0, keep=0)


@pytest.mark.parametrize(
    "damage",
    [
        "flip",
        "truncate",
        "longer",
        "other state",
        "no state",
        "half a state",
        "not signed",
        "of before",
        "nested",
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture):
    store = CheckpointStore(tmp_path, fit=0)
    store.save(a_checkpoint(1, 0, value=1.0))
    newest = Path(store.save(a_checkpoint(2, 0, value=2.0)))
    arrays, state = newest / "arrays.bin", newest / "state.json"
    if damage == "flip":
        data = bytearray(arrays.read_bytes())
        data[len(data) // 2] ^= 1
        arrays.write_bytes(data)
    elif damage == "truncate":
        arrays.write_bytes(arrays.read_bytes()[:-9])
    elif damage == "longer":
        arrays.write_bytes(arrays.read_bytes() + b"0")
    elif damage == "other state":
        state.write_text(state.read_text().replace('\\"epoch\\": 2', '\\"epoch\\": 3'))
        assert "3" in state.read_text()
    elif damage == "not signed":
        state.write_text(json.loads(state.read_text())["state"])
    elif damage == "of before":
        text = json.dumps({**json.loads(json.loads(state.read_text())["state"]), "format": 3})
        state.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "state": text}))
    elif damage == "nested":
        state.write_text("[" * 100_000)
    elif damage == "no state":
        state.unlink()
    else:
        state.write_text(state.read_text()[:20])
    loaded = store.load_latest()
    assert loaded.epoch == 1
    assert loaded.values["trainable/0"][0, 0] == 1.0
    assert str(newest) in caplog.text


def test_damaged_ones_are_not_kept_in_the_place_of_fresh_ones(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0, keep=2)
    for epoch in (7, 8):
        (Path(store.save(a_checkpoint(epoch, 0))) / "state.json").write_text("{}")
    assert store.load_latest() is None
    # Training has begun anew, and comes past none of them for a long time.
    store.save(a_checkpoint(1, 0))
    assert [p.name for p in (tmp_path / "fit-00000").iterdir()] == ["epoch-00001.step-00000000"]
    assert store.load_latest().epoch == 1


def test_one_of_another_version_is_passed_over_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as newer:
        newer.setattr(module, "FORMAT", module.FORMAT + 1)
        CheckpointStore(tmp_path, fit=0).save(a_checkpoint(40, 0))
    store = CheckpointStore(tmp_path, fit=0)
    assert store.load_latest() is None
    store.save(a_checkpoint(1, 0))
    assert store.positions() == [(1, 0), (40, 0)]


def test_a_full_disk_leaves_the_last_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = CheckpointStore(tmp_path, fit=0)
    store.save(a_checkpoint(1, 0))

    def full(path: Path, pages: object, size: int) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write_pages", full)
    with pytest.raises(StorageFull, match="last published one stays"):
        store.save(a_checkpoint(2, 0))
    assert [p.name for p in (tmp_path / "fit-00000").iterdir()] == ["epoch-00001.step-00000000"]
    assert store.load_latest().epoch == 1


def test_what_a_killed_writer_left_is_invisible_and_goes(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0)
    left = tmp_path / "fit-00000" / ".staging-12345"
    left.mkdir(parents=True)
    (left / "state.json").write_text(json.dumps({"epoch": 9}))
    assert store.load_latest() is None
    store.save(a_checkpoint())
    assert not left.exists()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_any_file_system_holds_checkpoints(tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture):
    import fsspec

    store = CheckpointStore(f"{scheme}://{tmp_path}/run", fit=3, keep=2)
    assert store.load_latest() is None
    for epoch in (1, 2, 3):
        store.save(a_checkpoint(epoch, 0, value=epoch))
    loaded = CheckpointStore(f"{scheme}://{tmp_path}/run", fit=3).load_latest()
    assert loaded.epoch == 3
    assert loaded.values["trainable/0"][0, 0] == 3
    system, root = fsspec.core.url_to_fs(f"{scheme}://{tmp_path}/run/fit-00003")
    assert len(system.ls(root)) == 2
    # One that is half there isn't there; one that is damaged is named and passed over.
    system.makedirs(f"{root}/epoch-00009.step-00000000", exist_ok=True)
    system.pipe_file(f"{root}/epoch-00009.step-00000000/arrays.bin", b"half")
    path = f"{root}/epoch-00003.step-00000000/arrays.bin"
    data = bytearray(system.cat_file(path))
    data[3] ^= 4
    system.pipe_file(path, bytes(data))
    assert store.load_latest().epoch == 2
    assert "damaged" in caplog.text


def test_a_place_that_nobody_knows_is_refused():
    with pytest.raises(CheckpointError, match="nowhere"):
        CheckpointStore("nowhere://bucket/run", fit=0)


def test_a_fit_that_failed_may_still_write_while_the_next_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    failed, following = CheckpointStore(tmp_path, fit=0), CheckpointStore(tmp_path, fit=0)
    write, is_first = module.write_pages, True

    def interrupted(path: Path, pages: memoryview, size: int) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            following.save(a_checkpoint(2, 0))
        write(path, pages, size)

    monkeypatch.setattr(module, "write_pages", interrupted)
    failed.save(a_checkpoint(3, 0))
    assert following.load_latest().epoch == 3
    assert len(list((tmp_path / "fit-00000").iterdir())) == 2


def forge(path: Path, key: bytes, value: float) -> None:
    """Put other weights into a checkpoint, with everything right that needs no key."""
    state = json.loads(json.loads((path / "state.json").read_text())["state"])
    arrays = (path / "arrays.bin").read_bytes()
    old, new = np.full((2, 3), 2.0, "float32").tobytes(), np.full((2, 3), value, "float32").tobytes()
    assert arrays.count(old) == 1
    (path / "arrays.bin").write_bytes(arrays.replace(old, new))
    state["sha256"] = hashlib.sha256(arrays.replace(old, new)).hexdigest()
    (path / "state.json").write_bytes(sign(state, key))


@pytest.mark.parametrize("keeps_name_of_key", [True, False])
def test_a_forged_one_is_never_used(
    tmp_path: Path, keeps_name_of_key: bool, caplog: pytest.LogCaptureFixture
):
    store = CheckpointStore(tmp_path, fit=0, key=b"k" * 32)
    store.save(a_checkpoint(1, 0, value=1.0))
    newest = Path(store.save(a_checkpoint(2, 0, value=2.0)))
    name = json.loads((newest / "state.json").read_text())["key"]
    forge(newest, b"e" * 32, 666.0)
    if keeps_name_of_key:
        forged = {**json.loads((newest / "state.json").read_text()), "key": name}
        (newest / "state.json").write_text(json.dumps(forged))
        loaded = store.load_latest()
        assert loaded.epoch == 1 and loaded.values["trainable/0"][0, 0] == 1.0
        assert "its signature is wrong" in caplog.text
        return
    with pytest.raises(
        CheckpointError, match=r"signed with another key.*copy the file of \$INSITU_HOME/keys"
    ):
        store.load_latest()


def test_one_of_another_key_stays(tmp_path: Path):
    """It may be the user's own, written on another machine."""
    CheckpointStore(tmp_path, fit=0, key=b"a" * 32).save(a_checkpoint(5, 0))
    with pytest.raises(CheckpointError, match="another key"):
        CheckpointStore(tmp_path, fit=0, key=b"b" * 32).load_latest()
    assert CheckpointStore(tmp_path, fit=0, key=b"a" * 32).load_latest().epoch == 5


def test_one_that_was_being_replaced_is_found(tmp_path: Path):
    store = CheckpointStore(tmp_path, fit=0)
    path = Path(store.save(a_checkpoint(3, 0)))
    path.rename(path.with_name(f".replaced-{path.name}"))
    assert store.load_latest().epoch == 3


def test_a_home_without_room_for_a_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INSITU_HOME", "/proc/nowhere")
    with pytest.raises(CheckpointError, match=r"signed with a key in INSITU_HOME.*/proc/nowhere"):
        CheckpointStore(tmp_path, fit=0)


@pytest.mark.parametrize("name", ["1)", "(", "object", "O", "no such", "__name__", 7, []])
def test_a_dtype_of_no_array_is_passed_over(tmp_path: Path, name: object):
    """Found by the fuzzer, behind the signature: NumPy parses some of them as Python."""
    store = CheckpointStore(tmp_path, fit=0, key=b"k" * 32)
    newest = Path(store.save(a_checkpoint()))
    state = json.loads(json.loads((newest / "state.json").read_text())["state"])
    state["arrays"][0][0] = name
    (newest / "state.json").write_bytes(sign(state, b"k" * 32))
    assert store.load_latest() is None


class Flaky:
    """Has a function of a folder fail a number of times."""

    def __init__(self, call, times: int, error: Exception):
        self.call = call
        self.left = times
        self.error = error
        self.failed = 0

    def __call__(self, *arguments, **options):
        if self.left:
            self.left -= 1
            self.failed += 1
            raise self.error
        return self.call(*arguments, **options)


ERRORS = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EMFILE, "Too many open files"),
    PermissionError(errno.EACCES, "Permission denied"),
    TimeoutError("no answer"),
    RuntimeError("an error of an object store's own"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__ + str(error.args[0]))
@pytest.mark.parametrize("call", ["read", "names"])
def test_a_storage_that_fails_for_a_moment_is_read_again(
    tmp_path: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base, "PAUSES", (0.0, 0.0))
    store = CheckpointStore(tmp_path, fit=0)
    for epoch in (40, 41):
        store.save(a_checkpoint(epoch, 0))
    flaky = Flaky(getattr(store._folder, call), 2, error)
    monkeypatch.setattr(store._folder, call, flaky)
    assert store.load_latest().epoch == 41
    assert flaky.failed == 2


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__ + str(error.args[0]))
@pytest.mark.parametrize("call", ["read", "names"])
def test_a_storage_that_goes_on_failing_is_an_error_and_loses_nothing(
    tmp_path: Path, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(base, "PAUSES", (0.0, 0.0))
    store = CheckpointStore(tmp_path, fit=0)
    for epoch in (40, 41):
        store.save(a_checkpoint(epoch, 0))
    flaky = Flaky(getattr(store._folder, call), 3, error)
    monkeypatch.setattr(store._folder, call, flaky)
    with pytest.raises(CheckpointError, match=r"Nothing was removed.*insitu resume") as caught:
        store.load_latest()
    assert str(tmp_path) in str(caught.value) and flaky.failed == 3
    with pytest.raises(CheckpointError, match="Nothing was removed"):
        flaky.left = 3
        store.load((41, 0)) if call == "read" else store.positions()
    # Whoever begins anew all the same removes nothing that may be right.
    store.save(a_checkpoint(0, 100))
    assert store.positions() == [(0, 100), (40, 0), (41, 0)]


def test_a_file_that_goes_away_with_its_storage_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = CheckpointStore(tmp_path / "mounted", fit=0)
    store.save(a_checkpoint(40, 0))
    read = store._folder.read

    def unmount(name: str):
        (tmp_path / "mounted").rename(tmp_path / "away")
        return read(name)

    monkeypatch.setattr(store._folder, "read", unmount)
    with pytest.raises(CheckpointError, match="its storage is away"):
        store.load_latest()


def test_an_empty_folder_is_not_taken_for_a_beginning_once_something_was_published(tmp_path: Path):
    note, place = tmp_path / "job" / "note", tmp_path / "mounted"
    store = CheckpointStore(place, fit=0, note=note)
    assert store.load_latest() is None
    store.save(a_checkpoint(40, 0))
    place.rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match=rf"Mount or bring back.*remove {note}"):
        CheckpointStore(place, fit=0, note=note).load_latest()
    place.mkdir()
    with pytest.raises(CheckpointError, match="none is there"):
        CheckpointStore(place, fit=0, note=note).load_latest()
    assert CheckpointStore(tmp_path / "other", fit=0, note=note).load_latest() is None
    note.unlink()
    assert CheckpointStore(place, fit=0, note=note).load_latest() is None


@pytest.mark.parametrize("call", ["ls", "info", "cat_file"])
def test_an_object_store_that_fails_is_not_taken_for_an_empty_one(call: str, monkeypatch: pytest.MonkeyPatch):
    import fsspec

    monkeypatch.setattr(base, "PAUSES", (0.0,))
    store = CheckpointStore("memory://flaky/run", fit=0)
    store.save(a_checkpoint(40, 0))
    system = fsspec.core.url_to_fs("memory://flaky")[0]
    flaky = Flaky(getattr(system, call), 2, ConnectionError("unreachable"))
    monkeypatch.setattr(system, call, flaky)
    with pytest.raises(CheckpointError, match=r"unreachable.*Nothing was removed"):
        store.load_latest()
    assert flaky.failed == 2 and store.load_latest().epoch == 40


def test_files_whose_head_is_away_are_waited_for(monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(base, "PAUSES", (0.0,))
    store = CheckpointStore("memory://away/run", fit=0)
    store.save(a_checkpoint(40, 0))
    flaky = Flaky(store._folder.names, 20, ClusterError("the head was heard 9 s ago"))
    monkeypatch.setattr(store._folder, "names", flaky)
    assert store.load_latest().epoch == 40
    assert flaky.failed == 20 and caplog.text.count("the head was heard 9 s ago") == 1
    monkeypatch.setattr(base, "AWAY_SECONDS", 0.0)
    flaky.left = 20
    with pytest.raises(CheckpointError, match=r"the head was heard.*Nothing was removed"):
        store.load_latest()
    # What is removed is what this process has published.
    store.save(a_checkpoint(41, 0))
    store.save(a_checkpoint(42, 0))
    flaky.left = 0
    assert store.positions() == [(41, 0), (42, 0)]
