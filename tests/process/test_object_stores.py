"""Imports from stores of objects, with the packages that fsspec has for them. Run by `make test-stores`."""

from __future__ import annotations

import contextlib
import gzip
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agent_hosts import LoopbackHosts, insitu
from hdfs_server import find_obstacle
from object_stores import S3, Gcs, Hdfs, Hub, Store, Web, WebHdfs
from record_writer import encode_example, frame

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import Catalog, bring_up, import_cache

pytestmark = pytest.mark.long
STORES: dict[str, tuple[type[Store], str]] = {
    "s3": (S3, "s3fs"),
    "gs": (Gcs, "gcsfs"),
    "http": (Web, "aiohttp"),
    "hf": (Hub, "huggingface_hub"),
    "webhdfs": (WebHdfs, "requests"),
    "hdfs": (Hdfs, "hdfs_native"),
}
OPTIONS = {"tfrecord": ("--features", "id:int64,half:float32")}
FORMATS = ("parquet", "csv.gz", "npy", "tfrecord")
LARGE = np.arange(2_000_000, dtype=np.int64).reshape(-1, 4)
"""16 MB: several pieces of a file."""


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    kind, package = STORES[request.param]
    pytest.importorskip(package)
    pytest.importorskip("moto")  # the environment of `make test-stores`
    if issubclass(kind, WebHdfs) and (obstacle := find_obstacle()):
        pytest.skip(obstacle)
    with contextlib.closing(kind(tmp_path_factory.mktemp("store"))) as found:
        yield found


@pytest.fixture(autouse=True)
def reach(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands reach the store."""
    store.proxy.reset()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)


def make_files() -> dict[str, bytes]:
    """Two files of each format, by name."""
    files = {}
    for number in range(2):
        ids = np.arange(number * 3000, number * 3000 + 3000)
        table = pa.table({"id": ids, "half": ids / 2, "name": [f"row {i}" * (i % 4) for i in ids]})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, row_group_size=500)
        files[f"{number}.parquet"] = buffer.getvalue()
        text = "id,half\n" + "".join(f"{i},{i / 2}\n" for i in ids)
        files[f"{number}.csv.gz"] = gzip.compress(text.encode(), mtime=0)
        buffer = io.BytesIO()
        np.save(buffer, np.stack([ids, ids * 2], axis=1))
        files[f"{number}.npy"] = buffer.getvalue()
        records = [encode_example({"id": ("int64", [i]), "half": ("float", [i / 2])}) for i in ids.tolist()]
        files[f"{number}.tfrecord"] = b"".join(map(frame, records))
    return files


def make_array(first: int = 0) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, LARGE + first)
    return buffer.getvalue()


def checksums(cache: CacheSpec | None) -> list[tuple[int, str]]:
    assert cache is not None
    return [(info.rows, info.checksum) for info in cache.partitions]


def find(home: Path, name: str) -> CacheSpec | None:
    return Catalog(Paths(home)).find(name)


@pytest.fixture
def hosts(tmp_path: Path, reach: None) -> Iterator[LoopbackHosts]:
    with contextlib.closing(LoopbackHosts(tmp_path, ("a", "b", "c"))) as found:
        found.up()
        yield found


def read_all(*folders: Path) -> bytes:
    """All that was written below, but for partitions."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files if path.suffix != ".arrow")


def test_nodes_and_one_machine_read_the_bytes_that_a_disk_has(
    store: Store, hosts: LoopbackHosts, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    for name, data in make_files().items():
        (tmp_path / "files" / name).write_bytes(data)
        store.put(f"data/{name}", data)
    disk, here = Paths(tmp_path / "disk"), tmp_path / "here"
    bring_up(disk, 3)
    insitu(here, "up", "--nodes", "3")
    for format in FORMATS:
        name, options = format.replace(".", "-"), OPTIONS.get(format, ())
        features = options[1] if options else None
        (cache,) = import_cache(disk, name, [str(tmp_path / "files" / f"*.{format}")], features=features)
        for home in (here, hosts.head):
            insitu(home, "import", name, f"{store.prefix}data/*.{format}", *options)
            assert checksums(find(home, name)) == checksums(cache), (format, home.name)
    for secret in store.secrets:
        written = read_all(here, hosts.head, *hosts.homes.values())
        assert b"INSITU" in written.upper() and secret.encode() not in written


def fail(home: Path, *arguments: str, **environment: str) -> str:
    """Return what a command says that fails, as one line."""
    done = insitu(home, *arguments, code=None, **environment)
    assert done.returncode in (1, 2), (arguments, done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    print(done.stderr)
    return " ".join(done.stderr.split())


def test_what_is_not_there_and_a_key_that_is_wrong_are_named(store: Store, tmp_path: Path) -> None:
    store.put("large/0.npy", make_array())
    home = tmp_path / "home"
    elsewhere = store.prefix.replace("bucket", "nowhere").replace("me/data", "you/data") + "zz/0.npy"
    for url in (f"{store.prefix}large/9.npy", f"{store.prefix}large/9*.npy", elsewhere):
        said = fail(home, "import", "x", url)
        assert f"{url} doesn't exist" in said or f"No file matches {url}" in said, said
    if store.wrong:
        said = fail(home, "import", "x", f"{store.prefix}large/0.npy", **store.wrong)
        assert f"{store.prefix}large/0.npy " in said and ("can't be read" in said or "credentials" in said)
        for secret in (*store.secrets, *store.wrong.values()):
            assert secret not in said and secret.encode() not in read_all(home)
    assert find(home, "x") is None


@pytest.fixture(params=["here", "nodes"])
def filled(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[tuple[Path, ...]]:
    """A home with a cache `x`: of this machine, or of a head, and then those of its agents."""
    if isinstance(store, Hdfs):
        pytest.skip("no proxy knows the protocol of HDFS")
    homes: tuple[Path, ...] = (tmp_path / "home",)
    if request.param == "nodes":
        hosts = request.getfixturevalue("hosts")
        homes = (hosts.head, *hosts.homes.values())
    store.put("large/0.npy", make_array())
    insitu(homes[0], "import", "x", f"{store.prefix}large/*.npy")
    store.proxy.reset()
    yield homes


def test_whatever_fails_while_a_file_is_read_the_old_version_stands(
    store: Store, filled: tuple[Path, ...]
) -> None:
    home, source = filled[0], f"{store.prefix}large/0.npy"
    before = find(home, "x")
    command = ("import", "x", f"{store.prefix}large/*.npy", "--overwrite")

    # The first piece is the header, which the machine of the command reads.
    store.proxy.spared = 1
    store.proxy.in_the_middle = lambda: store.put("large/0.npy", make_array(1))
    said = fail(home, *command)
    assert store.proxy.in_the_middle is None and f"{source} must stay as it is" in said
    assert find(home, "x") == before

    store.proxy.spared = 1
    store.proxy.in_the_middle = lambda: store.delete("large/0.npy")
    assert source in fail(home, *command) and store.proxy.in_the_middle is None
    assert find(home, "x") == before

    store.put("large/0.npy", make_array())
    store.proxy.spared, store.proxy.cuts = 1, 10_000
    assert source in fail(home, *command) and store.proxy.cuts < 9_999
    assert find(home, "x") == before
    for secret in store.secrets:
        assert secret.encode() not in read_all(*filled)

    store.proxy.spared, store.proxy.cuts = 1, 1
    insitu(home, *command)
    after = find(home, "x")
    assert store.proxy.cuts == 0 and after != before and checksums(after) == checksums(before)
