"""Names that are rebuilt from what nodes hold are those that were lost; what isn't certain is named."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from file_nodes import FileNodes
from lost_names import VOLUME, Volume

from insitu.base.errors import ClusterError, GridError
from insitu.cluster.client import open_files
from insitu.cluster.files import NamesReport, names_guard, upkeep
from insitu.cluster.files import client as client_module
from insitu.grid.shared_files import split_key

SEEDS = range(12)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileNodes]:
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(upkeep, "WRITER_SECONDS", 0.0)
    monkeypatch.setattr(names_guard, "_AGAIN_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as nodes:
        yield nodes


@pytest.mark.parametrize("seed", SEEDS)
def test_after_upkeep_the_rebuilt_names_are_those_that_were_lost(lab: FileNodes, seed: int) -> None:
    volume = Volume(lab, random.Random(seed))
    for _ in range(40):
        volume.step()
    volume.lose_manifests(seed % 3)
    volume.keep_up()
    volume.lose_names()
    if volume.truth:
        with pytest.raises(GridError, match="insitu repair"):
            volume.system.find(VOLUME)
    report = volume.survey()
    assert volume.rebuild(report) == volume.truth
    assert report.is_complete and not report.unconfirmed and not report.conflicts


@pytest.mark.parametrize("seed", SEEDS)
def test_names_can_be_lost_again(lab: FileNodes, seed: int) -> None:
    """Manifests of the first metadata store may still be there, on nodes that were away meanwhile."""
    volume = Volume(lab, random.Random(seed))
    for _ in range(20):
        volume.step()
    volume.keep_up()
    volume.lose_names()
    volume.rebuild(volume.survey())
    lab.alive.discard(away := volume.rng.choice(lab.nodes))
    lab.down = {away}
    for _ in range(20):
        volume.step()
    volume.keep_up()
    lab.alive, lab.down = set(lab.nodes), set()
    if seed % 2:
        volume.keep_up()
    volume.lose_names()
    report = volume.survey()
    rebuilt = volume.rebuild(report)
    # What that node alone has of the first store may have been removed meanwhile.
    assert find_differences(volume, rebuilt) <= find_named(report)
    assert {path: rebuilt.get(path) for path in volume.truth} == volume.truth


def find_differences(volume: Volume, rebuilt: dict[str, bytes]) -> set[str]:
    every = rebuilt.keys() | volume.truth.keys()
    return {path for path in every if rebuilt.get(path) != volume.truth.get(path)}


def find_named(report: NamesReport) -> set[str]:
    certain = {path for _, path, _ in (*report.incomplete, *report.conflicts)}
    return certain | {path for _, path in report.unconfirmed}


@pytest.mark.parametrize("seed", SEEDS)
def test_without_upkeep_each_difference_is_named(lab: FileNodes, seed: int) -> None:
    volume = Volume(lab, random.Random(seed))
    for _ in range(40):
        volume.step()
    if seed % 2:
        volume.lose_node()
    if seed % 3 == 0:
        volume.lose_manifests(2)
    volume.lose_names()
    report = volume.survey()
    rebuilt = volume.rebuild(report)
    since = report.as_of.get(VOLUME)
    named = find_named(report) | {path for path, at in volume.moved.items() if since is None or at >= since}
    unexplained = find_differences(volume, rebuilt) - named
    if not seed % 3:  # a manifest was lost beside its blocks
        unexplained -= {path for path, at in volume.written.items() if since is None or at >= since}
    assert not unexplained & rebuilt.keys()
    assert len(unexplained) <= report.missing.get(VOLUME, 0) + report.unnamed.get(VOLUME, 0)


def test_a_writer_that_has_seen_a_version_is_newer_whatever_its_clock_says(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = Volume(lab, random.Random(0))
    volume.system.pipe({"v/x": b"1", "v/y": b"1"})
    volume.keep_up()
    late = SimpleNamespace(time=lambda: time.time() - 3600.0, monotonic=time.monotonic)
    monkeypatch.setattr(client_module, "time", late)
    with volume.system.open("v/x", "ab") as file:
        file.write(b"2")
        file.flush()
        file.write(b"3")
    lab.client.dies = True
    with pytest.raises(ClusterError):  # one that hasn't seen it, and wasn't published
        lab.client.publish(VOLUME, "y", lab.client.make_entry(VOLUME, (), (), 2, 0), 0)
    volume.lose_names()
    report = volume.survey()
    assert volume.rebuild(report) == {"x": b"123", "y": b"1"}
    volume.keep_up()
    assert volume.survey().is_complete, "versions that were replaced aren't files that nobody knows"
    assert report.unconfirmed == [(VOLUME, "x")] and [path for _, path, _ in report.conflicts] == ["y"]


def test_a_version_that_a_writer_has_not_seen_is_named_and_stays(lab: FileNodes) -> None:
    """The writer's is later by the clock, and was refused, which nodes don't know."""
    volume = Volume(lab, random.Random(0))
    volume.system.pipe("v/x", b"1")
    seen = lab.client.find_file(VOLUME, "x").version
    volume.system.pipe("v/x", b"2")
    volume.keep_up()
    with pytest.raises(OSError, match="another process"):
        lab.client.publish(VOLUME, "x", lab.client.make_entry(VOLUME, (), (), 2, 0), seen)
    volume.lose_names()
    report = volume.survey()
    assert [path for _, path, _ in report.conflicts] == ["x"] and not report.replaced
    assert report.unconfirmed == [(VOLUME, "x")]


def test_a_file_is_where_it_was_moved_last_though_a_node_was_away(lab: FileNodes) -> None:
    volume = Volume(lab, random.Random(0))
    paths = [f"old{number}" for number in range(8)]
    for path in paths:
        volume.system.pipe(f"v/{path}", path.encode(), copies=4)
    volume.keep_up()
    lab.alive.discard(away := lab.nodes[0])
    lab.down = {away}
    for path in paths:
        lab.client.rename(VOLUME, path, f"new{path}")
    volume.keep_up()
    lab.alive, lab.down = set(lab.nodes), set()
    volume.lose_names()
    assert volume.rebuild(volume.survey()) == {f"new{path}": path.encode() for path in paths}


def test_what_was_not_written_to_its_end_gives_way_to_the_version_before(lab: FileNodes) -> None:
    volume = Volume(lab, random.Random(0))
    volume.system.pipe({"v/x": b"1", "v/y": b"1"})
    volume.keep_up()
    volume.system.pipe({"v/x": b"2", "v/z": b"2"})
    names = ("x", "y", "z")
    blocks = [block.key for name in names for block in lab.client.find_file(VOLUME, name).blocks]
    for store in lab.stores.values():
        store.blocks.drop(VOLUME, blocks)
    volume.lose_names()
    report = volume.survey()
    assert volume.rebuild(report) == {"x": b"1"}
    reasons = {path: why for _, path, why in report.incomplete}
    assert reasons.keys() == {"x", "y", "z"} and all("1 of 1 block" in why for why in reasons.values())
    assert "the version before is taken" in reasons["x"] and "before" not in reasons["y"] + reasons["z"]
    assert report.unconfirmed == [(VOLUME, "x")] and not report.is_complete


def test_large_files_come_back_with_their_lists(lab: FileNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "BLOCK_BYTES", 10)
    volume = Volume(lab, random.Random(0))
    volume.system.pipe({"v/x": bytes(range(256)) * 5, "v/y": bytes(2000)})
    volume.keep_up()
    entry = lab.client.find_file(VOLUME, "y")
    named = lab.client.list_blocks(VOLUME, entry.lists, ())
    assert entry.lists and len(named) == 200
    for store in lab.stores.values():
        store.blocks.drop(VOLUME, [named[17].key])
    volume.lose_names()
    report = volume.survey()
    assert volume.rebuild(report) == {"x": bytes(range(256)) * 5}
    assert [(path, why) for _, path, why in report.incomplete] == [
        ("y", "No node that answers has 1 of 200 blocks")
    ]
    assert report.unnamed == {VOLUME: 0}


def test_a_damaged_manifest_is_read_from_another_node_or_named(lab: FileNodes) -> None:
    volume = Volume(lab, random.Random(0))
    volume.system.pipe({"v/x": b"1"})
    volume.keep_up()
    (key,) = {k for held in volume.list_manifests().values() for k in held if split_key(k)[0]}
    holders = [node for node, held in volume.list_manifests().items() if key in held]
    volume.lose_names()
    for node, problems in zip(holders, (0, 1), strict=True):
        path = lab.stores[node].blocks._find(VOLUME, key)
        assert path is not None
        path.write_bytes(b"damaged")
        report = volume.survey()
        assert len(report.problems) == problems and len(report.found) == 1 - problems
    assert report.missing == {VOLUME: 1} and report.unnamed == {VOLUME: 1} and not report.is_complete
