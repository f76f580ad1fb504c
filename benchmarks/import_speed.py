"""How fast `insitu import` reads each format, and how much memory it takes.

    python benchmarks/import_speed.py                   # 500 MB of rows of 784 bytes
    python benchmarks/import_speed.py --megabytes 2000  # the size for which the targets are set
    python benchmarks/import_speed.py --quick

Each import runs in its own process. Its memory is the peak (VmHWM) above that of the interpreter with all
modules imported. Speed counts the bytes of the source file, and the time ends when the cache is published
and synced to the disk. The floor is a plain copy of the .npy file, synced. On a virtual machine, memory
pages that were never used take the host time when they are first touched. This affects copy and import
alike. A warm-up round is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

ROW_BYTES = 784
CSV_COLUMNS = 20

CHILD = """
import json, sys, time
import insitu.grid.importing.importer
import insitu.grid.sources.npy, insitu.grid.sources.npz, insitu.grid.sources.parquet
import insitu.grid.sources.csv, insitu.grid.sources.ipc
from insitu.grid import import_cache
from insitu.base.paths import Paths

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before, started = peak(), time.perf_counter()
import_cache(Paths.default(), "benchmark", [sys.argv[1]], overwrite=True)
print(json.dumps({"seconds": time.perf_counter() - started, "memory": peak() - before}))
"""


def make_sources(folder: Path, size: int) -> dict[str, Path]:
    """The files to import: about `size` bytes of values each; a CSV of a tenth."""
    rows = size // ROW_BYTES
    rng = np.random.default_rng(0)
    paths = {name: folder / f"source.{name}" for name in ("npy", "npz", "parquet", "arrow", "csv")}
    array = np.lib.format.open_memmap(paths["npy"], "w+", np.uint8, (rows, ROW_BYTES))
    for start in range(0, rows, 50_000):
        stop = min(rows, start + 50_000)
        array[start:stop] = rng.integers(0, 255, (stop - start, ROW_BYTES), dtype=np.uint8)
    array.flush()
    np.savez(paths["npz"], x=array)
    schema = pa.schema([pa.field("x", pa.list_(pa.uint8(), ROW_BYTES))])
    with (
        pq.ParquetWriter(paths["parquet"], schema) as parquet,
        pa.ipc.new_file(str(paths["arrow"]), schema) as arrow,
    ):
        for start in range(0, rows, 50_000):
            flat = pa.array(np.ascontiguousarray(array[start : start + 50_000]).reshape(-1))
            batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(flat, ROW_BYTES)], schema=schema)
            parquet.write_batch(batch)
            arrow.write_batch(batch)
    _make_csv(paths["csv"], size // 10, rng)
    return paths


def _make_csv(path: Path, size: int, rng: np.random.Generator) -> None:
    block = pa.table({f"column_{i}": rng.normal(size=10_000).round(6) for i in range(CSV_COLUMNS)})
    with path.open("wb") as file:
        while file.tell() < size:
            options = pa_csv.WriteOptions(include_header=file.tell() == 0)
            pa_csv.write_csv(block, file, options)


def importer(source: Path, home: Path, memory: dict[str, float]) -> Callable[[], float]:
    """A contender that imports `source` and returns MB/s."""

    def run() -> float:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(source)],
            env={**os.environ, "INSITU_HOME": str(home)},
            capture_output=True,
            text=True,
            check=True,
        )
        measured = json.loads(done.stdout)
        name = source.suffix[1:]
        memory[name] = max(memory.get(name, 0.0), measured["memory"] / 1e6)
        return source.stat().st_size / measured["seconds"] / 1e6

    return run


def copier(source: Path, target: Path) -> Callable[[], float]:
    """A contender that copies `source` and returns MB/s."""

    def run() -> float:
        started = time.perf_counter()
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
        seconds = time.perf_counter() - started
        target.unlink()
        return source.stat().st_size / seconds / 1e6

    return run


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--megabytes", type=int, default=None, help="size of the .npy (500; 20 with --quick)")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the files (a temporary one)")
    options = parser.parse_args()
    size = (options.megabytes or (20 if options.quick else 500)) * 1_000_000
    rounds = options.rounds or (1 if options.quick else 3)
    machine = common.machine()
    memory: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        common.say(f"making sources of {size / 1e6:g} MB in {folder}")
        sources = make_sources(Path(folder), size)
        contenders = {
            f".{name}": importer(path, Path(folder) / name, memory) for name, path in sources.items()
        }
        contenders["plain copy of .npy"] = copier(sources["npy"], Path(folder) / "copy")
        results = common.alternate(contenders, "MB/s", rounds, warm_up=0 if options.quick else 1)
        sizes = {f".{name}": path.stat().st_size / 1e6 for name, path in sources.items()}
    print(common.machine_line(machine) + "\n")
    rows = []
    for name, result in results.items():
        median = f"{result.median:,.0f}" if result.median else f"not measured: {result.missing}"
        spread = f"{min(result.figures):,.0f} to {max(result.figures):,.0f}" if result.figures else ""
        peak = memory.get(name[1:])
        rows.append(
            [name, f"{sizes.get(name, sizes['.npy']):,.0f}", median, spread, f"{peak:,.0f}" if peak else ""]
        )
    header = ["import of", "MB of source", "MB/s (median)", "range", "MB of memory above the interpreter"]
    print(common.table(header, rows))
    common.save_json(
        options.json,
        "import_speed",
        machine,
        results=common.results_json(results),
        memory_mb=memory,
        source_mb=sizes,
    )


if __name__ == "__main__":
    main()
