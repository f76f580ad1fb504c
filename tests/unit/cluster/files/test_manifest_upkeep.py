"""Manifests follow names: after each change there is one for each file, on as many nodes as its blocks."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_nodes import FileNodes
from lost_names import VOLUME, Volume

from insitu.cluster.files import client as client_module
from insitu.cluster.files import names_guard
from insitu.cluster.files.upkeep import ROUND_SECONDS
from insitu.grid.shared_files import FileManifest, parse_manifest


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Volume]:
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(names_guard, "_AGAIN_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as lab:
        yield Volume(lab, random.Random(0))


def read_manifests(volume: Volume) -> dict[str, list[FileManifest]]:
    """Return the manifests by path, one for each copy."""
    found: dict[str, list[FileManifest]] = {}
    for node, keys in volume.list_manifests().items():
        for key in keys:
            manifest = parse_manifest(volume.lab.stores[node].blocks.get(VOLUME, key))
            found.setdefault(manifest.path, []).append(manifest)
    return found


def check(volume: Volume, copies: dict[str, int]) -> None:
    """Compare the manifests with the truth."""
    found = read_manifests(volume)
    marks = found.pop("", [])
    assert {path: len(each) for path, each in found.items()} == copies
    for path, manifests in found.items():
        entry = volume.lab.client.find_file(VOLUME, path)
        assert all(each.is_confirmed and each.entry == entry for each in manifests)
    assert len(marks) == (4 if copies else 0) and all(each.files == len(copies) for each in marks)


def test_a_writer_puts_a_manifest_beside_the_blocks(volume: Volume) -> None:
    volume.system.pipe("v/d/x", b"1", copies=3)
    volume.system.pipe("v/d/x", b"2", copies=3)
    first, second = sorted(read_manifests(volume)["d/x"], key=lambda each: each.replaces)[::3]
    assert not first.is_confirmed and (first.replaces, first.entry.version) == (0, 0)
    entry = volume.lab.client.find_file(VOLUME, "d/x")
    assert second.replaces and second.entry.blocks == entry.blocks
    held = volume.lab.held(VOLUME)
    for node, keys in volume.list_manifests().items():
        assert (second.key in keys) == (entry.blocks[0].key in held[node])


def test_manifests_follow_what_is_written_moved_and_removed(volume: Volume) -> None:
    system = volume.system
    for name in ("d/x", "d/e/y", "z"):
        system.pipe(f"v/{name}", name.encode(), copies=2)
    volume.keep_up()
    check(volume, {"d/x": 2, "d/e/y": 2, "z": 2})
    system.mv("v/d", "v/moved")
    system.mv("v/z", "v/moved/x")  # over another one
    with system.open("v/moved/x", "ab") as file:
        file.write(b"more")
    volume.keep_up()
    check(volume, {"moved/x": 2, "moved/e/y": 2})
    system.rm("v/moved/e", recursive=True)
    volume.keep_up()
    check(volume, {"moved/x": 2})
    system.rm("v", recursive=True)
    volume.keep_up()
    check(volume, {})


def test_copies_are_made_and_removed_as_nodes_come_and_go(volume: Volume) -> None:
    lab = volume.lab
    volume.system.pipe("v/x", b"1", copies=2)
    volume.keep_up()
    (key,) = {each.key for each in read_manifests(volume)["x"]}
    lost = next(node for node, keys in volume.list_manifests().items() if key in keys)
    lab.alive, lab.down = set(lab.nodes) - {lost}, {lost}
    volume.keep_up()
    assert sum(key in keys for keys in volume.list_manifests().values()) == 3
    lab.alive, lab.down = set(lab.nodes), set()
    volume.keep_up()
    check(volume, {"x": 2})


def test_what_was_there_stays_until_a_node_that_fails_is_there_again(volume: Volume) -> None:
    lab = volume.lab
    volume.system.pipe("v/x", b"1", copies=4)
    volume.keep_up()
    lab.client.rename(VOLUME, "x", "y")
    lab.down = {lab.nodes[0]}
    volume.upkeep.advance(lab.view(), ROUND_SECONDS)
    found = read_manifests(volume)
    assert {path: len(each) for path, each in found.items() if path} == {"x": 1, "y": 3}
    lab.down = set()
    volume.upkeep.advance(lab.view(), 1.5 * ROUND_SECONDS)
    assert "x" in read_manifests(volume), "there is some time between two rounds"
    volume.upkeep.advance(lab.view(), 2 * ROUND_SECONDS)
    check(volume, {"y": 4})


def test_what_was_there_stays_if_a_manifest_may_not_have_been_written(volume: Volume) -> None:
    lab = volume.lab
    volume.system.pipe("v/x", b"1", copies=4)
    volume.keep_up()
    lab.client.rename(VOLUME, "x", "y")
    lab.losing = {"put"}
    volume.upkeep.advance(lab.view(), ROUND_SECONDS)
    assert len(read_manifests(volume)["x"]) == 4
    lab.losing = set()
    volume.upkeep.advance(lab.view(), 2 * ROUND_SECONDS)
    check(volume, {"y": 4})


def test_no_block_goes_while_it_is_not_known_which_are_those_of_another_head(volume: Volume) -> None:
    lab = volume.lab
    lab.alive = {lab.nodes[0]}  # it alone holds what the next head doesn't know
    volume.system.pipe("v/x", b"1", copies=1)
    volume.keep_up()
    volume.lose_names()
    lab.alive = {lab.nodes[1]}
    volume.system.pipe("v/y", b"2", copies=1)
    lab.alive = set(lab.nodes)
    (held,) = (store.blocks for node, store in lab.stores.items() if node == lab.nodes[0])
    (block,) = set(held.list_held(VOLUME))
    lab.losing = {"get"}
    volume.keep_up()
    assert volume.upkeep.spared[VOLUME] is None
    lab.losing = set()
    volume.keep_up()
    assert volume.upkeep.spared[VOLUME] == {block}


def test_nobody_is_asked_while_nothing_changes(volume: Volume) -> None:
    volume.system.pipe("v/x", b"1")
    for step in range(3):
        volume.upkeep.advance(volume.lab.view(), step * ROUND_SECONDS)
    check(volume, {"x": 2})
    calls = len(volume.lab.calls)
    volume.upkeep.advance(volume.lab.view(), 9 * ROUND_SECONDS)
    assert len(volume.lab.calls) == calls


def test_a_manifest_of_a_writer_that_goes_on_stays_for_a_while(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = volume.lab
    volume.system.pipe("v/x", b"1")
    with pytest.raises(OSError, match="another process"):
        lab.client.publish(VOLUME, "x", lab.client.make_entry(VOLUME, (), (), 2, 0), 99)
    volume.keep_up()
    assert {each.is_confirmed for each in read_manifests(volume)["x"]} == {True, False}
    monkeypatch.setattr("insitu.cluster.files.upkeep.WRITER_SECONDS", 0.0)
    volume.upkeep.advance(lab.view(), ROUND_SECONDS)
    check(volume, {"x": 2})
