"""Data larger than memory: insitu compared with what the disk reads, tf.data, Ray Data and pyarrow.

    python benchmarks/large_data.py --folder FOLDER              # 1.5 times the memory: about 12 minutes
    python benchmarks/large_data.py --folder FOLDER --gigabytes 2 --seconds 3
    python benchmarks/large_data.py --folder FOLDER --keep --parts stream    # uses what is in FOLDER

Rows are drawings of 784 bytes (Quick, Draw! bitmaps, by default in the folder that the environment
variable DATA names; else random ones), repeated with noise, in .npy files of about a gigabyte. Where the
disk has no room for so many, files come again under other names. Each run is a process of its own, and
begins with the files out of the page cache; the share that is still in it is checked. Runs alternate. A run
reads for `--seconds` after its first batch.

    stream   shuffled batches of 256 rows: the disk alone (pread of the cache's files), insitu in windows,
             tf.data (the .npy files as raw records, shuffle(100_000)), Ray Data (Parquet of 2 GB, mixed in a
             buffer of 100,000 rows); rows/s and the time to the first batch
    workers  two processes with a shard each and 128 rows a batch, which compute for 5 ms between two
             batches: the share of the time in which they wait
    images   rows of 150,528 bytes, batches of 32, beside the disk
    memory   in the page cache, shuffled exactly: rows of 784 bytes in batches of 256, beside np.take, and of
             8 bytes in batches of 8,192
    import   .npy beside what the disk copies when it reads and writes at once; Parquet and CSV beside
             pyarrow alone
    restart  the first batch from the middle of an epoch in a new process: all rows beside 25 MB of them
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import disk_speed
import numpy as np
import page_cache

READER = Path(__file__).parent / "large_data_peers" / "reader.py"
ROW_BYTES, IMAGE_BYTES, BATCH, FILE_BYTES = 784, 150_528, 256, 1 << 30
CHUNK_ROWS = 50_000
OTHER_PARTS_BYTES = 20 << 30
"""Room on the disk for the other parts, beside the rows and their cache."""
MOST_RESIDENT = 0.02
"""A run is cold if no more of its files than this share is in the page cache."""
PARTS = ("stream", "workers", "images", "memory", "import", "restart")


@dataclass
class Bench:
    """Where the files are, how long runs are, and what was measured."""

    folder: Path
    drawings: Path
    size: int
    seconds: float
    rounds: int
    #: For each figure: what it is, insitu's, the peer's, and insitu's in relation to the peer's.
    summary: list[list[str]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def sources(self, name: str) -> list[Path]:
        return sorted((self.folder / name).glob("*"))

    def cache_files(self, name: str) -> list[Path]:
        stores = (self.home / "nodes").rglob("*")
        return sorted(p for p in stores if p.is_file() and p.suffix == ".arrow" and f"/{name}/" in str(p))

    def run(self, way: str, files: Sequence[Path], warm: bool = False, **spec: Any) -> dict[str, float]:
        """Read in one way, with `files` out of the page cache. Raises Unavailable if a library is."""
        if not warm:
            share = page_cache.evict(files)
            if share > MOST_RESIDENT:
                raise SystemExit(f"{share:.0%} of the files can't be put out of the page cache")
        spec = {"seconds": self.seconds, "files": [str(f) for f in files], "home": str(self.home)} | spec
        process = start_reader(way, spec)
        return finish_reader(process)

    def note(self, what: str, own: float, peer: float, form: Callable[[float], str], peer_name: str) -> None:
        """Add a line to the summary."""
        self.summary.append([what, form(own), f"{form(peer)} ({peer_name})", f"{own / peer:.2f}"])


def start_reader(way: str, spec: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, str(READER), way, json.dumps(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def finish_reader(process: subprocess.Popen[str]) -> dict[str, float]:
    output, errors = process.communicate(timeout=1200)
    if "No module named" in errors:
        raise common.Unavailable(errors.strip().splitlines()[-1])
    if process.returncode:
        raise SystemExit(f"a reader failed:\n{errors[-3000:]}")
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def read_drawings(folder: Path) -> np.ndarray:
    """Return drawings [rows, 784], sorted by class."""
    if folder.is_dir():
        return np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])
    rng = np.random.default_rng(0)
    return rng.integers(0, 255, (30_000, ROW_BYTES), dtype=np.uint8)


def make_rows(bench: Bench) -> None:
    """Make the .npy files, distinct ones as far as the disk has room for them and for the cache."""
    target = bench.folder / "rows"
    if target.exists():
        return
    target.mkdir()
    files = max(2, round(bench.size / FILE_BYTES))
    rows = bench.size // files // ROW_BYTES
    room = shutil.disk_usage(bench.folder).free - bench.size - OTHER_PARTS_BYTES
    distinct = min(files, max(1, int(room // (rows * ROW_BYTES))))
    drawings = read_drawings(bench.drawings)
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 8, CHUNK_ROWS * ROW_BYTES * 2, dtype=np.uint8)
    for number in range(distinct):
        common.say(f"  making {rows:,} rows, file {number + 1}/{distinct} of {files}")
        path = target / f"rows-{number:04d}.npy"
        with path.open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (rows, ROW_BYTES)}
            np.lib.format.write_array_header_1_0(file, header)
            for start in range(0, rows, CHUNK_ROWS):
                count = min(CHUNK_ROWS, rows - start)
                chosen = drawings[rng.integers(0, len(drawings), count)]
                shift = int(rng.integers(0, CHUNK_ROWS * ROW_BYTES))
                chosen ^= noise[shift : shift + chosen.size].reshape(chosen.shape)
                file.write(chosen.data)
    for number in range(distinct, files):
        os.link(target / f"rows-{number % distinct:04d}.npy", target / f"rows-{number:04d}.npy")


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return file.tell()


def import_cache(bench: Bench, name: str, sources: Sequence[Path]) -> float:
    """Import into cache `name` by the command line; return the seconds."""
    command = [sys.executable, "-m", "insitu", "import", "--overwrite", name, *map(str, sources)]
    environment = {**os.environ, "INSITU_HOME": str(bench.home)}
    started = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    os.sync()
    return seconds


def ensure_rows(bench: Bench) -> None:
    """Make and import all rows, unless they are there. Measures the import where it happens."""
    make_rows(bench)
    if bench.cache_files("rows"):
        return
    sources = bench.sources("rows")
    page_cache.evict(sources)
    common.say(f"  importing {len(sources)} files")
    bench.figures["import_seconds"] = import_cache(bench, "rows", sources)
    bench.figures["import_bytes"] = sum(path.stat().st_size for path in sources)


def rows_per_second(found: dict[str, float]) -> float:
    return found["rows"] / found["seconds"]


def measure_stream(bench: Bench) -> None:
    ensure_rows(bench)
    cache, sources = bench.cache_files("rows"), bench.sources("rows")
    header = header_bytes(sources[0])
    firsts: dict[str, list[float]] = {}

    def reader(name: str, way: str, files: Sequence[Path], **spec: Any) -> Callable[[], float]:
        def run() -> float:
            found = bench.run(way, files, batch=BATCH, **spec)
            firsts.setdefault(name, []).append(found["first"])
            return rows_per_second(found) / (ROW_BYTES if way == "disk" else 1)

        return run

    raw = {"row_bytes": ROW_BYTES, "header_bytes": header}
    contenders = {
        "the disk in order": reader("disk", "disk", cache),
        "insitu": reader("insitu", "insitu", cache, cache="rows", options={"exact": False}),
        "tf.data": reader("tf.data", "tensorflow", sources, **raw),
        "Ray Data": ray_contender(bench, reader),
    }
    results = common.alternate(contenders, "rows/s", bench.rounds)
    print(f"### Shuffled batches of {BATCH} rows of {ROW_BYTES} bytes, {bench.size / 1e9:.1f} GB, cold\n")
    print(common.results_table(results, "insitu", form="{:,.0f}".format) + "\n")
    rows = [[name, f"{min(times):.2f}", f"{max(times):.2f}"] for name, times in firsts.items()]
    print(common.table(["first batch after", "seconds, least", "most"], rows) + "\n")
    bench.figures["stream"] = {"rows_per_second": common.results_json(results), "first": firsts}
    own = results["insitu"].median or 0.0
    for name, result in results.items():
        if name != "insitu" and result.median:
            bench.note("rows/s, shuffled, cold", own, result.median, "{:,.0f}".format, name)
    first = sorted(firsts["insitu"])[len(firsts["insitu"]) // 2]
    bench.note("first batch, s", first, 1.0, "{:.2f}".format, "the target")


def ray_contender(bench: Bench, reader: Callable[..., Callable[[], float]]) -> Callable[[], float]:
    """Ray Data over Parquet files of the same rows, which are made if Ray is installed."""
    import importlib.util

    def missing() -> float:
        raise common.Unavailable("ray is not installed: pip install 'ray[data]'")

    if importlib.util.find_spec("ray") is None:
        return missing
    return reader("Ray Data", "ray", make_parquet(bench))


def make_parquet(bench: Bench) -> list[Path]:
    """Return Parquet files of up to 2 GB of the rows."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    target = bench.folder / "parquet"
    if not target.exists():
        target.mkdir()
        for number, source in enumerate(bench.sources("rows")[:2]):
            rows = np.load(source, mmap_mode="r")
            kind = pa.list_(pa.uint8(), ROW_BYTES)
            schema = pa.schema([pa.field("x", kind)])
            path = target / f"{number}.parquet"
            with parquet.ParquetWriter(path, schema) as writer:
                for start in range(0, len(rows), CHUNK_ROWS):
                    flat = pa.array(np.ascontiguousarray(rows[start : start + CHUNK_ROWS]).reshape(-1))
                    lists = pa.FixedSizeListArray.from_arrays(flat, ROW_BYTES)
                    writer.write_batch(pa.record_batch([lists], schema=schema))
    return bench.sources("parquet")


