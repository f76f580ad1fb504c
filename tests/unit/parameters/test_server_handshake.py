"""The handshake between workers and servers."""

from __future__ import annotations

from typing import Any

import pytest
from parameter_servers import clients, servers

from insitu.base.errors import (
    ParameterError,
)


def _peer_info_of_another_version(role: str, index: int, **more: Any) -> dict[str, Any]:
    return {"room": "parameters", "role": role, "index": index, "protocol": 99, "host": "", **more}


def test_another_protocol_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    with servers() as addresses:
        monkeypatch.setattr(
            "insitu.parameters.server_connection.make_peer_info", _peer_info_of_another_version
        )
        monkeypatch.setattr("insitu.parameters.server_handshake.PROTOCOL_VERSION", 99)
        with pytest.raises(ParameterError, match="need the same version of insitu"), clients(addresses):
            pass
