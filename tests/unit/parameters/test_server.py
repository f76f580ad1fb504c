"""A parameter server's life: what it refuses to begin with, how it serves and ends."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import SECRET, clients

from insitu.base.errors import InputError, ParameterError
from insitu.parameters.server import ParameterServer

PATIENCE = 60.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index": 1}, r"index must be in \[0, 1\), the servers' addresses\. Received: 1"),
        ({"index": -1}, "index must be in"),
        ({"backups": 1}, "or 1 with two servers or more. Received: 1 with 1"),
        ({"backups": 2, "addresses": ["a:1", "b:1", "c:1"]}, "backups must be 0, or 1"),
        ({"secret": "text"}, "secret must be bytes"),
        ({"mode": "eventually"}, "mode must be one of"),
        ({"nan": "keep"}, "nan"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_opened(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        ParameterServer("no address", **options)


def test_a_port_is_bound_at_once_and_by_one_server() -> None:
    server = ParameterServer()
    assert not server.address.endswith(":0")
    with pytest.raises(ParameterError, match="can't listen"):
        ParameterServer(server.address)
    server.close()
    ParameterServer(server.address).close()


def test_it_reports_at_its_end_what_it_holds() -> None:
    reports: list[Any] = []
    with (
        ParameterServer(secret=SECRET, report=reports.append) as server,
        clients([server.address]) as (client,),
    ):
        client.define({"w": ((2,), "float32", np.ones(2, "float32"))}, updater={"name": "sgd"})
    ((last,),) = reports[-1:]
    assert [piece[0] for piece in last["pieces"]] == ["w"] and last["mode"] == "async"


def test_start_and_stop_may_be_called_twice() -> None:
    server, others = ParameterServer(), set(threading.enumerate())
    assert server.start() is server.start()
    (thread,) = set(threading.enumerate()) - others
    server.stop()
    assert not thread.is_alive()
    server.stop()


def test_its_own_thread_may_stop_it() -> None:
    server, others = ParameterServer(report=lambda stats: server.stop()), set(threading.enumerate())
    server.start()
    (thread,) = set(threading.enumerate()) - others
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_checkpoint_is_looked_for_in_the_folder_given(tmp_path: Path) -> None:
    with ParameterServer(secret=SECRET) as server, clients([server.address]) as (client,):
        client.define({"w": ((2,), "float32", np.full(2, 7, "float32"))}, updater={"name": "sgd"})
        client.checkpoint(tmp_path).result(PATIENCE)
    with (
        ParameterServer(secret=SECRET, checkpoint=tmp_path) as server,
        clients([server.address]) as (client,),
    ):
        client.define({"w": ((2,), "float32", np.zeros(2, "float32"))}, updater={"name": "sgd"})
        client.pull().result(PATIENCE)
        assert client.flat_values().tolist() == [7, 7]
