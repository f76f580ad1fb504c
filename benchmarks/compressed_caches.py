"""Compressed caches beside uncompressed ones, on disks of several speeds.

    python benchmarks/compressed_caches.py --folder FOLDER                  # 2 GB: about 6 minutes
    python benchmarks/compressed_caches.py --folder FOLDER --speeds 50 200 0 --gigabytes 4

Rows are drawings of 784 bytes (Quick, Draw! bitmaps, by default in ../shared/data/quickdraw beside the
checkout; else random ones of few strokes) with an int64 label, in an order drawn at random. The same rows are
imported as they are, with `--compress lz4` and with `--compress zstd`. Each run is a process of its own that
reads shuffled batches of 256 rows in windows for `--seconds` after its first batch, with the files out of the
page cache. A disk of so many megabytes a second is made by the reading process itself: its reads wait, all
threads together, as long as such a disk would take. 0: the disk as it is.

Printed are the size of each cache, the seconds and processor seconds of its import, and for each speed rows/s
and the processor time of a row.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import page_cache

DRAWINGS = Path(__file__).resolve().parents[2] / "shared" / "data" / "quickdraw"
ROW_BYTES, BATCH, CHUNK_ROWS = 784, 256, 100_000
CODECS = ("none", "lz4", "zstd")


class SlowDisk:
    """Takes the place of `os.preadv`: all threads together read so many bytes a second."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._read = os.preadv

    def __call__(self, descriptor: int, buffers: Any, offset: int) -> int:
        size = self._read(descriptor, buffers, offset)
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + size / self._speed
            wait = self._free_at - now
        time.sleep(wait)
        return size


