"""Checkpoints on disk."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import DEADLINE

from insitu.errors import (
    CheckpointError,
)
from insitu.parameters import ParameterServer, checkpoints, connect


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
