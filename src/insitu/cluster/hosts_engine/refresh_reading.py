"""Has the agents of a cluster read the rows of a snapshot again, for an epoch of a job that begins.

`python -P -m insitu.cluster.hosts_engine.refresh_reading JOB_FOLDER EPOCH` writes the record of the epoch
into the job's folder. The settings of connections, passwords among them, are those of its environment.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from insitu.base.paths import JobPaths, Paths
from insitu.base.process.processes import die_with_parent
from insitu.base.spec import CacheSpec
from insitu.cluster.hosts_engine.stores import find_owners
from insitu.cluster.job_files import read_placement, read_spec
from insitu.grid import Catalog, EpochVersions, read_snapshot_again


def read_again(paths: Paths, before: CacheSpec) -> CacheSpec:
    """Read the rows of now into the version that follows another one. Raises InsituError."""
    held = Catalog(paths).get(before.name, before.version)  # copies may have moved since it was made
    return read_snapshot_again(paths, held, find_owners(paths))


def main(arguments: list[str]) -> int:
    die_with_parent(signal.SIGKILL, os.getppid())
    job, epoch = JobPaths(Path(arguments[0])), int(arguments[1])
    spec, (_, cache) = read_spec(job), read_placement(job)
    paths = Paths(job.root.parent.parent)
    EpochVersions(paths, job, cache, spec.refresh, spec.stall_timeout, read_again).find(epoch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
