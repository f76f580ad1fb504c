"""What is in INSITU_HOME is its owner's alone, or a group's."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from foreign_user import NOBODY, name_own_group, needs_root, open_folder, run_as

from insitu.base.disk.access import (
    close_home,
    file_mode,
    folder_mode,
    is_shared,
    make_file,
    make_folder,
    make_sticky_folder,
    share_home,
)
from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.grid import Catalog, import_cache
from insitu.grid.catalog.files import cache_locks
from insitu.grid.reading.store import open_copy


@pytest.fixture
def reachable() -> Iterator[Path]:
    yield from open_folder()


@pytest.fixture
def umask() -> Iterator[None]:
    """The umask that most users have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def make_cache(paths: Paths, folder: Path, name: str = "a") -> None:
    np.save(folder / "x.npy", np.arange(100.0))
    import_cache(paths, name, [str(folder / "x.npy")], partitions=2, overwrite=True)


def modes_below(folder: Path) -> dict[str, int]:
    """The modes of everything in `folder`, by path."""
    return {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in sorted(folder.rglob("*"))}


def test_what_insitu_makes_is_its_owners_alone(tmp_path, home, umask, monkeypatch):
    monkeypatch.setattr("insitu.grid.partitions.verification.TIMESTAMP_TOLERANCE_NS", 0)
    paths = Paths(home)
    make_cache(paths, tmp_path)
    make_sticky_folder(paths.home, paths.jobs)
    open_copy(paths, Catalog(paths).get("a"), 0, None)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    found = modes_below(home)
    assert {"catalog.sqlite", "locks", "locks/a.lock", "nodes", "jobs", "staging"} <= found.keys()
    assert any(name.endswith(".arrow") for name in found) and any(n.endswith(".verified") for n in found)
    for name, mode in found.items():
        assert not mode & 0o077, f"{name} has mode {mode:o}"


def test_folders_of_before_are_closed(tmp_path, home, umask):
    paths = Paths(home)
    make_cache(paths, tmp_path)
    for folder in (paths.nodes, paths.locks, paths.staging):
        folder.chmod(0o755)
    paths.catalog.chmod(0o644)
    home.chmod(0o755)
    make_cache(paths, tmp_path)
    for path in (paths.nodes, paths.locks, paths.staging, paths.catalog):
        assert not path.stat().st_mode & 0o077, path
    # A folder that a user has made may hold other things.
    assert stat.S_IMODE(home.stat().st_mode) == 0o755


def test_a_file_that_is_open_to_more_is_closed(home):
    make_folder(home, home)
    file = home / "one"
    file.touch()
    file.chmod(0o666)
    make_file(home, file)
    assert stat.S_IMODE(file.stat().st_mode) == file_mode(home) == 0o600
    assert folder_mode(home) == 0o700


@pytest.mark.parametrize("world", [False, True])
def test_a_home_in_which_others_can_plant_files_is_refused(tmp_path, world):
    home = tmp_path / "open"
    home.mkdir()
    home.chmod(0o777 if world else 0o755)
    if world:
        with pytest.raises(InputError, match=r"not be a folder that every user may write to.*mode 777"):
            make_folder(home, home / "jobs")
        assert not (home / "jobs").exists()
    else:
        make_folder(home, home / "jobs")


@needs_root
def test_a_home_of_another_user_is_refused(reachable):
    home = reachable / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    text = run_as(lambda: make_folder(home, home / "jobs"))
    assert text.startswith("InputError: INSITU_HOME must be a folder of your own")


@needs_root
def test_folders_that_another_user_put_into_an_open_home_are_refused(reachable):
    home = reachable / "home"
    home.mkdir()
    home.chmod(0o1777)
    (home / "jobs").mkdir()
    os.chown(home / "jobs", 12345, 12345)
    (home / "catalog.sqlite").touch(0o666)
    (home / "catalog.sqlite").chmod(0o666)
    os.chown(home / "catalog.sqlite", 12345, 12345)
    text = "InputError: INSITU_HOME must be a folder of your own"
    assert run_as(lambda: make_folder(home, home / "jobs")).startswith(text)
    assert run_as(lambda: make_file(home, home / "catalog.sqlite")).startswith(text)
    assert run_as(lambda: make_folder(home, home / "nodes")) == "None"


@needs_root
def test_another_user_reads_and_locks_nothing(reachable, umask):
    paths = Paths(reachable / "home")
    make_cache(paths, reachable)
    # Also where the home itself is one that others may enter.
    paths.home.chmod(0o755)
    part = next(paths.nodes.rglob("*.arrow"))
    for path in (part, paths.catalog, paths.cache_lock("a")):
        assert run_as(lambda path=path: path.read_bytes()).startswith("PermissionError"), path

    def block() -> str:
        with cache_locks(paths, ["a"]):
            return "locked"

    assert "locked" not in run_as(block)


