"""Partitions from the store of one process into that of another, over loopback, as nodes copy them: GB/s.

Fetches use TLS, a token, and checksums; the file is on disk when one ends. Several partitions are fetched at
the same time, each by a stream of its own. *copy* is what the machine takes for a copy by the system, synced,
whose checksum is compared: no transfer can be faster.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common
import numpy as np

from insitu.base.net.certificates import make_certificate
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid import bring_up, import_cache
from insitu.grid.partitions import file_checksum
from insitu.grid.serving import PartitionServer
from insitu.grid.transfer import ServerAddress, fetch_partition

SECRET = b"only for the benchmark, 32 bytes"
SOURCE, TARGET = NodeId("node-0"), NodeId("node-1")
PARTITIONS = 4


def make_cache(paths: Paths, folder: Path, megabytes: int) -> CacheSpec:
    rows = np.random.default_rng(0).integers(0, 255, (megabytes << 10, 1 << 10), dtype=np.uint8)
    np.save(folder / "rows.npy", rows)
    bring_up(paths, 1)
    (cache,) = import_cache(paths, "rows", [str(folder / "rows.npy")], partitions=PARTITIONS)
    return cache


def fetch(paths: Paths, cache: CacheSpec, address: ServerAddress, streams: int) -> float:
    """Return GB/s of fetching all partitions, `streams` at a time."""
    shutil.rmtree(paths.node(TARGET), ignore_errors=True)

    def run() -> None:
        with ThreadPoolExecutor(streams) as pool:
            list(
                pool.map(
                    lambda i: fetch_partition(paths, TARGET, cache, i, [address], SECRET), range(PARTITIONS)
                )
            )

    return cache.bytes / 1e9 / common.timed(run)


def copy(paths: Paths, cache: CacheSpec, folder: Path) -> float:
    """Return GB/s of copying all partitions on this machine."""

    def run() -> None:
        for info in cache.partitions:
            target = folder / f"copy-{info.index}"
            shutil.copyfile(paths.partition(SOURCE, "rows", 1, info.index), target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
            assert file_checksum(target) == info.checksum

    return cache.bytes / 1e9 / common.timed(run)


def serve(home: str) -> None:
    """Serve the store until the standard input ends."""
    server = PartitionServer(Paths(Path(home)), SOURCE, SECRET, make_certificate())
    address = server.address
    found = {"host": address.host, "port": address.port, "certificate": address.certificate}
    print(json.dumps(found), flush=True)
    sys.stdin.read()
    server.stop()


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--serve", help="used by the benchmark itself: serve the store of this home")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    machine = common.machine()
    megabytes = 16 if options.quick else 1024
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = Paths(folder / "home")
        cache = make_cache(paths, folder, megabytes)
        command = [sys.executable, __file__, "--serve", str(paths.home)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdin is not None
            address = ServerAddress(**json.loads(server.stdout.readline()))
            contenders: dict[str, Callable[[], float]] = {
                f"fetch, {streams} stream(s)": lambda streams=streams: fetch(paths, cache, address, streams)
                for streams in (1, 2, 4)
            }
            contenders["copy"] = lambda: copy(paths, cache, folder)
            rounds = options.rounds or (1 if options.quick else 5)
            results = common.alternate(contenders, "GB/s", rounds)
            server.stdin.close()
    print(common.machine_line(machine))
    print(f"\n{megabytes} MiB in {PARTITIONS} partitions\n")
    print(common.results_table(results, "copy", form="{:.2f}".format))
    common.save_json(options.json, "transfer", machine, results=common.results_json(results))


if __name__ == "__main__":
    main()
