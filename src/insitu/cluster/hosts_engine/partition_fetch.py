"""Has nodes get partitions that they lack from other nodes, for a job that is about to read them.

`python -P -m insitu.cluster.hosts_engine.partition_fetch HOME` reads {"cache": SPEC, "wanted": {NODE:
[PARTITION]}} and writes {"moved": {NODE: BYTES}}, or {"error": WHY}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.base.process.processes import die_with_parent
from insitu.base.spec import CacheSpec, NodeId
from insitu.cluster.hosts_engine.stores import find_stores


def fetch(paths: Paths, cache: CacheSpec, wanted: dict[NodeId, list[int]]) -> dict[NodeId, int]:
    """Return the bytes that have moved to each node. Raises InsituError."""
    stores = find_stores(paths)
    if stores is None:
        raise ClusterError(f"A home with a head has agents. Received: {paths.home}, which has none")
    others = {node: indices for node, indices in wanted.items() if node not in stores.here}
    moved = {node: fetched.bytes for node, fetched in stores.fetch(cache, others).items()}
    for node in wanted.keys() - others.keys():
        moved[node] = stores.fetch_here(paths, node, cache, wanted[node]).bytes
    return moved


def main(arguments: list[str]) -> int:
    die_with_parent(signal.SIGKILL, os.getppid())
    given = json.load(sys.stdin)
    wanted = {NodeId(node): list(map(int, indices)) for node, indices in given["wanted"].items()}
    answer: dict[str, Any]
    try:
        answer = {"moved": fetch(Paths(Path(arguments[0])), CacheSpec.from_json(given["cache"]), wanted)}
    except (InsituError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
