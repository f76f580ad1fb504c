"""Checkpoints on disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import DEADLINE

from insitu.base.disk import checkpoints as base
from insitu.base.disk.signatures import sign, unsign
from insitu.base.errors import (
    CheckpointError,
)
from insitu.parameters import ParameterServer, checkpoints, connect
from insitu.parameters.snapshots import LiveSnapshot


def test_a_checkpoint_has_large_variables_and_their_slots(tmp_path: Path):
    """Those of the snapshot, though the next step is done before it is on disk."""
    shape = (700, 500)
    gradient = {"large": np.linspace(-1, 1, 350_000, dtype="f4").reshape(shape)}
    seen = []
    for starts in (1, 2):
        with contextlib.ExitStack() as stack:
            sequence = 0
            for start in range(starts):
                server = stack.enter_context(ParameterServer(checkpoint=tmp_path / str(starts)))
                client = stack.enter_context(connect([server.address]))
                client.define({"large": (shape, "float32", np.ones(shape, "f4"))}, updater="adam")
                for _ in range(4 // starts):
                    client.push(sequence, 1, gradients=gradient).result()
                    sequence += 1
                if start + 1 < starts:
                    client.checkpoint(tmp_path / str(starts)).result()
                    client.push(sequence, 1, gradients=gradient).result()
            client.pull().result()
            seen.append(client.values["large"].copy())
    np.testing.assert_array_equal(*seen)


def test_an_unexpected_error_fails_the_checkpoint_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(array: Any) -> Any:
        raise RuntimeError("the thing broke")

    monkeypatch.setattr(checkpoints, "_iterate_blocks", broken)
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((5,), "float32")})
        with pytest.raises(CheckpointError, match="the thing broke"):
            client.checkpoint(tmp_path).result(DEADLINE)
        assert client.push(0, 1, gradients={"w": np.ones(5, "f4")}).result() == "applied"


def test_a_disk_that_hangs_does_not_hold_the_end_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A server that ended waited for its checkpoint for ever."""
    hangs, begun = threading.Event(), threading.Event()

    def write(*_: Any) -> None:
        begun.set()
        hangs.wait(DEADLINE)

    monkeypatch.setattr(checkpoints, "write", write)
    monkeypatch.setattr(checkpoints, "_CANCEL_TIMEOUT", 0.05)
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", np.zeros(3, np.float32))})
        client.checkpoint(tmp_path)
        assert begun.wait(DEADLINE)
        server.stop()
    hangs.set()


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def write_two(directory: Path) -> Path:
    """Write the checkpoints 1 and 2 of server 0, with the values 1 and 2. Returns the second's folder."""
    folder = checkpoints.server_folder(directory, 0)
    for number in (1, 2):
        arrays: dict[str, Any] = {"values/float32": np.full(4, number, "f4")}
        checkpoints.write(folder, number, LiveSnapshot({"server": 0}, arrays), KEY)
    return folder / "checkpoint-00000002"


def read_value(directory: Path, key: bytes = KEY, server: int = 0) -> float | None:
    """The values of the checkpoint that a server starts from."""
    found = checkpoints.read_newest(directory, server, key)
    return None if found is None else float(found.arrays["values/float32"][0])


def sign_anew(path: Path, **changes: Any) -> None:
    """Change what a checkpoint says about itself, as who has the key."""
    state = unsign((path / "state.json").read_bytes(), KEY)
    (path / "state.json").write_bytes(sign({**state, **changes}, KEY))


def forge_values(path: Path) -> None:
    """Other values, with all digests right: all that who doesn't have the key can do."""
    np.full(4, 666, "f4").tofile(path / "arrays.bin")
    outer = json.loads((path / "state.json").read_bytes())
    state = json.loads(outer["state"])
    state["arrays"][0][3] = hashlib.sha256((path / "arrays.bin").read_bytes()).hexdigest()
    (path / "state.json").write_text(json.dumps({**outer, "state": json.dumps(state)}))


