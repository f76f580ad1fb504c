"""Records what a real server of Ignite sends, for tests without Java. With `make ignite` running:

    export PYTHONPATH=tests/support
    python tests/support/ignite_recording.py HOST PORT > tests/data/ignite_recorded.json

The cache grid16_types must be loaded (tests/ignite/Load.java, `types`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from insitu.extensions.ignite import protocol
from insitu.extensions.ignite.address import read_settings
from insitu.extensions.ignite.connection import Connection
from insitu.extensions.ignite.wire import hash_name

RECORDED = Path(__file__).parents[1] / "data" / "ignite_recorded.json"
CACHE = "grid16_types"
PAGE_ROWS = 3


def record(server: tuple[str, int]) -> dict[str, Any]:
    """Return the contents of responses, in hex."""
    connection, cache = Connection(server, read_settings()), hash_name(CACHE)
    requests = {
        "names": (protocol.GET_NAMES, b""),
        "configuration": (protocol.GET_CONFIGURATION, protocol.encode_cache(cache)),
        "size": (protocol.GET_SIZE, protocol.encode_size(cache)),
        "partitions": (protocol.GET_PARTITIONS, protocol.encode_partitions(cache)),
        "endpoints": (protocol.GET_ENDPOINTS, protocol.encode_endpoints()),
        "page": (protocol.SCAN, protocol.encode_scan(cache, PAGE_ROWS, -1)),
    }
    sql = hash_name("SQL_PUBLIC_CITY")
    requests["table"] = (protocol.GET_CONFIGURATION, protocol.encode_cache(sql))
    found: dict[str, Any] = {
        name: bytes(connection.request(operation, contents)).hex()
        for name, (operation, contents) in requests.items()
    }
    names = ["Load$Row", "Load$Meta", "Load$Inner", "Load$Color"]
    for number in (hash_name(name.lower()) for name in names):
        contents = connection.request(protocol.GET_TYPE, protocol.encode_type(number))
        found[f"type {number}"] = bytes(contents).hex()
    connection.close()
    return found


if __name__ == "__main__":
    json.dump(record((sys.argv[1], int(sys.argv[2]))), sys.stdout, indent=1)
