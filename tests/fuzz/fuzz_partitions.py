"""Coverage-guided fuzzing of the files of partitions. A run ends by the first finding.

    pip install --target /tmp/atheris atheris
    export PYTHONPATH=/tmp/atheris:src:tests/support
    .venv/bin/python tests/fuzz/fuzz_partitions.py mapped -max_total_time=1200

The first argument is the target: `mapped` takes rows of a mapped file, `blocks` reads and verifies blocks.
Both get a whole file with a few edits, since nothing else comes behind the checks of Arrow. `footer` is the
place of each block alone, in any bytes. The rest goes to libFuzzer. A finding is any exception but
CorruptPartition, a signal, rows that aren't those of the file from a verified block, or more than 2 GiB of
memory.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["insitu.grid"]):
    import numpy as np
    from partition_rows import make_rows, write_rows

    from insitu.base.errors import CorruptPartition
    from insitu.base.spec import Column
    from insitu.grid.partitions import TEXT, BlockReader, Partition, row_bytes
    from insitu.grid.partitions.ipc_message import TAIL_BYTES, footer_bytes, read_places

FOLDER = Path(tempfile.mkdtemp(prefix="insitu-fuzz-"))
COLUMNS = (Column("x", "uint8", (5,)), Column("n", "int64"), Column("f", "bool"), Column("t", TEXT))
ROWS, BLOCK_ROWS = 50, 20
VALUES = make_rows(COLUMNS, ROWS)
NUMBERS = [0, 1, 8, 24, 64, 1000, 2**15, 2**31, 2**32, 2**40, 2**62, 2**63, -1]


def read_mapped(path: Path) -> None:
    """Take rows of all blocks, in and out of order."""
    partition = Partition(path, COLUMNS, ROWS, BLOCK_ROWS)
    rows = np.array([49, 0, 19, 20, 39, 40, 3, 3])
    for column in COLUMNS:
        dtype = object if column.dtype == TEXT else column.dtype
        partition.values[column.name].take(rows, np.empty((len(rows), *column.shape), dtype))
        partition.values[column.name].slice(15, ROWS)
        partition.bytes_per_row(column.name)


def read_blocks(path: Path) -> None:
    """Read all blocks, which are verified: rows that are given are right."""
    partition = Partition(path, COLUMNS, ROWS, BLOCK_ROWS)
    for chosen in (COLUMNS, COLUMNS[:2]):
        reader = BlockReader(partition, COLUMNS, chosen)
        for block in range(-(-ROWS // BLOCK_ROWS)):
            if reader.size(block) > 1 << 20:
                continue
            memory = np.empty(reader.size(block), np.uint8)
            reader.read(block, memory)
            first, stop = block * BLOCK_ROWS, min(ROWS, (block + 1) * BLOCK_ROWS)
            for column in chosen:
                expected = VALUES[column.name][first:stop]
                if column.dtype == TEXT:
                    found = reader.texts(block, memory, column.name).to_pylist()
                    assert found == expected.tolist(), "a verified block gave other texts"
                    continue
                start = reader.column_starts(block)[column.name]
                raw = memory[start : start + (stop - first) * row_bytes(column)]
                assert raw.tobytes() == np.ascontiguousarray(expected).tobytes(), "other values"


def edit(whole: bytes, places: list[int], data: bytes) -> bytes:
    """Return `whole` with the edits that `data` describes, most of them close to `places`."""
    drawn, edited = atheris.FuzzedDataProvider(data), bytearray(whole)
    for _ in range(drawn.ConsumeIntInRange(1, 6)):
        at = drawn.PickValueInList(places) + drawn.ConsumeIntInRange(-8, 400)
        at = max(0, min(len(edited) - 1, at))
        match drawn.ConsumeIntInRange(0, 5):
            case 0:
                edited[at] ^= drawn.ConsumeIntInRange(1, 255)
            case 1 | 2 as kind:
                size = 4 * kind
                number = drawn.PickValueInList(NUMBERS) + drawn.ConsumeIntInRange(-9, 9)
                edited[at : at + size] = (number & (1 << 8 * size) - 1).to_bytes(size, "little")
            case 3:
                del edited[at : at + drawn.ConsumeIntInRange(1, 64)]
            case 4:
                edited[at:at] = drawn.ConsumeBytes(drawn.ConsumeIntInRange(1, 64))
            case 5:
                start = drawn.PickValueInList(places)
                edited[at : at + 64] = whole[start : start + 64]
    return bytes(edited)


def read_places_of(data: bytes) -> tuple[int, Any]:
    """Return (start of the footer, places of the blocks). Raises ValueError."""
    end = len(data) - TAIL_BYTES
    start = end - footer_bytes(data[-TAIL_BYTES:], len(data))
    return start, read_places(data[start:end], start)


def find_footers(data: bytes) -> None:
    with suppress(ValueError):
        start, places = read_places_of(data)
        for place in places:
            assert 0 <= place["offset"] <= start, "a place out of the file"
            assert place["offset"] + place["metadata_bytes"] + place["body_bytes"] <= start


def make_target(read: Callable[[Path], None]) -> Callable[[bytes], None]:
    path = FOLDER / "input.arrow"
    write_rows(path, COLUMNS, VALUES, ROWS, BLOCK_ROWS)
    whole = path.read_bytes()
    footer, blocks = read_places_of(whole)
    places = [0, footer, len(whole) - TAIL_BYTES]
    for block in blocks:
        places += [int(block["offset"]), int(block["offset"] + block["metadata_bytes"])]
    read(path)

    def read_one(data: bytes) -> None:
        # Each time under another inode: the one before is still mapped.
        path.unlink(missing_ok=True)
        path.write_bytes(edit(whole, places, data) or b"\0")
        with suppress(CorruptPartition):
            read(path)

    return read_one


TARGETS: dict[str, Callable[[], Callable[[bytes], None]]] = {
    "mapped": lambda: make_target(read_mapped),
    "blocks": lambda: make_target(read_blocks),
    "footer": lambda: find_footers,
}


def main() -> None:
    read_one = TARGETS[sys.argv.pop(1)]()
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    write_rows(corpus / "example", COLUMNS, VALUES, ROWS, BLOCK_ROWS)
    atheris.Setup([sys.argv[0], str(corpus), "-rss_limit_mb=2048", "-max_len=16384", *sys.argv[1:]], read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