@needs_root
def test_a_group_shares_caches_and_not_jobs(reachable, umask):
    paths = Paths(reachable / "home")
    make_cache(paths, reachable)
    make_sticky_folder(paths.home, paths.jobs)
    job = paths.jobs / "mine"
    job.mkdir(mode=0o700)
    group = grp.getgrgid(NOBODY).gr_name
    share_home(paths, group)
    assert is_shared(paths.home)

    def use() -> str:
        rows = open_copy(paths, Catalog(paths).get("a"), 0, None).partition.rows
        import_cache(paths, "b", [str(reachable / "x.npy")])
        import_cache(paths, "a", [str(reachable / "x.npy")], overwrite=True)
        make_sticky_folder(paths.home, paths.jobs)
        (paths.jobs / "theirs").mkdir(mode=0o700)
        return f"{rows} rows, {[c.name for c in Catalog(paths).caches()]}"

    assert run_as(use, user=4242).endswith("rows, ['a', 'b']")
    # The owner continues with what the other has made, also where that one's umask is strict.
    make_cache(paths, reachable)
    assert [c.version for c in Catalog(paths).caches()] == [3, 1]
    for name, mode in modes_below(paths.nodes).items():
        assert mode & 0o070 in (0o070, 0o060) and not mode & 0o007, f"{name} has mode {mode:o}"
    # Not each other's jobs, and nobody outside the group anything.
    assert run_as(lambda: os.listdir(job), user=4242).startswith("PermissionError")
    assert run_as(lambda: job.rename(paths.jobs / "gone"), user=4242).startswith("PermissionError")
    assert run_as(lambda: paths.jobs.rename(paths.home / "x"), user=4242).startswith("PermissionError")
    assert run_as(lambda: os.listdir(paths.home), user=4242, group=4242).startswith("PermissionError")


@needs_root
def test_a_shared_home_is_closed_again(reachable):
    paths = Paths(reachable / "home")
    make_cache(paths, reachable)
    share_home(paths, grp.getgrgid(NOBODY).gr_name)
    close_home(paths)
    assert not is_shared(paths.home)
    assert run_as(lambda: os.listdir(paths.home), user=4242).startswith("PermissionError")
    assert not any(mode & 0o077 for mode in modes_below(paths.home).values())


def test_an_unknown_group_is_named(home):
    with pytest.raises(InputError, match=r"--shared names a group of this machine.*no-such-group"):
        share_home(Paths(home), "no-such-group")
    assert not is_shared(home)


def test_a_link_in_the_place_of_a_lock_leads_nowhere(home, tmp_path):
    """A member of a shared home could have had a file of the victim opened to the group."""
    private = tmp_path / "private"
    private.touch(mode=0o600)
    make_folder(home, home / "locks")
    home.chmod(0o2770)
    (home / "locks" / "a.lock").symlink_to(private)
    with pytest.raises(OSError, match="symbolic links"):
        make_file(home, home / "locks" / "a.lock")
    with pytest.raises(OSError, match="symbolic links"), cache_locks(Paths(home), ["a"]):
        pass
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


@needs_root
def test_links_of_others_are_no_folders_of_a_home(home, tmp_path):
    private = tmp_path / "private"
    private.mkdir(mode=0o755)
    make_folder(home, home / "nodes")
    home.chmod(0o2770)
    link = home / "nodes" / "a"
    link.symlink_to(private)
    make_folder(home, link / "b")  # one's own, as to a larger disk
    assert stat.S_IMODE((private / "b").stat().st_mode) == 0o2770
    private.chmod(0o755)
    os.chown(link, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(NotADirectoryError) as caught:
        make_folder(home, link / "c")
    assert caught.value.filename == str(link)
    assert stat.S_IMODE(private.stat().st_mode) == 0o755 and not (private / "c").exists()


@needs_root
def test_a_shared_home_leaves_to_owners_what_says_what_processes_do(reachable):
    paths = Paths(reachable / "home")
    make_folder(paths.home, paths.node("a"))
    own = {paths.agent("a"): 0o640, paths.store_settings("a"): 0o640, paths.agent_lock("a"): 0o600}
    for path in (*own, paths.store_id("a")):
        path.touch(mode=0o600)
    share_home(paths, grp.getgrgid(NOBODY).gr_name)
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in own} == own
    assert stat.S_IMODE(paths.store_id("a").stat().st_mode) == 0o660


def test_the_journal_of_a_shared_catalogue_is_no_link(home, tmp_path):
    """SQLite wrote its journal to whatever file of the victim a member of the group had linked there."""
    paths = Paths(home)
    make_cache(paths, tmp_path)
    share_home(paths, name_own_group())
    assert paths.catalog_journal.is_file() and stat.S_IMODE(paths.catalog_journal.stat().st_mode) == 0o660
    make_cache(paths, tmp_path, "b")
    assert paths.catalog_journal.is_file()
    paths.catalog_journal.unlink()
    private = tmp_path / "private"
    paths.catalog_journal.symlink_to(private)
    for use in (lambda: Catalog(paths).caches(), lambda: make_cache(paths, tmp_path, "c")):
        with pytest.raises(GridError, match="somebody has made a link"):
            use()
    assert not private.exists()
    paths.catalog_journal.unlink()
    assert [cache.name for cache in Catalog(paths).caches()] == ["a", "b"]
