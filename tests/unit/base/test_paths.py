"""Names on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from insitu.base.errors import InputError
from insitu.base.paths import Paths, cache_folder_name, cache_name_of_folder, default_home

PATHS = Paths(Path("/home"))


def test_the_home_is_that_of_the_environment_or_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSITU_HOME", "some/where")
    assert default_home() == Path.cwd() / "some" / "where"
    monkeypatch.setenv("INSITU_HOME", "")
    assert default_home() == Path("~/.insitu").expanduser()


def test_folders_name_their_caches() -> None:
    for cache in ("a", "a/b/c"):
        assert cache_name_of_folder(cache_folder_name(cache)) == cache
        assert cache_name_of_folder(PATHS.staged(cache, "12-ab").root.name) == cache
    assert cache_name_of_folder(PATHS.trash("12-ab").name) == ""


def test_what_belongs_to_a_partition_lies_beside_it() -> None:
    partition = PATHS.partition("node-0", "a/b", 3, 7)
    assert partition == Path("/home/nodes/node-0/a@b/v3/part-00007.arrow")
    assert PATHS.verified("node-0", "a/b", 3, 7) == partition.parent / "part-00007.verified"


@pytest.mark.parametrize("name", ["..", "a/b", ".a", ""])
def test_no_name_leads_out_of_the_home(name: str) -> None:
    with pytest.raises(InputError):
        PATHS.node(name)
    with pytest.raises(InputError):
        PATHS.job(name)
