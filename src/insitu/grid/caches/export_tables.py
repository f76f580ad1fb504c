"""Writes the rows of a cache into a table of Delta Lake or PostgreSQL, by one transaction."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import pyarrow as pa

from insitu.base.errors import InputError, InsituError, SourceError
from insitu.base.wording import hide_password
from insitu.grid.caches.arrow_columns import widen_batch, widen_schema
from insitu.grid.caches.export_files import Rows, publish_folder, staged_folder
from insitu.grid.catalog import full_disk_as_error

DELTA, POSTGRESQL = "delta", "postgresql"
_SECONDS_TO_END = 10.0
"""Seconds in which an interrupted library ends."""


class _Feed:
    """Gives rows to a library that reads them in a thread of its own, so that Ctrl-C ends it."""

    def __init__(self, schema: pa.Schema, rows: Rows, *, flat: bool) -> None:
        self._schema = widen_schema(schema, flat=flat)
        self._rows = rows
        self._stopped = False
        self._error: BaseException | None = None

    def _read(self) -> Iterator[pa.RecordBatch]:
        try:
            for _, batch in self._rows:
                self.check()
                yield widen_batch(batch, self._schema)
        except BaseException as error:
            self._error = error
            raise

    def check(self) -> None:
        """Raise RuntimeError if the user has interrupted."""
        if self._stopped:
            raise RuntimeError("interrupted")

    def run(self, write: Callable[[pa.RecordBatchReader], None]) -> None:
        """Call `write` with the rows. Raises what it raises, or what reading the rows has raised."""
        failures = list[BaseException]()

        def work() -> None:
            try:
                write(pa.RecordBatchReader.from_batches(self._schema, self._read()))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException:
            self._stopped = True
            thread.join(_SECONDS_TO_END)
            raise
        if self._error is not None:
            raise self._error
        if failures:
            raise failures[0]


def _make_missing_error(scheme: str, library: str) -> InputError:
    return InputError(
        f"Exports to {scheme}:// need a library that comes with `pip install 'insitu[{scheme}]'`. Received: "
        f"no {library}"
    )


# Delta Lake


class DeltaTable:
    """A table of Delta Lake in a folder of this machine, as delta://PATH."""

    def __init__(self, address: str) -> None:
        """Raises InputError for another address, and without the library."""
        path = address.partition("://")[2]
        if not path or "://" in path:
            raise InputError(
                f"A table of Delta Lake is exported to a folder of this machine, as delta://PATH. Received: "
                f"{address}. Give a path, such as delta:///data/orders"
            )
        try:
            import deltalake
        except ImportError:
            raise _make_missing_error(DELTA, "deltalake") from None
        self._library: Any = deltalake
        self._path = Path(path).expanduser().absolute()
        self.shown = f"{DELTA}://{self._path}"

    def check(self, schema: pa.Schema, *, overwrite: bool) -> None:
        """Raise InputError if the table can't be written."""
        if not self._path.parent.is_dir():
            raise InputError(
                f"An export is put into a folder that is there. Received: {self.shown}. Make "
                f"{self._path.parent} first"
            )
        if self._is_empty():
            return
        if not (self._path.is_dir() and self._library.DeltaTable.is_deltatable(str(self._path))):
            raise InputError(
                f"A table of Delta Lake replaces such a table alone. Received: {self._path}, which is "
                f"another thing. Give another path"
            )
        if not overwrite:
            raise InputError(
                f"An export replaces nothing without --overwrite. Received: {self.shown}, which is there "
                f"already. Give --overwrite, or another path"
            )

    def _is_empty(self) -> bool:
        return not self._path.exists() or (self._path.is_dir() and not any(self._path.iterdir()))

    def write(self, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
        """Make the table of all rows, or its next version if it is there."""
        feed = _Feed(schema, rows, flat=False)
        with full_disk_as_error(self._path, advice="Free some space"), self._errors():
            if not self._is_empty():
                feed.run(lambda reader: self._write(self._path, reader, "overwrite"))
                return
            with staged_folder(self._path) as staged:
                feed.run(lambda reader: self._write(staged, reader, "error"))
                publish_folder(staged, self._path, lambda: self.check(schema, overwrite=False))

    def _write(self, path: Path, reader: pa.RecordBatchReader, mode: str) -> None:
        schema_mode = "overwrite" if mode == "overwrite" else None
        self._library.write_deltalake(str(path), reader, mode=mode, schema_mode=schema_mode)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what the library raises, which may be of any class, into SourceError."""
        try:
            yield
        except Exception as error:
            if isinstance(error, InsituError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise SourceError(
                f"Delta Lake must take the rows. Received: {error}, for {self.shown}. The table is as it was"
            ) from error


# PostgreSQL


class PostgresqlTable:
    """A table of PostgreSQL, as postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE/[SCHEMA.]TABLE."""

    def __init__(self, address: str) -> None:
        """Raises InputError for another address, and without the library."""
        self.shown = hide_password(address)
        try:
            parts = urlsplit(address)
        except ValueError:  # its message has the URL
            parts = urlsplit("")
        database, _, table = parts.path.removeprefix("/").partition("/")
        schema, _, name = unquote(table).rpartition(".")
        if not (parts.netloc and database and name) or "/" in table:
            raise InputError(
                f"A table of PostgreSQL is postgresql://[USER@]HOST[:PORT]/DATABASE/[SCHEMA.]TABLE. "
                f"Received: {self.shown}. Name the database and the table"
            )
        try:
            import adbc_driver_postgresql.dbapi as driver
        except ImportError:
            raise _make_missing_error(POSTGRESQL, "adbc-driver-postgresql") from None
        self._driver: Any = driver
        self._table, self._schema = name, schema or None
        self._uri = urlunsplit((parts.scheme, parts.netloc, f"/{database}", parts.query, ""))
        password = parts.netloc.rpartition("@")[0].partition(":")[2]
        found = [password, *re.findall(r"(?:^|&)(?:ssl)?password=([^&]+)", parts.query)]
        #: Texts that no message has.
        self._secrets = {each for text in found for each in (text, unquote(text)) if each}

    def check(self, schema: pa.Schema, *, overwrite: bool) -> None:
        """Raise InputError if the table is there, SourceError if the server doesn't answer."""
        with self._errors(), self._driver.connect(self._uri) as connection:
            try:
                connection.adbc_get_table_schema(self._table, db_schema_filter=self._schema)
            except (self._driver.ProgrammingError, self._driver.InternalError, self._driver.DataError):
                return  # there is none
        if not overwrite:
            raise InputError(
                f"An export replaces nothing without --overwrite. Received: {self.shown}, which is there "
                f"already. Give --overwrite, or another table"
            )

    def write(self, schema: pa.Schema, rows: Rows, *, overwrite: bool) -> None:
        """Make the table of all rows, or replace it, by one transaction."""
        feed, mode = _Feed(schema, rows, flat=True), "replace" if overwrite else "create"

        def ingest(reader: pa.RecordBatchReader) -> None:
            with self._driver.connect(self._uri) as connection, connection.cursor() as cursor:
                cursor.adbc_ingest(self._table, reader, mode=mode, db_schema_name=self._schema)
                feed.check()
                connection.commit()

        with self._errors():
            feed.run(ingest)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what the driver raises into SourceError, without what is secret."""
        try:
            yield
        except InsituError:
            raise
        except Exception as error:
            text = str(error)
            for secret in sorted(self._secrets, key=len, reverse=True):
                text = text.replace(secret, "***")
            raise SourceError(
                f"PostgreSQL must take the rows. Received: {text.strip()}, for {self.shown}. The table is as "
                f"it was"
            ) from None
