"""Servers that take their state back from their mirror."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.parameters import ParameterServer
from insitu.parameters.event_loop import HalfState
from insitu.parameters.rules.wire import REPLY, Message


def test_a_server_that_cannot_restore_its_state_does_not_serve() -> None:
    server = ParameterServer(index=0, addresses=["127.0.0.1:1", "127.0.0.1:2"], backups=1)
    answer: dict[str, Any] = {"held": True, "snapshot": {"format": -1, "server": 0}, "names": []}
    try:
        with pytest.raises(HalfState, match="can only restore a snapshot of its own"):
            server._mirrors._receive_state(None, "hand_over", Message(REPLY, 1, answer))  # type: ignore[arg-type]
        assert server._mirrors.hosted[0].role == "starting"
    finally:
        server.close()
