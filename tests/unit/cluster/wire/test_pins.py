"""What jobs keep of caches, where another head leads by the time that they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import GridError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, Column, NodeId, PartitionInfo
from insitu.cluster import wire
from insitu.cluster.wire.pins import list_jobs_elsewhere, release_pins
from insitu.grid import Catalog, disown_catalog

PARTITION = PartitionInfo(0, 1, 2, "crc32:00000000", (NodeId("a"),))
SPEC = CacheSpec("digits", 1, (Column("x", "uint8", (2,)),), (PARTITION,), 0, None, 1.5, ())


@pytest.fixture
def paths(home: Path) -> Paths:
    found = Paths(home)
    Catalog(found).publish([SPEC])
    Catalog(found).pin("digits", 1, "job")
    return found


def test_a_job_lets_go_in_its_own_home(paths: Paths) -> None:
    release_pins(paths, "job")
    assert Catalog(paths).pinned_by("digits") == []
    disown_catalog(paths)
    with pytest.raises(GridError):
        release_pins(paths, "job")


def test_a_job_of_a_head_of_before_has_the_one_that_leads_let_go(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    disown_catalog(paths)
    paths.metadata_settings.write_text("{}")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(wire, "find_head", lambda paths: "h:2")
    monkeypatch.setattr(wire, "read_token", lambda paths: "token")
    monkeypatch.setattr(wire, "ask_head", lambda *arguments: asked.append(arguments[:3]))
    release_pins(paths, "job")
    assert asked == [("h:2", "token", {"do": "unpin", "job": "job"})]


def test_jobs_that_are_not_here_are_of_other_homes_where_etcd_has_the_catalogue(paths: Paths) -> None:
    assert list_jobs_elsewhere(paths) == []
    paths.metadata_settings.write_text("{}")
    assert list_jobs_elsewhere(paths) == list_jobs_elsewhere(paths, "digits") == ["job"]
    assert list_jobs_elsewhere(paths, "other") == []
    paths.job("job").root.mkdir(parents=True)  # the folder of a host, which runs its tasks
    assert list_jobs_elsewhere(paths) == ["job"]
    paths.job("job").spec.touch()
    assert list_jobs_elsewhere(paths) == []
