"""Checkpoints while training continues."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import DEADLINE, MODEL, ONES, Gate, clients, servers

from insitu.base.errors import (
    ParameterError,
)
from insitu.parameters import ParameterServer, Table, checkpoints, connect


def finished(folder: Path) -> set[int]:
    return {
        server for server in (0, 1) if checkpoints.list_numbers(checkpoints.server_folder(folder, server))
    }


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    keys = np.arange(1000)
    ones = np.ones((1000, 4), "f4")

    def begin(server: Any, stack: contextlib.ExitStack) -> Any:
        client = stack.enter_context(connect([stack.enter_context(server).address]))
        client.define(
            {"w": ((5,), "float32", np.zeros(5, "f4"))}, updater={"name": "sgd", "learning_rate": 1.0}
        )
        client.define_tables(
            [Table("t", 4, initializer="constant", updater={"name": "sgd", "learning_rate": 1.0})]
        )
        return client

    with contextlib.ExitStack() as stack:
        client = begin(ParameterServer(), stack)
        client.expect_checkpoints()
        first = client.pull_rows("t", keys).result().copy()
        writing = client.checkpoint(tmp_path)
        assert gate.reached.wait(DEADLINE)
        for sequence in range(3):
            client.push(sequence, 1, gradients={"w": np.ones(5, "f4")}, tables={"t": (keys, ones)}).result()
        with pytest.raises(ParameterError, match="under way"):
            client.checkpoint(tmp_path)
        np.testing.assert_array_equal(client.pull_rows("t", keys).result(), first - 3)
        gate.open.set()
        assert writing.result(DEADLINE) == 1
        assert client.checkpoint(tmp_path / "later").result(DEADLINE) == 2
    for folder, steps in ((tmp_path, 0), (tmp_path / "later", 3)):
        with contextlib.ExitStack() as stack:
            client = begin(ParameterServer(checkpoint=folder), stack)
            client.pull().result()
            np.testing.assert_array_equal(client.values["w"], np.full(5, -steps, "f4"))
            np.testing.assert_array_equal(client.pull_rows("t", keys).result(), first - steps)


def test_a_checkpoint_that_one_server_cannot_begin_blocks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reached, done, write = threading.Event(), threading.Event(), checkpoints.write

    def slow(folder: Path, *given: Any) -> None:
        if folder.name == "server-1":
            reached.set()
            assert done.wait(DEADLINE)
        write(folder, *given)

    monkeypatch.setattr(checkpoints, "write", slow)
    # Less than a server stays frozen at most.
    with servers(2) as addresses, clients(addresses, 1, stall_timeout=5.0) as (client,):
        client.define(MODEL)
        writing = client.checkpoint(tmp_path)
        assert reached.wait(DEADLINE)
        while 0 not in finished(tmp_path):
            client.stats()
        with pytest.raises(ParameterError, match="under way"):
            client.checkpoint(tmp_path)
        assert client.push(0, 1, gradients={"a": ONES, "b": ONES}).result() == "applied"
        done.set()
        assert writing.result(DEADLINE) == 1
