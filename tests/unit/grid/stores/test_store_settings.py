"""What is set for a store."""

from __future__ import annotations

import os

import pytest

from insitu.base.disk.durable import seal
from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import bring_up, set_quotas
from insitu.grid.catalog.store_identity import make_store_id
from insitu.grid.stores.store_settings import StoreSettings, read_settings, set_file_memory, write_settings

NODE = NodeId("node-0")


def test_nothing_is_set_at_first(paths: Paths) -> None:
    assert read_settings(paths, NODE) == StoreSettings(None, None, None)


def test_each_is_set_alone_and_taken_away(paths: Paths) -> None:
    bring_up(paths, 2)
    set_quotas(paths, [NODE], quota=1000)
    set_file_memory(paths, NODE, 50)
    assert read_settings(paths, NODE) == StoreSettings(1000, None, 50)
    assert read_settings(paths, NodeId("node-1")) == StoreSettings()
    set_quotas(paths, [NODE], quota=None)
    assert read_settings(paths, NODE) == StoreSettings(None, None, 50)


def test_settings_stay_with_the_store_when_its_node_changes(paths: Paths) -> None:
    bring_up(paths, 2)
    set_quotas(paths, [NODE], quota=1000)
    make_store_id(paths, NODE)
    paths.node("node-0").rename(paths.nodes / "x")
    paths.node("node-1").rename(paths.node("node-0"))
    (paths.nodes / "x").rename(paths.node("node-1"))
    bring_up(paths, 2)
    assert read_settings(paths, NodeId("node-1")).quota == 1000 and read_settings(paths, NODE).quota is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"crc32": 1, "state": "{}"}', "\0"])
def test_damaged_settings_are_named(paths: Paths, text: str) -> None:
    set_quotas(paths, [NODE], quota=1000)
    paths.store_settings(NODE).write_text(text)
    with pytest.raises(GridError, match=r"settings of a store.*store.json.*insitu up --quota"):
        read_settings(paths, NODE)


@pytest.mark.parametrize("quota", [-1])
def test_a_quota_is_not_negative(paths: Paths, quota: int) -> None:
    with pytest.raises(InputError, match=r"from 0 on. Received: -1"):
        set_quotas(paths, [NODE], quota=quota)


def test_nodes_that_are_not_up_have_no_quota(paths: Paths) -> None:
    with pytest.raises(InputError, match=r"node-0. Received: node-7"):
        set_quotas(paths, [NodeId("node-7")], quota=1)


def test_what_other_members_of_a_shared_home_write_is_not_taken(paths: Paths) -> None:
    """They could have had the victim remove any folder of its own."""
    bring_up(paths, 1)
    paths.home.chmod(0o2770)
    set_quotas(paths, [NODE], quota=1000)
    path = paths.store_settings(NODE)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o660)
    with pytest.raises(GridError, match=r"store.json says is acted upon.*Received: mode 660"):
        read_settings(paths, NODE)


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