def measure_workers(bench: Bench) -> None:
    ensure_rows(bench)
    waits = []
    for number in range(bench.rounds):
        common.say(f"  round {number + 1}/{bench.rounds}: two workers")
        page_cache.evict(bench.cache_files("rows"))
        common_spec = {"seconds": bench.seconds, "files": [], "home": str(bench.home), "cache": "rows"}
        spec = common_spec | {"batch": BATCH, "shards": 2, "step": 0.005, "options": {"exact": False}}
        running = [start_reader("insitu", spec | {"shard": shard}) for shard in range(2)]
        waits += [found["waiting"] / found["seconds"] for found in map(finish_reader, running)]
    print("### Two workers with steps of 5 ms\n")
    print(
        "Share of the time in which a worker waits for rows: " + ", ".join(f"{w:.1%}" for w in waits) + "\n"
    )
    bench.figures["workers_waiting"] = waits
    bench.note("waiting of two workers", sorted(waits)[len(waits) // 2], 0.02, "{:.1%}".format, "the target")


def measure_images(bench: Bench) -> None:
    size = min(bench.size, 4 << 30)
    target = bench.folder / "images"
    if not target.exists():
        target.mkdir()
        rng = np.random.default_rng(2)
        piece = rng.integers(0, 255, (1000, IMAGE_BYTES), dtype=np.uint8)
        for number in range(max(1, size // piece.nbytes // 8)):
            array = np.lib.format.open_memmap(
                target / f"{number}.npy", "w+", np.uint8, (8 * len(piece), IMAGE_BYTES)
            )
            for start in range(0, len(array), len(piece)):
                array[start : start + len(piece)] = np.roll(piece, 97 * start + number)
            array.flush()
    if not bench.cache_files("images"):
        import_cache(bench, "images", bench.sources("images"))
    files = bench.cache_files("images")
    contenders = {
        "the disk in order": lambda: rows_per_second(bench.run("disk", files)) / IMAGE_BYTES,
        "insitu": lambda: rows_per_second(
            bench.run("insitu", files, cache="images", batch=32, options={"exact": False})
        ),
    }
    results = common.alternate(contenders, "rows/s", bench.rounds)
    print(f"### Shuffled batches of 32 rows of {IMAGE_BYTES:,} bytes, {size / 1e9:.1f} GB, cold\n")
    print(common.results_table(results, "insitu", form="{:,.0f}".format) + "\n")
    bench.figures["images"] = common.results_json(results)
    own, disk = (results[name].median or 1.0 for name in ("insitu", "the disk in order"))
    bench.note("150 KB rows/s, cold", own, disk, "{:,.0f}".format, "the disk in order")


def measure_memory(bench: Bench) -> None:
    wide, narrow = min(bench.size // ROW_BYTES, 1_000_000), min(bench.size // 8, 50_000_000)
    rng = np.random.default_rng(3)
    for name, shape in (("wide", (wide, ROW_BYTES)), ("narrow", (narrow, 8))):
        target = bench.folder / name
        if not target.exists():
            target.mkdir()
            values = rng.integers(0, 255, shape, dtype=np.uint8)
            np.save(target / "rows.npy", values.view(np.int64)[:, 0] if name == "narrow" else values)
        if not bench.cache_files(name):
            import_cache(bench, name, bench.sources(name))
    rows = np.load(bench.folder / "wide" / "rows.npy")

    def bare_take() -> float:
        order = rng.permutation(len(rows))
        seconds = common.timed(
            lambda: [rows.take(order[s : s + BATCH], 0) for s in range(0, len(rows), BATCH)]
        )
        return len(rows) / seconds

    def reader(name: str, batch: int, epoch: int) -> Callable[[], float]:
        options = {"exact": True}
        spec: dict[str, Any] = {"cache": name, "batch": batch, "options": options, "epoch": epoch}
        return lambda: rows_per_second(bench.run("insitu", [], warm=True, **spec))

    contenders = {"bare np.take": bare_take, "insitu": reader("wide", BATCH, 0)}
    results = common.alternate(contenders, "rows/s", bench.rounds, warm_up=1)
    eight = common.alternate({"rows of 8 bytes": reader("narrow", 8192, 0)}, "rows/s", bench.rounds)
    print("### In memory, shuffled exactly\n")
    print(common.results_table(results, "insitu", form="{:,.0f}".format) + "\n")
    print(common.results_table(eight, "rows of 8 bytes", form="{:,.0f}".format) + "\n")
    bench.figures["memory"] = common.results_json(results) | common.results_json(eight)
    own, bare = (results[name].median or 1.0 for name in ("insitu", "bare np.take"))
    bench.note("784-byte rows/s, in memory", own, bare, "{:,.0f}".format, "np.take")
    narrow_median = eight["rows of 8 bytes"].median or 0.0
    bench.note("8-byte rows/s, in memory", narrow_median, 20e6, "{:,.0f}".format, "the target")


def measure_import(bench: Bench) -> None:
    ensure_rows(bench)
    sources = bench.sources("rows")
    read = rows_per_second(bench.run("disk", sources))
    written = disk_speed.write(bench.folder, min(bench.size, 4 << 30))
    page_cache.evict(sources)
    copied = disk_speed.copy(sources, bench.folder, min(bench.size, 4 << 30))
    disk = {"the disk reads": read, "the disk writes": written, "the disk copies, both at once": copied}
    rows = [[name, f"{speed / 1e6:,.0f}", ""] for name, speed in disk.items()]
    if "import_seconds" in bench.figures:
        speed = bench.figures["import_bytes"] / bench.figures["import_seconds"]
        rows.append([".npy, all rows", f"{speed / 1e6:,.0f}", f"{speed / copied:.2f} of a copy"])
        bench.note("import of .npy, MB/s", speed / 1e6, copied / 1e6, "{:,.0f}".format, "a copy")
    make_parquet(bench)
    make_csv(bench)
    for kind in ("parquet", "csv"):
        files = bench.sources(kind)
        size = sum(path.stat().st_size for path in files)
        alone = [bench.run(kind, files, batch=100_000, seconds=1e9) for _ in range(bench.rounds)]
        reading = size / sorted(found["first"] + found["seconds"] for found in alone)[len(alone) // 2]
        times = []
        for number in range(bench.rounds):
            common.say(f"  round {number + 1}/{bench.rounds}: import of {kind}")
            page_cache.evict(files)
            times.append(import_cache(bench, kind, files))
        importing = size / sorted(times)[len(times) // 2]
        rows.append([f"pyarrow reads {kind}, {size / 1e9:.1f} GB", f"{reading / 1e6:,.0f}", ""])
        rows.append([f"import of {kind}", f"{importing / 1e6:,.0f}", f"{importing / reading:.2f} of pyarrow"])
        bench.note(f"import of {kind}, MB/s", importing / 1e6, reading / 1e6, "{:,.0f}".format, "pyarrow")
    print("### Import, cold\n")
    print(common.table(["", "MB/s of source", ""], rows) + "\n")
    bench.figures["import"] = rows


def make_csv(bench: Bench) -> None:
    """Make a CSV file of 20 columns, of a tenth of the rows' bytes, 1 GB at most."""
    import pyarrow as pa
    import pyarrow.csv as csv

    target = bench.folder / "csv"
    if target.exists():
        return
    target.mkdir()
    rng = np.random.default_rng(4)
    table = pa.table({f"column_{i}": rng.normal(size=20_000).round(6) for i in range(20)})
    with (target / "rows.csv").open("wb") as file:
        while file.tell() < min(1e9, bench.size / 10):
            csv.write_csv(table, file, csv.WriteOptions(include_header=file.tell() == 0))


def measure_restart(bench: Bench) -> None:
    ensure_rows(bench)
    target = bench.folder / "few"
    if not target.exists():
        target.mkdir()
        rows = np.load(bench.sources("rows")[0], mmap_mode="r")
        np.save(target / "few.npy", rows[: 25_000_000 // ROW_BYTES])
    if not bench.cache_files("few"):
        import_cache(bench, "few", bench.sources("few"))

    def starter(name: str) -> Callable[[], float]:
        spec: dict[str, Any] = {"cache": name, "batch": BATCH, "epoch": 3, "place": 0.5, "seconds": 0.0}
        return lambda: bench.run("insitu", bench.cache_files(name), options={}, **spec)["first"]

    contenders = {"25 MB": starter("few"), f"{bench.size / 1e9:.1f} GB": starter("rows")}
    results = common.alternate(contenders, "s", bench.rounds)
    print("### A new process, until its first batch from the middle of epoch 3\n")
    print(common.results_table(results, "25 MB", more_is_better=False, form="{:.3f}".format) + "\n")
    bench.figures["restart"] = common.results_json(results)
    few, all_rows = (result.median or 1.0 for result in results.values())
    bench.note("restart, s", all_rows, few + 1.0, "{:.2f}".format, "25 MB plus 1 s")


MEASURES = {
    "stream": measure_stream,
    "workers": measure_workers,
    "images": measure_images,
    "memory": measure_memory,
    "import": measure_import,
    "restart": measure_restart,
}


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=None, help="of rows (1.5 times the memory)")
    parser.add_argument("--seconds", type=float, default=None, help="of each run (12)")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the files are made (a temporary one)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the files in FOLDER, and use those there")
    parser.add_argument("--data", type=Path, default=common.DRAWINGS, help="of drawings, one .npy a class")
    options = parser.parse_args()
    machine = common.machine()
    size = int((options.gigabytes or (0.3 if options.quick else 1.5 * machine["memory_gb"])) * 1e9)
    folder = Path(options.folder or tempfile.gettempdir()) / "insitu-large-data"
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = options.seconds or (1.0 if options.quick else 12.0)
    bench = Bench(folder, options.data, size, seconds, options.rounds or (1 if options.quick else 2))
    print(common.machine_line(machine) + "\n")
    try:
        for part in options.parts:
            common.say(f"== {part}")
            MEASURES[part](bench)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("### Summary\n")
    print(common.table(["", "insitu", "beside", "ratio"], bench.summary))
    common.save_json(
        options.json, "large_data", machine, bytes=size, figures=bench.figures, summary=bench.summary
    )


if __name__ == "__main__":
    main()
