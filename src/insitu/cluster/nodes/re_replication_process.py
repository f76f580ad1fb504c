"""Makes copies of partitions again on behalf of the head, and says what is left on nodes that leave.

`python -P -m insitu.cluster.nodes.re_replication_process HOME` reads {"leaving": [NODE], "waiting": [NODE],
"rate": BYTES_PER_SECOND or null} and writes {"moved": BYTES, "failed": [WHY], "left": {NODE: [COPIES,
TASKS]}}, or {"error": WHY}. It is a process of its own since the head loads no library that moves bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.base.process.processes import die_with_parent
from insitu.base.spec import NodeId
from insitu.cluster.hosts_engine import find_stores
from insitu.cluster.job_files import Journal, is_locked
from insitu.grid import Catalog, restore_copies


def restore(paths: Paths, given: dict[str, Any]) -> dict[str, Any]:
    """Make copies again. Returns the answer. Raises InsituError."""
    stores = find_stores(paths)
    if stores is None:
        raise ClusterError(f"A home with a head has agents. Received: {paths.home}, which has none")
    leaving, waiting = (list(map(NodeId, given[name])) for name in ("leaving", "waiting"))
    reports = restore_copies(paths, stores, leaving=leaving, waiting=waiting, rate=given["rate"])
    failed = [
        f"{report.cache.name} version {report.cache.version}: {why}"
        for report in reports
        for why in report.failed
    ]
    return {
        "moved": sum(report.moved for report in reports),
        "failed": failed,
        "left": count_left(paths, leaving),
    }


def count_left(paths: Paths, nodes: Iterable[NodeId]) -> dict[NodeId, tuple[int, int]]:
    """Return the copies of partitions on each node, and the tasks of jobs that run there."""
    catalog = Catalog(paths)
    placed = Counter(
        copy.node
        for cache in catalog.stored()
        for copy in catalog.placement(cache.name, cache.version)
        if copy.state != "lost"
    )
    tasks: Counter[NodeId] = Counter()
    for folder in paths.jobs.iterdir() if paths.jobs.is_dir() else ():
        job = paths.job(folder.name)
        if not folder.name.startswith(".") and is_locked(job.controller):
            tasks.update(t.node for t in Journal(job.journal).state().alive if t.node is not None)
    return {node: (placed[node], tasks[node]) for node in nodes}


def main(arguments: list[str]) -> int:
    die_with_parent(signal.SIGKILL, os.getppid())
    answer: dict[str, Any]
    try:
        answer = restore(Paths(Path(arguments[0])), json.load(sys.stdin))
    except (InsituError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
