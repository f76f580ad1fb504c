"""Files that Ray reads as sources: their rows come in the order of files and rows, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.errors import InputError, SourceError
from insitu.grid.ray_data.opening import RayReader, open_ray_sources
from insitu.grid.ray_data.readers import ReaderRequest
from insitu.grid.sources import ArrowSource, ColumnOptions, FileGroup, SourceOptions

ROWS = 10


class FakeSession:
    """Reads files whose text is the number of their first row, as Ray would, a few rows at a time."""

    def __init__(self) -> None:
        self.read: list[list[str]] = []
        self.closed = 0
        #: Changes what a reading gives.
        self.change: Callable[[list[Any]], list[Any]] = lambda tables: tables
        self.connected: list[bool] = []

    def connect(self, *, to_cluster: bool) -> None:
        self.connected.append(to_cluster)

    def close(self) -> None:
        self.closed += 1

    def check_seen(self, states: dict[str, tuple[int, int]]) -> None:
        pass

    def read_tables(
        self, names: Sequence[str], *, include_paths: bool, rows: int | None = None
    ) -> Iterator[Any]:
        self.read.append(list(names))
        tables = []
        for name in names:
            first = int(Path(name).read_text())
            for start in range(first, first + ROWS, 4):
                x = np.arange(start, min(start + 4, first + ROWS))
                table = pa.table({"y": x.astype("float32"), "x": x})
                paths = {"path": pa.array([name] * len(x))} if include_paths else {}
                tables.append(
                    pa.table({**dict(zip(table.column_names, table.columns, strict=True)), **paths})
                )
        # Ray may put rows of two files into one block.
        yield from self.change([pa.concat_tables(tables[:4]), *tables[4:]] if len(tables) > 4 else tables)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(4):
        (tmp_path / f"{number}.csv").write_text(str(number * ROWS))
    return tmp_path


def open_csv(session: FakeSession, folder: Path, name: str = "csv", **options: Any) -> list[ArrowSource]:
    reader = RayReader(ReaderRequest(name, options), session)  # type: ignore[arg-type]
    return open_ray_sources(reader, [str(folder)], None, SourceOptions())


def numbers(source: ArrowSource, block_bytes: int = 36, start: int = 0) -> list[int]:
    return [int(x) for block in source.blocks(block_bytes, start) for x in block.columns["x"]]


def test_all_files_are_one_reading(session: FakeSession, folder: Path) -> None:
    sources = open_csv(session, folder)
    assert session.connected == [False] and session.read == [[str(folder / "0.csv")]]
    assert [str(source.path) for source in sources] == [str(folder / f"{i}.csv") for i in range(4)]
    found = [numbers(source) for source in sources]
    assert found == [list(range(i * ROWS, (i + 1) * ROWS)) for i in range(4)]
    assert len(session.read) == 2 and len(session.read[1]) == 4


def test_blocks_begin_with_any_row(session: FakeSession, folder: Path) -> None:
    source = open_csv(session, folder)[2]
    blocks = list(source.blocks(36))
    assert [block.rows for block in blocks] == [3, 3, 3, 1] and blocks[-1].next_start == ROWS
    for block in blocks:
        assert numbers(source, start=block.next_start) == list(range(20 + block.next_start, 30))
    assert all(names == [str(folder / f"{i}.csv") for i in (2, 3)] for names in session.read[1:])


def test_a_reading_that_was_left_begins_again(session: FakeSession, folder: Path) -> None:
    sources = open_csv(session, folder)
    next(iter(sources[0].blocks(36)))
    assert numbers(sources[0]) == list(range(10)) and numbers(sources[1]) == list(range(10, 20))
    assert numbers(sources[3]) == list(range(30, 40))
    assert [len(names) for names in session.read] == [1, 4, 4, 1]


DISORDERS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "files in another order": (
        lambda tables: tables[::-1],
        "0.csv must have rows for Ray's reader. Received: none",
    ),
    "a file twice": (lambda tables: [*tables, tables[0]], "file by file, in the order of their names"),
    "a file left out": (lambda tables: tables[:4], "3.csv must have rows for Ray's reader. Received: none"),
    "a file of others": (
        lambda tables: [pa.table({"y": [0.0], "x": [1], "path": ["/other"]}), *tables],
        "Received: rows of /other",
    ),
    "other columns": (
        lambda tables: [*tables[:-1], tables[-1].drop_columns(["y"])],
        "All rows must have the same columns: y, x. Received: x in .*3.csv",
    ),
}


@pytest.mark.parametrize("disorder", DISORDERS)
def test_rows_in_any_other_order_are_refused(session: FakeSession, folder: Path, disorder: str) -> None:
    sources = open_csv(session, folder)
    session.change, message = DISORDERS[disorder]
    with pytest.raises(SourceError, match=message):
        for source in sources:
            numbers(source)


def test_rows_that_the_footer_does_not_count_are_refused(session: FakeSession, tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "a.parquet")

    def read_tables(names: Sequence[str], *, include_paths: bool, rows: int | None = None) -> Iterator[Any]:
        columns = {"x": [1, 2], **({"path": list(names) * 2} if include_paths else {})}
        yield pa.table(columns)

    session.read_tables = read_tables  # type: ignore[method-assign]
    (source,) = open_csv(session, tmp_path, "parquet")
    assert source.expected_rows == 3
    with pytest.raises(SourceError, match=r"a.parquet must have 3 rows for Ray's reader. Received: 2"):
        numbers(source)


def test_small_files_are_sources_together(session: FakeSession, tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"{number:02}.png").write_text(str(number))
    sources = open_csv(session, tmp_path, "images")
    assert [source.expected_rows for source in sources] == [64, 6]
    group = sources[0].path
    assert isinstance(group, FileGroup) and str(group).endswith("00.png and the 63 files behind it")
    before = group.stat()
    (tmp_path / "63.png").write_text("changed")
    after = group.stat()
    assert after.st_size == before.st_size + 5 and after.st_mtime_ns != before.st_mtime_ns


def test_paths_are_kept_where_they_are_asked_for(session: FakeSession, folder: Path) -> None:
    sources = open_csv(session, folder, include_paths=True)
    assert [column.name for column in sources[0].columns] == ["y", "x", "path"]
    block = next(iter(sources[1].blocks(1 << 20)))
    assert block.columns["path"].to_pylist() == [str(folder / "1.csv")] * block.rows


def test_what_names_no_such_file_or_column_is_refused(session: FakeSession, folder: Path) -> None:
    reader = RayReader(ReaderRequest("csv"), session)  # type: ignore[arg-type]
    options = SourceOptions(fields=ColumnOptions(without=frozenset({"z"})))
    with pytest.raises(InputError, match=r"names columns that the files have: y, x. Received: z"):
        open_ray_sources(reader, [str(folder)], None, options)
    with pytest.raises(SourceError, match=r"holds no file that ends in \.png, .*Received: 4 \.csv"):
        open_csv(session, folder, "images")
    (folder / "0.csv").write_text("")
    with pytest.raises(SourceError, match=r"0\.csv is empty \(0 bytes\)"):
        open_csv(session, folder)
    with reader:
        pass
    assert session.closed == 1
