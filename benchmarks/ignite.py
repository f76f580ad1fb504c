"""How fast rows come out of Apache Ignite, beside pyignite and Java's thin client on the same cache.

    python benchmarks/ignite.py            # 100,000 rows of 784 bytes, 200,000 rows of 20 mixed fields
    python benchmarks/ignite.py --quick

Needs Java and Maven, and `pip install pyignite` for that peer. Three servers on loopback hold the rows in 16
partitions. Reading gives all rows as columns in memory, in the order of their keys. pyignite gives Python
objects; it reads a tenth of the rows. Java's client reads each field of each row, after a round that warms it
up. "pages, dropped" takes in all pages of all partitions and makes nothing of them: no reader on these cores
can be faster. The last rows compare whole imports: from Ignite, from the same pages where they are in memory
already, so that servers take no part, and from a Parquet file of the same rows. Below are the processor
seconds that one of each takes of the servers and of this process.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import common
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from ignite_servers import FILES, IgniteServers, find_missing, run_java  # noqa: E402

from insitu.base.paths import Paths  # noqa: E402
from insitu.extensions.ignite import source as ignite_source  # noqa: E402
from insitu.extensions.ignite.address import parse_address, read_settings  # noqa: E402
from insitu.extensions.ignite.cluster import Cluster, ScannedPartition  # noqa: E402
from insitu.extensions.ignite.source import IgniteSource, rows_of_page  # noqa: E402
from insitu.grid import import_cache  # noqa: E402
from insitu.grid.sources import ColumnOptions, SourceOptions, map_ordered  # noqa: E402

BLOCK_BYTES = 4 << 20
CACHES = {"mixed": "grid16_mixed", "images": "grid16_images"}
MEASURED = ("pages, dropped", "insitu, import", "insitu, import of held pages", "insitu, import from Parquet")
NAMES = {"images": "rows of 784 bytes", "mixed": "rows of 20 mixed fields"}


def open_source(servers: IgniteServers, cache: str) -> IgniteSource:
    address = parse_address(servers.address(cache))
    return IgniteSource(address, read_settings(), ColumnOptions(), SourceOptions())


def read_by_insitu(servers: IgniteServers, cache: str) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        rows = sum(block.rows for block in open_source(servers, cache).blocks(BLOCK_BYTES))
        return rows / (time.perf_counter() - started)

    return run


def read_by_pyignite(servers: IgniteServers, cache: str, rows: int) -> Callable[[], float]:
    def run() -> float:
        try:
            from pyignite import Client
        except ImportError:
            raise common.Unavailable("pyignite isn't installed") from None
        client: Any = Client()
        with client.connect([("127.0.0.1", port) for port in servers.ports.values()]):
            started = time.perf_counter()
            with client.get_cache(cache).scan(page_size=1024) as cursor:
                for count, _ in enumerate(cursor, start=1):
                    if count == rows:
                        break
        return rows / (time.perf_counter() - started)

    return run


def read_by_java(servers: IgniteServers, cache: str) -> Callable[[], float]:
    def run() -> float:
        addresses = ",".join(f"127.0.0.1:{port}" for port in servers.ports.values())
        return float(run_java(HERE / "ignite_peers" / "Scan.java", addresses, cache, "16", "1").split()[-1])

    return run


def drop_pages(servers: IgniteServers, cache: str) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        source = open_source(servers, cache)
        page_rows = rows_of_page(source.row_bytes)
        with Cluster(source.address, read_settings()) as cluster:
            cluster.find_cache(), cluster.find_layout()
            found = map_ordered(lambda each: cluster.scan([each], page_rows)[0].rows, source.partitions)
            rows = sum(found)
        return rows / (time.perf_counter() - started)

    return run


class HeldPages(Cluster):
    """A cluster each of whose partitions is scanned once for all."""

    held: ClassVar[dict[int, ScannedPartition]] = {}

    def scan(self, partitions: Sequence[int], page_rows: int) -> list[ScannedPartition]:
        for each in partitions:
            if each not in self.held:
                (self.held[each],) = super().scan([each], page_rows)
        return [self.held[each] for each in partitions]


def import_held_pages(run_import: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        with mock.patch.object(ignite_source, "Cluster", HeldPages):
            return run_import()

    return run


def processor_seconds(pid: int) -> float:
    """Return what a process has taken of processors so far."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def count_processor_seconds(servers: IgniteServers, run: Callable[[], float]) -> tuple[float, float]:
    """Return the processor seconds of (the servers, this process) that `run` takes, of ten runs each."""
    pids = [process.pid for process in servers.processes.values()]
    before = [sum(map(processor_seconds, pids)), processor_seconds(os.getpid())]
    for _ in range(10):
        run()
    return (
        (sum(map(processor_seconds, pids)) - before[0]) / 10,
        (processor_seconds(os.getpid()) - before[1]) / 10,
    )