def read(spec: dict[str, Any]) -> None:
    """Read a cache for some seconds; print {"rows", "seconds", "processor", "first"} as JSON."""
    from insitu.base.context import Context
    from insitu.base.paths import Paths
    from insitu.grid import dataset

    if spec["speed"]:
        os.preadv = SlowDisk(spec["speed"] * 1e6)  # type: ignore[assignment]
    context = Context(paths=Paths(Path(spec["home"])))
    data = dataset(spec["cache"], context=context).shuffle(0, exact=False).batch(BATCH)
    started = time.perf_counter()
    batches = data.shard_batches(0, 0)
    next(batches)
    begun, used, rows = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        rows += batch.rows
        if time.perf_counter() - begun > spec["seconds"]:
            break
    found = {
        "rows": rows,
        "seconds": time.perf_counter() - begun,
        "processor": time.process_time() - used,
        "first": begun - started,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # whatever still reads ahead


def read_drawings(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return drawings [rows, 784] and their classes."""
    if folder.is_dir():
        parts = [np.load(path) for path in sorted(folder.glob("*.npy"))]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    rng = np.random.default_rng(0)
    rows = np.zeros((30_000, 28, 28), np.uint8)
    for number in range(30_000):  # some strokes on white paper
        for x, y in rng.integers(0, 20, (4, 2)):
            rows[number, x : x + rng.integers(2, 8), y : y + 2] = rng.integers(100, 255)
    return rows.reshape(-1, ROW_BYTES), rng.integers(0, 10, 30_000)


def make_rows(folder: Path, drawings: Path, size: int) -> list[Path]:
    """Make .npz files of about `size` bytes of rows."""
    images, labels = read_drawings(drawings)
    rng = np.random.default_rng(1)
    paths = []
    for number in range(max(1, round(size / ROW_BYTES / CHUNK_ROWS))):
        chosen = rng.integers(0, len(images), CHUNK_ROWS)
        paths.append(folder / f"rows-{number:04d}.npz")
        np.savez(paths[-1], x=images[chosen], label=labels[chosen].astype(np.int64))
    return paths


def import_rows(home: Path, codec: str, sources: list[Path]) -> tuple[float, float]:
    """Import into the cache with the codec's name; return seconds and processor seconds."""
    command = [sys.executable, "-m", "insitu", "import", codec, *map(str, sources)]
    command += [] if codec == "none" else ["--compress", codec]
    page_cache.evict(sources)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command, env={**os.environ, "INSITU_HOME": str(home)}, check=True, stdout=subprocess.DEVNULL
    )
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(home: Path, codec: str, speed: float, seconds: float) -> dict[str, float]:
    files = [p for p in (home / "nodes").rglob("*.arrow") if f"/{codec}/" in str(p)]
    share = page_cache.evict(files)
    if share > 0.02:
        raise SystemExit(f"{share:.0%} of the files are still in the page cache")
    spec = {"home": str(home), "cache": codec, "speed": speed, "seconds": seconds}
    command = [sys.executable, __file__, "--read", json.dumps(spec)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def measure_speeds(
    home: Path, speeds: list[float], seconds: float, rounds: int
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the lines of the table, and all figures."""
    rows, figures = [], {}
    for speed in speeds:
        found: dict[str, list[dict[str, float]]] = {codec: [] for codec in CODECS}
        for _ in range(rounds):
            for codec in CODECS:
                common.say(f"  {speed:g} MB/s, {codec}")
                found[codec].append(measure(home, codec, speed, seconds))
        rates = {c: float(np.median([f["rows"] / f["seconds"] for f in found[c]])) for c in CODECS}
        costs = {c: float(np.median([f["processor"] / f["rows"] for f in found[c]])) for c in CODECS}
        cells = [
            f"{rates[c]:,.0f} ({rates[c] / rates['none']:.2f}), {costs[c] * 1e9:,.0f} ns" for c in CODECS
        ]
        rows.append([f"{speed:g} MB/s" if speed else "as it is", *cells])
        figures[f"{speed:g}"] = found
    return rows, figures


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read(json.loads(sys.argv[2]))
    parser = common.parser(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=None, help="of rows (2)")
    parser.add_argument("--seconds", type=float, default=None, help="of each run (8)")
    parser.add_argument(
        "--speeds", type=float, nargs="*", default=None, help="megabytes a second; 0: as it is"
    )
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the files are made (a temporary one)"
    )
    parser.add_argument("--data", type=Path, default=DRAWINGS, help="folder with drawings, one .npy a class")
    options = parser.parse_args()
    machine = common.machine()
    size = int((options.gigabytes or (0.1 if options.quick else 2.0)) * 1e9)
    seconds = options.seconds or (1.0 if options.quick else 8.0)
    speeds = options.speeds or ([100.0, 0.0] if options.quick else [50.0, 100.0, 200.0, 400.0, 0.0])
    folder = Path(tempfile.mkdtemp(prefix="insitu-compressed-", dir=options.folder))
    home = folder / "home"
    print(common.machine_line(machine) + "\n")
    try:
        sources = make_rows(folder, options.data, size)
        imports = {codec: import_rows(home, codec, sources) for codec in CODECS}
        for source in sources:
            source.unlink()
        sizes = {
            c: sum(p.stat().st_size for p in (home / "nodes").rglob("*.arrow") if f"/{c}/" in str(p))
            for c in CODECS
        }
        lines = [
            [
                c,
                f"{sizes[c] / 1e6:,.0f} MB",
                f"{sizes[c] / sizes['none']:.2f}",
                *(f"{s:.1f}" for s in imports[c]),
            ]
            for c in CODECS
        ]
        print(common.table(["compression", "size", "ratio", "import, s", "processor, s"], lines) + "\n")
        rounds = options.rounds or (1 if options.quick else 3)
        rows, figures = measure_speeds(home, speeds, seconds, rounds)
        print("rows/s (in relation to none), processor time of a row\n")
        print(common.table(["disk", *CODECS], rows))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    common.save_json(options.json, "compressed_caches", machine, sizes=sizes, imports=imports, speeds=figures)


if __name__ == "__main__":
    main()
