"""Rows that are exported into Ignite, to servers that speak the protocol in this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CliRunner
from ignite_wire import FakeCache, FakeCluster, FakeServer, cluster_of

from insitu.base.context import Context
from insitu.base.errors import InputError, SourceError
from insitu.base.paths import Paths
from insitu.extensions.ignite import cluster as cluster_module
from insitu.extensions.ignite.protocol import STREAM
from insitu.grid import dataset, import_cache
from insitu.grid.caches import row_export
from insitu.grid.caches.row_export import export_cache


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "1")
    monkeypatch.setattr(cluster_module, "_PAUSES", (0.01,))
    monkeypatch.setattr(row_export, "MESSAGE_BYTES", 4000)


def empty(servers: int = 2, behave: Any = None) -> FakeCluster:
    return cluster_of(servers, FakeCache([[] for _ in range(4)], name="OUT"), behave)


@pytest.fixture
def drawn(paths: Paths, tmp_path: Path) -> str:
    """A cache of 500 rows with keys from 1000 on."""
    keys = np.arange(500) + 1000
    np.savez(
        tmp_path / "rows.npz",
        key=keys,
        image=(keys[:, None, None] + np.arange(12).reshape(3, 4)).astype(np.uint8),
        score=np.sqrt(keys).astype(np.float32),
        name=np.array([f"row {key} \u00e4" for key in keys]),
    )
    import_cache(paths, "drawn", [str(tmp_path / "rows.npz")], partitions=4)
    return "drawn"


def all_rows(paths: Paths, name: str) -> dict[str, Any]:
    found = dataset(name, paths=paths, context=Context(paths), label=None).sample(500)
    order = np.argsort(found["key"])
    return {column: np.asarray(values)[order] for column, values in found.items()}


def test_exported_rows_come_back_as_they_were(paths: Paths, drawn: str) -> None:
    with empty() as cluster:
        done = export_cache(paths, drawn, cluster.address())
        assert (done.rows, done.sent) == (500, 500)
        assert sum(server.requests.get(STREAM, 0) for server in cluster.servers) > 3
        again = export_cache(paths, drawn, cluster.address())
        assert again.sent == 500 and cluster.cache.rows == 500
        import_cache(paths, "back", [cluster.address()])
    before, after = all_rows(paths, drawn), all_rows(paths, "back")
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(values.reshape(500, -1), after[name].reshape(500, -1))


def test_rows_without_a_key_get_their_number(paths: Paths, tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", value=np.arange(300) / 8)
    import_cache(paths, "values", [str(tmp_path / "v.npz")])
    with empty() as cluster:
        export_cache(paths, "values", cluster.address())
        import_cache(paths, "back", [cluster.address()])
    found = dataset("back", paths=paths, context=Context(paths), label=None).sample(300)
    np.testing.assert_array_equal(np.sort(found["key"]), np.arange(300))
    np.testing.assert_array_equal(np.sort(found["value"]), np.arange(300) / 8)


def test_an_export_that_was_interrupted_goes_on(paths: Paths, drawn: str) -> None:
    """Every server is gone in its middle, and stays so for longer than the export waits."""
    with empty(1) as cluster:

        def die(server: FakeServer, operation: int, count: int) -> bytes | None:
            return b"" if operation == STREAM and count > 4 else None

        server = cluster.servers[0]
        server._behave = die
        with pytest.raises(SourceError, match=r"must answer"):
            export_cache(paths, drawn, cluster.address())
        held = cluster.cache.rows
        assert 0 < held < 500
        server._behave = None
        done = export_cache(paths, drawn, cluster.address(), resume=True)
        assert 0 < done.sent < 500 and cluster.cache.rows == 500
        assert not list((paths.home / "exports").iterdir())


def test_a_server_that_dies_is_replaced_by_another(paths: Paths, drawn: str) -> None:
    with empty(2) as cluster:

        def die(server: FakeServer, operation: int, count: int) -> bytes | None:
            if operation != STREAM or count < 2:
                return None
            server.alive = False
            server.stop()
            return b""

        cluster.servers[0]._behave = die
        export_cache(paths, drawn, cluster.address())
        assert cluster.cache.rows == 500 and not cluster.servers[0].alive


def test_rows_that_vanish_meanwhile_are_an_error(paths: Paths, drawn: str) -> None:
    def forget(server: FakeServer, operation: int, count: int) -> bytes | None:
        if operation == STREAM:
            server.cluster.cache.partitions[0] = []
        return None

    with empty(1, forget) as cluster, pytest.raises(SourceError, match=r"of 500: others were removed"):
        export_cache(paths, drawn, cluster.address())


def test_a_cache_that_isnt_there_is_made(paths: Paths, drawn: str) -> None:
    with empty(1) as cluster:
        address = cluster.address().replace("OUT", "NEW")
        export_cache(paths, drawn, address)
        assert cluster.created == "NEW"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "score"}, "--key must be a column of whole numbers or text"),
        ({"key": "nothing"}, "Received: nothing"),
        ({"columns": ["nothing"]}, "Received: nothing"),
        ({"columns": ["key"]}, "needs a column beside the key"),
    ],
)
def test_options_that_fit_no_column_are_refused(
    paths: Paths, drawn: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export_cache(paths, drawn, "ignite://localhost/OUT", **options)


def test_keys_that_come_twice_are_refused(paths: Paths, tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", key=np.arange(30) % 20, value=np.arange(30))
    import_cache(paths, "values", [str(tmp_path / "v.npz")])
    with pytest.raises(InputError, match="30 rows with 20 keys in column key"):
        export_cache(paths, "values", "ignite://localhost/OUT")


def test_predictions_land_under_the_keys_of_their_rows(paths: Paths, drawn: str, tmp_path: Path) -> None:
    """Rows that a model has predicted come back under the keys of the rows."""
    rows = dataset(drawn, features=["key", "image"], label=None, paths=paths, context=Context(paths))
    keys, scores = [], []
    for batch in rows.batch(128):
        keys.append(batch["key"])
        scores.append(batch["image"].reshape(len(batch["key"]), -1).sum(axis=1, dtype=np.float32))
    np.savez(tmp_path / "predictions.npz", key=np.concatenate(keys), score=np.concatenate(scores))
    import_cache(paths, "predictions", [str(tmp_path / "predictions.npz")])
    with empty() as cluster:
        export_cache(paths, "predictions", cluster.address())
        import_cache(paths, "back", [cluster.address()])
    before, after = all_rows(paths, drawn), all_rows(paths, "back")
    np.testing.assert_array_equal(after["key"], before["key"])
    np.testing.assert_array_equal(after["score"], before["image"].reshape(500, -1).sum(axis=1))


def test_the_command_exports(paths: Paths, drawn: str) -> None:
    run = CliRunner()
    with empty() as cluster:
        done = run.run(["export", drawn, cluster.address(), "--columns", "key,score", "--limit", "300"])
        assert done.exit_code == 0, done.output
        assert "Exported 300 rows of drawn version 1 to ignite://" in done.stderr
        assert cluster.cache.rows == 300
    for arguments, message in (
        (("there.txt",), r"\.parquet, \.csv or \.arrow"),
        (("ignite://grid/A", "--overwrite"), "--overwrite is said of"),
        (("there.parquet", "--key", "key"), "--key is said of"),
        (("there.parquet", "--best"), "--best is said of"),
    ):
        refused = run.run(["export", drawn, *arguments])
        assert isinstance(refused.exception, InputError) and re.search(message, str(refused.exception))
