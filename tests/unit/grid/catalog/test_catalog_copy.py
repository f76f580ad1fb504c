"""The copy of the catalogue on other hosts: read as any, changed by none."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from insitu.base.disk.access import make_file
from insitu.base.errors import CorruptCatalog, GridError
from insitu.base.paths import Paths
from insitu.grid import bring_up, import_cache, sweep, take_down
from insitu.grid.catalog import catalog as catalog_module
from insitu.grid.catalog.catalog import Catalog
from insitu.grid.catalog.catalog_copy import (
    CatalogWatch,
    disown_catalog,
    install_catalog_copy,
    is_catalog_copy,
)
from insitu.grid.catalog.deletion import delete_cache
from insitu.grid.maintenance.repair import repair_catalog


@pytest.fixture
def there(tmp_path: Path) -> Paths:
    """The home of an agent."""
    return Paths(tmp_path / "there")


def test_a_copy_says_what_the_catalogue_says(paths: Paths, there: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)], backups=0)
    watch = CatalogWatch(paths)
    assert watch.poll() and not watch.poll()
    assert watch.data is not None
    install_catalog_copy(there, watch.data)
    assert Catalog(there).caches() == Catalog(paths).caches()
    assert is_catalog_copy(there) and not is_catalog_copy(paths)
    # A change is seen, and the next copy takes the place of the one before.
    import_cache(paths, "b", [str(source)])
    assert watch.poll()
    install_catalog_copy(there, watch.data)
    assert [cache.name for cache in Catalog(there).caches()] == ["a", "b"]
    assert there.catalog.stat().st_mode & 0o777 == 0o600


def test_nobody_changes_a_copy(paths: Paths, there: Paths, source: Path) -> None:
    (cache,) = import_cache(paths, "a", [str(source)])
    watch = CatalogWatch(paths)
    watch.poll()
    install_catalog_copy(there, watch.data or b"")
    before = there.catalog.read_bytes()
    for change in (
        lambda: Catalog(there).publish([cache], overwrite=True),
        lambda: Catalog(there).pin("a", 1, "job"),
        lambda: import_cache(there, "b", [str(source)]),
        lambda: bring_up(there, 2),
        lambda: take_down(there, force=True),
        lambda: repair_catalog(there),
        lambda: delete_cache(there, "a"),
    ):
        with pytest.raises(
            GridError, match=r"The head alone changes the catalogue.*on the machine of the head"
        ):
            change()
    assert there.catalog.read_bytes() == before


def test_nothing_is_swept_beside_a_copy(paths: Paths, there: Paths, source: Path) -> None:
    """A version that has just been published may be in the store and not yet in the copy."""
    import_cache(paths, "a", [str(source)])
    watch = CatalogWatch(paths)
    watch.poll()
    import_cache(paths, "a", [str(source)], overwrite=True)
    folder = there.version("n", "a", 1)
    folder.mkdir(parents=True)
    install_catalog_copy(there, watch.data or b"")
    there.version("n", "a", 2).mkdir()
    assert sweep(there) == 0 and folder.exists() and there.version("n", "a", 2).exists()


def test_what_is_no_catalogue_is_not_installed(there: Paths) -> None:
    for data in (b"", b"SQLite format 3\0", b"x" * 4096):
        with pytest.raises(GridError, match="A catalogue is a file of SQLite"):
            install_catalog_copy(there, data)
    assert not there.catalog.exists()


def test_a_change_that_was_interrupted_spoils_no_copy(paths: Paths, there: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)])
    watch = CatalogWatch(paths)
    watch.poll()
    there.home.mkdir(mode=0o700)
    journal = there.catalog.with_name("catalog.sqlite-journal")
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(1000))
    install_catalog_copy(there, watch.data or b"")
    assert not journal.exists() and len(Catalog(there).caches()) == 1


def test_no_catalogue_is_no_news_and_a_damaged_one_is_named_once(paths: Paths) -> None:
    watch = CatalogWatch(paths)
    assert not watch.poll() and watch.data is None
    paths.home.mkdir()
    paths.catalog.write_bytes(np.arange(1000).tobytes())
    with pytest.raises(CorruptCatalog, match="insitu repair"):
        watch.poll()
    assert not watch.poll()


def test_a_copy_is_whole_while_others_write(paths: Paths, source: Path) -> None:
    import_cache(paths, "a", [str(source)])
    watch = CatalogWatch(paths)
    writer = sqlite3.connect(paths.catalog, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM versions")
    assert watch.poll()
    writer.execute("ROLLBACK")
    writer.close()
    checked = sqlite3.connect(":memory:")
    checked.deserialize(watch.data or b"")
    assert checked.execute("SELECT count(*) FROM versions").fetchone() == (1,)
    checked.close()


def test_what_other_threads_do_ends_no_transaction(paths: Paths, source: Path) -> None:
    """POSIX ends all locks of a process on a file that it closes once. A reader in another process would
    then take the journal of a transaction under way for that of a writer that died, and undo it."""
    import_cache(paths, "a", [str(source)])
    with Catalog(paths)._transaction() as database:
        database.execute("INSERT INTO pins VALUES ('a', 1, 'first')")
        assert not is_catalog_copy(paths)
        make_file(paths.home, paths.catalog)
        assert "database is locked" in write_from_another_process(paths)
    assert "database is locked" not in write_from_another_process(paths)
    assert Catalog(paths).pinned_by("a") == ["first"]


def write_from_another_process(paths: Paths) -> str:
    """Return the error of a process that begins to write to the catalogue, and doesn't wait."""
    code = (
        "import sqlite3, sys; "
        "sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute('BEGIN IMMEDIATE')"
    )
    command = [sys.executable, "-c", code, str(paths.catalog)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr


def test_a_catalogue_whose_head_was_replaced_publishes_nothing_that_was_begun_before(
    paths: Paths, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import has looked before; its transaction looks again."""
    disown_catalog(paths)  # there is none yet
    import_cache(paths, "a", [str(source)])
    monkeypatch.setattr(catalog_module, "refuse_copy", lambda paths: disown_catalog(paths))
    with pytest.raises(GridError, match="The head alone changes the catalogue"):
        import_cache(paths, "b", [str(source)])
    monkeypatch.undo()
    assert [cache.name for cache in Catalog(paths).caches()] == ["a"] and is_catalog_copy(paths)
    with pytest.raises(GridError, match="The head alone changes the catalogue"):
        delete_cache(paths, "a")