def remove_signature(path: Path) -> None:
    """As earlier versions wrote them."""
    state = json.loads((path / "state.json").read_bytes())["state"]
    (path / "state.json").write_text(json.dumps({"crc32": zlib.crc32(state.encode()), "state": state}))


def nest_deeply(path: Path) -> None:
    (path / "state.json").write_text("[" * 200_000)


def announce_too_much(path: Path) -> None:
    sign_anew(path, arrays=[["values/float32", "float32", [1 << 60], "0" * 64]])


def put_in_place_of_newer(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("checkpoint-00000001"), path)


@pytest.mark.parametrize(
    "damage", [forge_values, remove_signature, nest_deeply, announce_too_much, put_in_place_of_newer]
)
def test_what_the_key_did_not_sign_is_named_and_passed_over(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
):
    newest = write_two(tmp_path)
    assert read_value(tmp_path) == 2.0
    damage(newest)
    with caplog.at_level(logging.WARNING, "insitu"):
        assert read_value(tmp_path) == 1.0
    assert str(newest) in caplog.text


def test_a_checkpoint_of_another_server_is_not_taken(tmp_path: Path):
    write_two(tmp_path)
    shutil.copytree(checkpoints.server_folder(tmp_path, 0), checkpoints.server_folder(tmp_path, 1))
    assert read_value(tmp_path, server=1) is None


def test_a_checkpoint_of_another_key_is_an_error(tmp_path: Path):
    """It may be the user's own. The servers would begin without it, and remove it later."""
    newest = write_two(tmp_path)
    with pytest.raises(CheckpointError, match="signed with another key") as raised:
        read_value(tmp_path, OTHER_KEY)
    assert str(newest) in str(raised.value)


@pytest.mark.parametrize("failing", ["open", "listdir"])
def test_a_disk_that_fails_is_read_again_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
):
    """Servers began with empty tables, and the next checkpoints took the place of these."""
    write_two(tmp_path)
    real: Any = {"open": io.open, "listdir": os.listdir}[failing]
    left, failed = [2], list[str]()

    def fail(path: Any, *rest: Any, **options: Any) -> Any:
        if left[0] and str(path).startswith(str(tmp_path)):
            left[0] -= 1
            failed.append(str(path))
            raise OSError(errno.EIO, "the disk fails")
        return real(path, *rest, **options)

    monkeypatch.setattr({"open": io, "listdir": os}[failing], failing, fail)
    monkeypatch.setattr(base, "PAUSES", (0.0, 0.0, 0.0))
    assert read_value(tmp_path) == 2.0 and len(failed) == 2
    left[0] = 100
    with pytest.raises(CheckpointError, match="Nothing was removed"):
        read_value(tmp_path)
    left[0] = 0
    assert read_value(tmp_path) == 2.0


def test_damaged_ones_are_not_kept_in_the_place_of_fresh_ones(tmp_path: Path):
    folder = write_two(tmp_path).parent
    for damaged in (2, 3):
        (folder / f"checkpoint-{damaged:08d}").mkdir(exist_ok=True)
        (folder / f"checkpoint-{damaged:08d}" / "state.json").write_text("{}")
    checkpoints.write(folder, 1, LiveSnapshot({"server": 0}, {"values/float32": np.full(4, 7, "f4")}), KEY)
    assert read_value(tmp_path) == 7.0


def test_servers_of_one_user_read_each_others_checkpoints(tmp_path: Path):
    """Each has a secret that only its process knows, so it isn't the key."""
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", np.arange(3, dtype="f4"))})
        client.checkpoint(tmp_path).result(DEADLINE)
    with ParameterServer(checkpoint=tmp_path) as server, connect([server.address]) as client:
        client.define({"w": ((3,), "float32", np.zeros(3, "f4"))})
        client.pull().result()
        np.testing.assert_array_equal(client.values["w"], np.arange(3, dtype="f4"))
    with pytest.raises(CheckpointError, match="another key"):
        ParameterServer(checkpoint=tmp_path, checkpoint_key=KEY)
