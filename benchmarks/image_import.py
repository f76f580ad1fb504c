"""How fast `insitu import` decodes folders of images, beside Pillow alone on the same cores.

    python benchmarks/image_import.py
    python benchmarks/image_import.py --quick

Contenders read, decode and scale the same files: insitu's source of images, a whole import in a process of
its own whose modules are loaded, and Pillow in threads and in processes, as many as there are cores. insitu
decodes in threads. Figures are images per second, and the ratios of decoding to Pillow alone. Processes don't
share the interpreter's lock, which limits threads that decode small images.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import common
import numpy as np
from PIL import Image, ImageFilter

from insitu.grid.sources import SourceOptions, find_sources, group_images, open_sources

KINDS = {
    # name: (suffix, width and height of files, HEIGHTxWIDTHxCHANNELS, files, files with --quick)
    "JPEG 500x375 to 224x224x3": (".jpg", (500, 375), (224, 224, 3), 1000, 20),
    "JPEG 3000x2000 to 224x224x3": (".jpg", (3000, 2000), (224, 224, 3), 40, 4),
    "PNG 96x96 to 96x96x3": (".png", (96, 96), (96, 96, 3), 3000, 20),
    "PNG 28x28 to 28x28x1": (".png", (28, 28), (28, 28, 1), 8000, 20),
}
CORES = len(os.sched_getaffinity(0))

CHILD = """
import sys, time
import insitu.grid.importing.importer, insitu.grid.sources.images, PIL.Image
from insitu.grid import import_cache
from insitu.base.paths import Paths
shape = tuple(map(int, sys.argv[2].split("x")))
options = {"images": shape, "label_from_folder": True, "overwrite": True}
started = time.perf_counter()
import_cache(Paths.default(), "benchmark", [sys.argv[1]], **options)
print(time.perf_counter() - started)
"""


def make_files(folder: Path, suffix: str, size: tuple[int, int], count: int) -> None:
    """Write images with the detail of photographs: noise of several scales."""
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 255, (size[1] + 64, size[0] + 64, 3), dtype=np.uint8))
    smooth = noise.filter(ImageFilter.GaussianBlur(3))
    encoded = []
    for seed in range(8):
        image = smooth.crop((seed * 8, seed * 8, seed * 8 + size[0], seed * 8 + size[1]))
        sink = io.BytesIO()
        (image.convert("L") if size == (28, 28) else image).save(sink, "JPEG" if suffix == ".jpg" else "PNG")
        encoded.append(sink.getvalue())
    for number in range(count):
        target = folder / f"class-{number % 10}" / f"{number:06}{suffix}"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(encoded[number % len(encoded)])


def decode(path: str, shape: tuple[int, int, int]) -> int:
    with Image.open(path) as image:
        converted = image.convert("L" if shape[2] == 1 else "RGB")
        if converted.size != (shape[1], shape[0]):
            converted = converted.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
        return int(np.asarray(converted).size)


def by_pillow(pool: Executor, paths: list[str], shape: tuple[int, int, int]) -> float:
    started = time.perf_counter()
    list(pool.map(partial(decode, shape=shape), paths, chunksize=16))
    return len(paths) / (time.perf_counter() - started)


def by_source(folder: Path, shape: tuple[int, int, int], count: int) -> float:
    started = time.perf_counter()
    sources = open_sources(group_images(find_sources([str(folder)], None)), SourceOptions(images=shape))
    rows = sum(block.rows for source in sources for block in source.blocks(4 << 20))
    assert rows == count
    return count / (time.perf_counter() - started)


def by_import(folder: Path, home: Path, shape: tuple[int, int, int], count: int) -> float:
    command = [sys.executable, "-c", CHILD, str(folder), "x".join(map(str, shape))]
    environment = {**os.environ, "INSITU_HOME": str(home)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return count / float(done.stdout)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=None, help="where to put the files (a temporary one)")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 3)
    machine = common.machine()
    rows, saved = [], {}
    with (
        ProcessPoolExecutor(CORES) as processes,
        ThreadPoolExecutor(CORES) as threads,
        tempfile.TemporaryDirectory(dir=options.folder) as root,
    ):
        for number, (name, (suffix, size, shape, many, few)) in enumerate(KINDS.items()):
            folder, count = Path(root) / str(number), few if options.quick else many
            folder.mkdir()
            make_files(folder, suffix, size, count)
            paths = sorted(map(str, folder.glob("*/*")))
            contenders: dict[str, Callable[[], float]] = {
                "Pillow, threads": partial(by_pillow, threads, paths, shape),
                "Pillow, processes": partial(by_pillow, processes, paths, shape),
                "insitu, decoding": partial(by_source, folder, shape, count),
                "insitu, whole import": partial(by_import, folder, Path(root) / "home", shape, count),
            }
            results = common.alternate(contenders, "images/s", rounds, warm_up=0 if options.quick else 1)
            medians = {one: result.median or 0.0 for one, result in results.items()}
            alone = medians["Pillow, threads"], medians["Pillow, processes"]
            ratios = [f"{medians['insitu, decoding'] / each:.2f}" for each in alone]
            rows.append([name, *(f"{median:,.0f}" for median in medians.values()), *ratios])
            saved[name] = common.results_json(results)
    print(common.machine_line(machine) + "\n")
    header = ["images", *medians, "to threads", "to processes"]
    print(common.table(header, rows))
    common.save_json(options.json, "image_import", machine, results=saved)


if __name__ == "__main__":
    main()