def import_from(source: str, home: Path, rows: int) -> Callable[[], float]:
    def run() -> float:
        started = time.perf_counter()
        (cache,) = import_cache(Paths(home), "benchmark", [source], overwrite=True)
        assert cache.rows == rows
        return rows / (time.perf_counter() - started)

    return run


def write_parquet(servers: IgniteServers, cache: str, target: Path) -> None:
    """Write the rows of a cache as a Parquet file."""
    writer = None
    for block in open_source(servers, cache).blocks(BLOCK_BYTES):
        columns = {}
        for name, values in block.columns.items():
            tensor = not isinstance(values, pa.Array) and values.ndim > 1
            flat = pa.array(values.reshape(-1)) if tensor else pa.array(values)
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if tensor else flat
        batch = pa.record_batch(columns)
        writer = writer or pq.ParquetWriter(target, batch.schema)
        writer.write_batch(batch)
    assert writer is not None
    writer.close()


def main() -> None:
    parser = common.parser(__doc__ or "")
    options = parser.parse_args()
    if missing := find_missing():
        raise SystemExit(missing)
    sizes = {"images": 2000, "mixed": 4000} if options.quick else {"images": 100_000, "mixed": 200_000}
    rounds = options.rounds or (1 if options.quick else 5)
    machine, found = common.machine(), {}
    with (
        tempfile.TemporaryDirectory() as folder,
        IgniteServers(Path(folder) / "servers", region_mib=512) as servers,
    ):
        servers.start(0, 1, 2)
        os.environ.update(servers.environment())
        addresses = ",".join(f"127.0.0.1:{port}" for port in servers.ports.values())
        loads = [f"{what}:{cache}:{sizes[what]}" for what, cache in CACHES.items()]
        run_java(FILES / "Load.java", addresses, "", "", "plain", *loads)
        for what, cache in CACHES.items():
            parquet = Path(folder) / f"{what}.parquet"
            write_parquet(servers, cache, parquet)
            home, rows = Path(folder) / "home", sizes[what]
            contenders = {
                "insitu, reading": read_by_insitu(servers, cache),
                "Java's thin client": read_by_java(servers, cache),
                "pyignite": read_by_pyignite(servers, cache, rows // 10),
                "pages, dropped": drop_pages(servers, cache),
                "insitu, import": import_from(servers.address(cache), home, rows),
                "insitu, import of held pages": import_held_pages(
                    import_from(servers.address(cache), home, rows)
                ),
                "insitu, import from Parquet": import_from(str(parquet), home, rows),
            }
            HeldPages.held.clear()
            found[what] = common.alternate(contenders, "rows/s", rounds, warm_up=0 if options.quick else 1)
            print(f"{sizes[what]:,} {NAMES[what]}:\n")
            print(common.results_table(found[what], "insitu, reading", form="{:,.0f}".format) + "\n")
            for name in () if options.quick else MEASURED:
                theirs, own = count_processor_seconds(servers, contenders[name])
                print(f"{name}: {theirs:.2f} s of processors in the servers, {own:.2f} s in insitu")
            print(flush=True)
    print(common.machine_line(machine) + "\n")
    common.save_json(
        options.json, "ignite", machine, results={what: common.results_json(r) for what, r in found.items()}
    )


if __name__ == "__main__":
    main()
