"""A metadata store without names isn't taken for a cluster without files."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_nodes import FileNodes
from lost_names import VOLUME, Volume

from insitu.base.errors import GridError
from insitu.base.spec import NodeId
from insitu.cluster.files import FileUpkeep, NamesGuard, names_guard, repairing, upkeep
from insitu.cluster.files import client as client_module
from insitu.grid.shared_files import forget_others, read_state, record_earlier


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    """Two files, whose metadata store is lost."""
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "WRITER_SECONDS", 0.0)
    monkeypatch.setattr(names_guard, "_AGAIN_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as lab:
        made = Volume(lab, random.Random(0))
        made.system.copies = 1
        made.system.pipe({"v/x": b"1", "v/d/y": b"2"})
        made.truth = {"x": b"1", "d/y": b"2"}
        made.keep_up()
        made.lose_names()
        yield made


def empty_others(volume: Volume) -> set[NodeId]:
    """Return the nodes that hold no block, which lose their manifests, too, as those of new hosts."""
    found = {NodeId(node) for node, keys in volume.lab.held(VOLUME).items() if not keys}
    for node in found:
        volume.lab.stores[node].blocks.drop(VOLUME, volume.list_manifests()[node])
    return found


def make_keeper(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> FileUpkeep:
    """Return an upkeep that removes at once what may be removed at all."""
    monkeypatch.setattr(repairing, "ORPHAN_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "SETTLED_SECONDS", 0.0)
    lab = volume.lab
    keeper = FileUpkeep(lab.metadata, lab.peers, lab.view, NamesGuard(lab.metadata, lab.peers))
    keeper._repairer._read_on = 0.0
    return keeper


def test_nothing_is_read_written_or_removed_before_names_are_put_back(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = volume.lab
    monkeypatch.setattr(names_guard, "_AGAIN_SECONDS", 1000.0)  # names that are put back count at once
    keeper = make_keeper(volume, monkeypatch)
    before = lab.held(VOLUME)
    for call in (
        lambda: volume.system.find("v"),
        lambda: volume.system.cat("v/x"),
        lambda: volume.system.pipe("v/x", b"3"),
        lambda: volume.system.rm("v/x"),
        lambda: volume.system.mv("v/x", "v/z"),
        lambda: keeper.advance(1000.0),
    ):
        with pytest.raises(GridError, match="`insitu repair`"):
            call()
    assert lab.held(VOLUME) == before and not lab.metadata.records
    assert volume.rebuild(volume.survey()) == volume.truth
    volume.system.pipe("v/x", b"3")
    for now in (2000.0, 3000.0):
        keeper.advance(now)
    assert volume.system.cat("v/x") == b"3" and volume.system.cat("v/d/y") == b"2"


def test_who_gives_them_up_begins_with_none(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_others(volume.lab.metadata, volume.survey().generation)
    assert volume.system.find("v") == []
    volume.keep_up()
    assert not any(volume.list_manifests().values())
    monkeypatch.setattr(repairing, "ORPHAN_SECONDS", 0.0)
    volume.lab.repair(VOLUME)
    assert not any(volume.lab.held(VOLUME).values())


def test_a_cluster_without_files_begins_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b"))) as lab:
        volume = Volume(lab, random.Random(0))
        lab.alive = set()
        volume.check()
        assert read_state(lab.metadata).origin is None, "nobody knows what nodes hold"
        lab.alive = set(lab.nodes)
        volume._begin()
        volume.system.pipe("v/x", b"1")
        assert read_state(lab.metadata).origin is not None
        calls = len(lab.calls)
        volume.check()
        volume._begin()
        volume.check()
        assert len(lab.calls) == calls, "nodes aren't asked once there are names"


def test_a_node_with_files_that_comes_after_another_one_counts_too(volume: Volume) -> None:
    lab = volume.lab
    lab.alive = empty_others(volume)
    volume.check()  # they hold nothing, so this seems to be a new cluster
    assert read_state(lab.metadata).origin is not None
    lab.alive = set(lab.nodes)
    with pytest.raises(GridError, match="no name"):
        volume.check()
    assert volume.rebuild(volume.survey()) == volume.truth


def test_files_that_come_with_a_late_node_stay_until_they_are_given_up(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has names when a node comes that was away, with files of the head of before."""
    lab = volume.lab
    lab.alive = empty_others(volume)
    lab.down = set(lab.nodes) - lab.alive
    volume.system.pipe("v/x", b"new")
    lab.alive, lab.down = set(lab.nodes), set()
    keeper = make_keeper(volume, monkeypatch)
    for now in (1000.0, 2000.0, 3000.0):
        keeper.advance(now)
    report = volume.survey()
    assert not report.can_rebuild and {each.path for each in report.found} == {"x", "d/y"}
    assert volume.system.cat("v/x") == b"new" and volume.system.find("v") == ["v/x"]
    assert all(lab.client.read_block(VOLUME, b) for each in report.found for b in each.entry.blocks)
    forget_others(lab.metadata, report.generation)
    volume.system.pipe("v/z", b"another change")
    for now in (4000.0, 5000.0, 6000.0):
        keeper.advance(now)
    assert not volume.survey().found
    with pytest.raises(OSError, match="no node has it"):
        lab.client.read_block(VOLUME, report.found[0].entry.blocks[0])
    assert volume.system.cat("v/x") == b"new"


def test_blocks_of_a_file_stay_whose_manifest_is_on_a_node_that_comes_later(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has replaced another one, and its first agents hold nothing."""
    lab = volume.lab
    record_earlier(lab.metadata)
    lab.alive = empty_others(volume)
    volume.system.pipe("v/new", b"new")
    held = lab.held(VOLUME)
    for node in set(lab.nodes) - lab.alive:
        manifests = lab.stores[node].blocks.list_held(VOLUME, manifests=True)
        lab.stores[node].blocks.drop(VOLUME, manifests)
    lab.alive = set(lab.nodes)
    keeper = make_keeper(volume, monkeypatch)
    for now in (1000.0, 2000.0, 3000.0):
        keeper.advance(now)
    assert lab.held(VOLUME) == held
