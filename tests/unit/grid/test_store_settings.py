"""What is set for a store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from insitu.durable import seal
from insitu.errors import GridError, InputError
from insitu.grid import apply_tier_modes, bring_up, set_up_stores
from insitu.grid.store_identity import make_store_id
from insitu.grid.store_settings import StoreSettings, check_tier_path, read_settings, write_settings
from insitu.paths import Paths
from insitu.spec import NodeId

NODE = NodeId("node-0")


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "slow"
    path.mkdir()
    return path


def test_nothing_is_set_at_first(paths: Paths) -> None:
    assert (read_settings(paths, NODE).quota, read_settings(paths, NODE).tier) == (None, None)


def test_each_is_set_alone_and_taken_away(paths: Paths, slow: Path) -> None:
    bring_up(paths, 2)
    set_up_stores(paths, [NODE], quota=1000)
    set_up_stores(paths, [NODE], tier=slow)
    found = read_settings(paths, NODE)
    assert found.quota == 1000 and found.tier is not None
    assert found.tier.root == slow / f"insitu-{make_store_id(paths, NODE)}"
    assert found.tier.root.stat().st_mode & 0o777 == 0o700
    assert read_settings(paths, NodeId("node-1")).quota is None
    set_up_stores(paths, [NODE], quota=None)
    assert read_settings(paths, NODE).quota is None and read_settings(paths, NODE).tier == found.tier
    set_up_stores(paths, [NODE], tier=None)
    assert read_settings(paths, NODE).tier is None and not list(slow.iterdir())


def test_settings_stay_with_the_store_when_its_node_changes(paths: Paths, slow: Path) -> None:
    bring_up(paths, 2)
    set_up_stores(paths, [NODE], quota=1000, tier=slow)
    tier = read_settings(paths, NODE).tier
    paths.node("node-0").rename(paths.nodes / "x")
    paths.node("node-1").rename(paths.node("node-0"))
    (paths.nodes / "x").rename(paths.node("node-1"))
    bring_up(paths, 2)
    assert read_settings(paths, NodeId("node-1")).tier == tier and read_settings(paths, NODE).quota is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"crc32": 1, "state": "{}"}', "\0"])
def test_damaged_settings_are_named(paths: Paths, text: str) -> None:
    set_up_stores(paths, [NODE], quota=1000)
    paths.store_settings(NODE).write_text(text)
    with pytest.raises(GridError, match=r"settings of a store.*store.json.*insitu up --quota"):
        read_settings(paths, NODE)


@pytest.mark.parametrize("quota", [-1])
def test_a_quota_is_not_negative(paths: Paths, quota: int) -> None:
    with pytest.raises(InputError, match=r"from 0 on. Received: -1"):
        set_up_stores(paths, [NODE], quota=quota)


def test_nodes_that_are_not_up_have_no_quota(paths: Paths) -> None:
    with pytest.raises(InputError, match=r"node-0. Received: node-7"):
        set_up_stores(paths, [NodeId("node-7")], quota=1)


def test_paths_that_cannot_be_used_are_refused(paths: Paths, slow: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Received: .*none there.*mount"):
        check_tier_path(paths, tmp_path / "none there")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"Received: .*file"):
        check_tier_path(paths, tmp_path / "file")
    bring_up(paths, 1)
    with pytest.raises(InputError, match="lies in INSITU_HOME"):
        check_tier_path(paths, paths.nodes)
    slow.chmod(0o777)
    with pytest.raises(InputError, match=r"mode 777.*chmod o-w"):
        check_tier_path(paths, slow)
    slow.chmod(0o1777)
    assert check_tier_path(paths, slow) == slow


def test_a_second_path_takes_the_modes_of_the_home(paths: Paths, slow: Path) -> None:
    bring_up(paths, 1)
    set_up_stores(paths, [NODE], tier=slow)
    tier = read_settings(paths, NODE).tier
    assert tier is not None
    (tier.root / "file").touch()
    paths.home.chmod(0o2770)
    apply_tier_modes(paths)
    assert [os.stat(p).st_mode & 0o7777 for p in (tier.root, tier.root / "file")] == [0o2770, 0o660]


def test_what_other_members_of_a_shared_home_write_is_not_taken(paths: Paths, slow: Path) -> None:
    """They could have had the victim give any folder of its own to the group, or remove from it."""
    bring_up(paths, 1)
    paths.home.chmod(0o2770)
    set_up_stores(paths, [NODE], tier=slow)
    path = paths.store_settings(NODE)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o660)
    with pytest.raises(GridError, match=r"store.json says is acted upon.*Received: mode 660"):
        read_settings(paths, NODE)
    (private := slow / "private").mkdir(mode=0o700)
    state = {"format": 1, "quota": None, "tier": str(private)}
    path.write_bytes(seal(state))
    apply_tier_modes(paths)
    assert private.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["/home/victim", "insitu-" + "0" * 32, "/x/../insitu-" + "0" * 32, 5, "/"])
def test_a_second_path_is_one_that_insitu_makes(paths: Paths, place: object) -> None:
    bring_up(paths, 1)
    paths.store_settings(NODE).write_bytes(seal({"format": 1, "quota": None, "tier": place}))
    paths.store_settings(NODE).chmod(0o600)
    with pytest.raises(GridError, match=r"settings of a store must be readable"):
        read_settings(paths, NODE)


def test_the_owner_of_a_shared_home_sets_quotas(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    bring_up(paths, 1)
    paths.home.chmod(0o2770)
    other = paths.home.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(InputError, match=rf"The owner of a shared home.*Received: user {other}"):
        write_settings(paths, NODE, StoreSettings(quota=1))


def test_a_link_in_the_place_of_a_new_second_path_is_not_followed(paths: Paths, slow: Path) -> None:
    bring_up(paths, 1)
    private = slow / "private"
    private.mkdir()
    private.chmod(0o755)
    (slow / f"insitu-{make_store_id(paths, NODE)}").symlink_to(private)
    with pytest.raises(NotADirectoryError):
        set_up_stores(paths, [NODE], tier=slow)
    assert private.stat().st_mode & 0o777 == 0o755
