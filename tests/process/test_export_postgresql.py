"""Rows that are exported into a real server of PostgreSQL, if this machine has its programs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from free_ports import free_addresses

from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import export_rows, import_cache, read_blocks
from insitu.grid.caches import cache_export

driver = pytest.importorskip("adbc_driver_postgresql.dbapi")
PASSWORD = "s3cr3t/@:"
ENCODED = "s3cr3t%2F%40%3A"
COUNT = 500


def find_programs() -> Path | None:
    """Return the folder of initdb and pg_ctl."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((each for each in folders[::-1] if (each / "initdb").exists()), None)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of its own; yields user, password, host and port, as in URLs."""
    programs = find_programs()
    if programs is None:
        pytest.skip("no programs of PostgreSQL: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="insitu-postgresql-"))
    options: dict[str, Any] = {}
    if os.getuid() == 0:  # the server refuses root
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("root needs a user postgres to start a server")
        options = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(folder, "postgres", "postgres")
    (folder / "password").write_text(PASSWORD)
    port, data = free_addresses(1)[0].rpartition(":")[2], folder / "data"

    def call(*arguments: object) -> None:
        command = [str(each) for each in arguments]
        subprocess.run(command, check=True, timeout=120, cwd="/", stdout=subprocess.DEVNULL, **options)

    os.chmod(folder / "password", 0o644)
    call(programs / "initdb", "-D", data, "-A", "scram-sha-256", "-U", "me", "--pwfile", folder / "password")
    control = (programs / "pg_ctl", "-D", data, "-w")
    call(*control, "-l", folder / "log", "-o", f"-p {port} -k {folder} -h 127.0.0.1 -F", "start")
    try:
        yield f"me:{ENCODED}@127.0.0.1:{port}"
    finally:
        call(*control, "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def rows(home: Path, tmp_path: Path) -> CacheSpec:
    table = {
        "id": np.arange(COUNT),
        "small": (np.arange(COUNT) % 256).astype(np.uint8),
        "half": (np.arange(COUNT) / 4).astype(np.float16),
        "flag": np.arange(COUNT) % 2 == 0,
        "word": [f"w\u00e4\t\n{n % 5}" for n in range(COUNT)],
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.arange(6 * COUNT, dtype=np.int32).reshape(COUNT, 2, 3)
        ),
        "tokens": pa.array([list(range(n % 3)) for n in range(COUNT)], pa.list_(pa.int64())),
    }
    pq.write_table(pa.table(table), tmp_path / "source.parquet")
    source = [str(tmp_path / "source.parquet")]
    return import_cache(Paths(home), "rows", source, partitions=3, ragged=["tokens"])[0]


def read(server: str, table: str, columns: str = "*") -> list[tuple[Any, ...]]:
    with driver.connect(f"postgresql://{server}/postgres") as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT {columns} FROM {table} ORDER BY 1")
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def test_a_table_has_equal_rows(home: Path, server: str, rows: CacheSpec) -> None:
    paths, address = Paths(home), f"postgresql://{server}/postgres/public.exported"
    done = export_rows(paths, rows, address, row_id="row")
    assert "s3cr3t" not in done.address and "***" in done.address
    expected = []
    for block in read_blocks(paths, rows, [column.name for column in rows.columns]):
        values = block.values
        for index, number in enumerate(block.numbers.tolist()):
            plain = [values[name][index].item() for name in ("id", "small", "half", "flag")]
            lists = values["image"][index].reshape(-1).tolist()
            tokens = np.frombuffer(values["tokens"][index].as_buffer(), np.int64).tolist()
            expected.append((number, *plain, values["word"][index].as_py(), lists, tokens))
    assert read(server, "exported") == expected
    with pytest.raises(InputError, match="--overwrite") as refused:
        export_rows(paths, rows, address)
    assert "s3cr3t" not in str(refused.value)
    export_rows(paths, rows, address, columns=["id"], limit=7, overwrite=True)
    assert len(read(server, "exported")) == 7


def test_an_interrupted_export_changes_nothing(
    home: Path, server: str, rows: CacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, make = Paths(home), cache_export.make_batch
    export_rows(paths, rows, f"postgresql://{server}/postgres/kept", columns=["id"], limit=3)

    def fail(*given: Any) -> Any:
        if given[3][0] > 0:
            raise SourceError("the disk fails")
        return make(*given)

    monkeypatch.setattr(cache_export, "make_batch", fail)
    for table, overwrite in (("kept", True), ("fresh", False)):
        with pytest.raises(SourceError, match="the disk fails"):
            place = f"postgresql://{server}/postgres/{table}"
            export_rows(paths, rows, place, columns=["id"], overwrite=overwrite)
    assert len(read(server, "kept")) == 3
    assert read(server, "pg_tables", "tablename").count(("fresh",)) == 0


def test_the_command_ends_at_an_interrupt(home: Path, server: str, rows: CacheSpec, tmp_path: Path) -> None:
    """The server holds the table locked, so that the export waits for it."""
    place = f"postgresql://{server}/postgres/locked"
    export_rows(Paths(home), rows, place, columns=["id"], limit=3)
    with driver.connect(f"postgresql://{server}/postgres") as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
        command = [sys.executable, "-m", "insitu", "export", "rows", place, "--columns", "id", "--overwrite"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            deadline = time.monotonic() + 60
            query = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while time.monotonic() < deadline:
                cursor.execute(query)
                if cursor.fetchone()[0]:
                    break
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130 and "s3cr3t" not in said
    assert len(read(server, "locked")) == 3


@pytest.mark.parametrize(
    ("replaced", "message"),
    [((ENCODED, "wr0ng"), "password authentication failed"), (("127.0.0.1:", "127.0.0.1:1"), "port")],
)
def test_messages_have_no_passwords(
    home: Path, server: str, rows: CacheSpec, replaced: tuple[str, str], message: str
) -> None:
    place = f"postgresql://{server.replace(*replaced)}/postgres/t"
    with pytest.raises(SourceError, match=message) as refused:
        export_rows(Paths(home), rows, place, columns=["id"])
    assert "wr0ng" not in str(refused.value) and "s3cr3t" not in str(refused.value)
