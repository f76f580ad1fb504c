"""Writes the rows of a cache into a file, or a folder with a Parquet file a partition.

Each gets its name by one rename once it is whole. An error or an interrupt leaves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from insitu.base.disk.durable import replace_folder, staged_file, sync_folder, sync_tree
from insitu.base.errors import InputError
from insitu.grid.catalog import full_disk_as_error

PARQUET, ARROW, CSV = ".parquet", ".arrow", ".csv"
_GROUP_BYTES = 64 << 20
"""Bytes of a row group of Parquet, about, before compression."""
_PART = "part-{:05d}.parquet"
_IS_PART = re.compile(r"part-\d{5,}\.parquet")

Rows = Iterable[tuple[int, pa.RecordBatch]]
"""(partition, some rows of it), in the order of the partitions."""


def check_file(path: Path, *, overwrite: bool) -> None:
    """Raise InputError if a file can't get this name."""
    _check_parent(path)
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise InputError(f"A file replaces a file alone. Received: {path}, which is another thing. Give "
                         f"another name, or end it with / for a folder")  # fmt: skip
    if os.path.lexists(path) and not overwrite:
        raise _make_exists_error(path)


def check_csv(schema: pa.Schema) -> None:
    """Raise InputError if a column has several values a row."""
    bad = [f.name for f in schema if isinstance(f.type, pa.BaseExtensionType) or f.type.num_fields]
    if bad:
        rest = ",".join(field.name for field in schema if field.name not in bad)
        raise InputError(
            f"A CSV file has one value a row and column. Received: {', '.join(bad)} with several. Export to "
            f"a .parquet file{f', or leave them out by --columns {rest}' if rest else ''}"
        )


def write_file(path: Path, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
    """Write rows into a new file of the format that the end of its name says.

    Raises InputError, StorageFull.
    """
    with staged_file(path) as staged, full_disk_as_error(path, advice="Free some space"):
        batches: Iterable[Any] = (batch for _, batch in rows)
        if path.suffix == PARQUET:
            _write_parquet(staged, schema, batches)
        elif path.suffix == ARROW:
            with pa.OSFile(str(staged), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        else:
            with pyarrow.csv.CSVWriter(str(staged), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        sync_tree(staged)
        _publish(staged, path, overwrite=overwrite)


def _write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with pq.ParquetWriter(str(path), schema) as writer:
        group, size = list[pa.RecordBatch](), 0
        for batch in batches:
            group.append(batch)
            size += batch.nbytes
            if size >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(group, schema))
                group, size = [], 0
        if group:
            writer.write_table(pa.Table.from_batches(group, schema))


def _publish(staged: Path, path: Path, *, overwrite: bool) -> None:
    """Give a whole file its name. Raises InputError if another process has made one meanwhile."""
    if overwrite:
        staged.replace(path)
    else:
        try:
            os.link(staged, path)
        except FileExistsError:
            raise _make_exists_error(path) from None
        except OSError:  # a file system without links
            staged.replace(path)
    sync_folder(path.parent)


def check_folder(path: Path, *, overwrite: bool) -> None:
    """Raise InputError if a folder can't get this name, or holds anything but an earlier export."""
    _check_parent(path)
    if not os.path.lexists(path):
        return
    if not path.is_dir() or path.is_symlink():
        raise InputError(f"A folder is made for an export. Received: {path}, which is another thing. Give "
                         f"another name")  # fmt: skip
    held = os.listdir(path)
    if held and not overwrite:
        raise _make_exists_error(path)
    others = sorted(name for name in held if not _IS_PART.fullmatch(name))
    if others:
        raise InputError(
            f"--overwrite replaces a folder that holds nothing but part-NNNNN.parquet files of an earlier "
            f"export. Received: {path}, which holds {others[0]}. Give another folder"
        )


def write_folder(path: Path, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
    """Write each partition that has rows into a Parquet file of a new folder.

    Raises InputError, StorageFull.
    """
    with staged_folder(path) as staged, full_disk_as_error(path, advice="Free some space"):
        for index, some in itertools.groupby(rows, key=lambda pair: pair[0]):
            _write_parquet(staged / _PART.format(index), schema, (batch for _, batch in some))
        publish_folder(staged, path, lambda: check_folder(path, overwrite=overwrite))


def publish_folder(staged: Path, path: Path, check: Callable[[], None]) -> None:
    """Give a whole folder its name, in place of a previous one, once `check` has found that right."""
    sync_tree(staged)
    check()
    old = replace_folder(staged, path)
    sync_folder(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def staged_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, to be filled and renamed. It is removed if it is still there."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    staged.mkdir()
    try:
        yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"An export is put into a folder that is there. Received: {path}. Make "
                         f"{path.parent} first")  # fmt: skip


def _make_exists_error(path: Path) -> InputError:
    return InputError(f"An export replaces nothing without --overwrite. Received: {path}, which is there "
                      f"already. Give --overwrite, or another name")  # fmt: skip
