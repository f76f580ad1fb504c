"""Copies that are made again, and blocks that are removed: of no file that anybody can read, ever."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_nodes import FileNodes
from lost_names import VOLUME, Volume

from insitu.base.spec import NodeId
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.cluster.decide import rank_nodes
from insitu.cluster.files import FileUpkeep, NamesGuard, View, names_guard, repairing, upkeep
from insitu.cluster.files import client as client_module
from insitu.grid.shared_files import Block, blocks

HOUR = 3600.0


class Clock:
    """What the code that removes blocks takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        self.wall_ahead = 0.0
        clock = SimpleNamespace(
            time=lambda: time.time() + self.ahead + self.wall_ahead,
            monotonic=lambda: time.monotonic() + self.ahead,
        )
        monkeypatch.setattr(blocks, "time", clock)
        monkeypatch.setattr(repairing, "time", clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileNodes]:
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as nodes:
        yield nodes


def write(lab: FileNodes, path: str, data: bytes, copies: int = 2) -> list[Block]:
    blocks = [lab.client.write_block("v", data, copies)]
    lab.client.publish("v", path, lab.client.make_entry("v", (), blocks, copies, len(data)), None)
    return blocks


def read(lab: FileNodes, path: str) -> bytes:
    return b"".join(lab.client.read_blocks("v", lab.client.find_file("v", path).blocks))


def count(lab: FileNodes) -> int:
    return sum(map(len, lab.held("v").values()))


def test_a_lost_node_is_made_up_for_and_too_much_goes_when_it_returns(lab: FileNodes) -> None:
    written = [block for n in range(6) for block in write(lab, f"f{n}", bytes([n]) * 10)]
    lost = next(NodeId(node) for node, keys in lab.held("v").items() if keys)
    lab.alive, lab.down = set(lab.nodes) - {lost}, {lost}
    report = lab.repair("v")
    assert report.copied == len(lab.held("v")[lost]) and not report.lost and not report.failed
    assert lab.repair("v").copied == 0
    lab.alive, lab.down = set(lab.nodes), set()
    assert lab.repair("v").removed == report.copied
    held = lab.held("v")
    assert all(sum(block.key in keys for keys in held.values()) == 2 for block in written)


def test_a_copy_too_many_stays_if_the_other_one_is_lost_while_others_are_copied(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,), (more,) = write(lab, "x", b"1", copies=1), write(lab, "y", b"2", copies=2)
    holder, other = sorted(lab.nodes, key=lambda node: block.key not in lab.held("v")[node])[:2]
    lab.stores[other].blocks.put("v", block.key, b"1")
    kept = next(node for node in rank_nodes(block.key, lab.nodes) if node in (holder, other))
    lab.stores[next(n for n in lab.nodes if more.key in lab.held("v")[n])].blocks.drop("v", [more.key])
    repairer = lab.repairer()
    copy = repairer._copy
    dropped = [0]

    def lose(*each: Any) -> bool:
        dropped[0] += lab.stores[kept].blocks.drop("v", [block.key])
        return copy(*each)

    monkeypatch.setattr(repairer, "_copy", lose)
    lab.repair("v", repairer)
    assert dropped == [1] and read(lab, "x") == b"1"


@pytest.mark.parametrize("is_known", [True, False])
def test_blocks_stay_while_the_node_that_knows_their_file_is_away(
    lab: FileNodes, clock: Clock, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The names were rebuilt from the other nodes: nobody there knows of the file. The head that leads may
    not know of the node either."""
    monkeypatch.setattr(names_guard, "_AGAIN_SECONDS", 0.0)
    volume = Volume(lab, random.Random(0))
    volume.system.pipe("v/z", b"1", copies=4)
    at: list[str] = []
    while len({*at}) < 2:  # the first one gets the manifest, too
        written = [lab.client.write_block(VOLUME, content, 1) for content in (b"1", b"2")]
        at = [next(node for node in lab.nodes if b.key in lab.held(VOLUME)[node]) for b in written]
    lab.client.publish(VOLUME, "x", lab.client.make_entry(VOLUME, (), written, 1, 2), None)
    volume.keep_up()
    volume.lose_names()
    lab.alive, lab.down = set(lab.nodes) - {NodeId(at[0])}, {NodeId(at[0])}
    volume.rebuild(volume.survey())
    read_view = lab.view if is_known else (lambda: View(lab.view().alive))
    keeper = FileUpkeep(lab.metadata, lab.peers, read_view, NamesGuard(lab.metadata, lab.peers))
    keeper._repairer._read_on = 0.0
    for step in range(4):
        clock.ahead = 2 * HOUR * (step + 1)
        keeper.advance(1000.0 * (step + 1))
    assert written[1].key in lab.held(VOLUME)[at[1]]


def test_what_no_node_has_is_named_and_a_node_that_doesnt_answer_ends_a_repair(lab: FileNodes) -> None:
    write(lab, "d/x", b"1", copies=1)
    (holder,) = [NodeId(node) for node, keys in lab.held("v").items() if keys]
    lab.down = {holder}
    with pytest.raises(Exception, match="gives no answer"):
        lab.repair("v")
    lab.alive = set(lab.nodes) - {holder}
    assert lab.repair("v").lost == ("d/x",)
    with pytest.raises(OSError, match="can't be read") as lost:
        read(lab, "d/x")
    assert lost.value.errno == errno.EIO


def test_old_blocks_of_no_file_go_and_young_ones_and_those_that_are_kept_stay(
    lab: FileNodes, clock: Clock
) -> None:
    (kept,) = write(lab, "x", b"1")
    going_on = lab.client.write_block("v", b"of a writer that continues", 2)
    left = lab.client.write_block("v", b"of a writer that was killed", 2)
    assert lab.repair("v").removed == 0
    clock.wall_ahead = 2 * HOUR  # the clock of the hosts jumps, which says nothing
    assert lab.repair("v").removed == 0
    clock.ahead = 0.8 * HOUR
    assert lab.client.keep_blocks("v", [going_on]) == 0
    clock.ahead = 1.1 * HOUR
    assert lab.repair("v").removed == 2
    assert lab.client.keep_blocks("v", [going_on, left]) == 1
    assert set().union(*lab.held("v").values()) == {kept.key, going_on.key}


def test_nothing_goes_while_some_files_may_be_unknown(
    lab: FileNodes, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(lab, "x", b"1")
    clock.ahead = 2 * HOUR
    before = count(lab)
    assert lab.repairer().repair("v", lambda: ([], False), lab.view()).removed == 0
    monkeypatch.setattr("insitu.grid.shared_files.entries.MAX_LISTED", 64)
    entry = lab.client.make_entry("v", (), [lab.client.write_block("v", b"2", 2)] * 65, 2, 65)
    lab.client.publish("v", "large", entry, None)
    for node in lab.nodes:
        lab.stores[node].blocks.drop("v", [entry.lists[0].key])
    clock.ahead = 4 * HOUR
    report = lab.repair("v")
    assert (report.removed, report.lost) == (0, ("large",)) and count(lab) == before + 2


@pytest.mark.parametrize("when", ["listed", "read", "dropped"])
def test_a_file_that_is_published_or_moved_while_blocks_are_removed_keeps_them(
    lab: FileNodes, clock: Clock, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A writer holds an old block, and publishes it in the middle of a repair, after it had it kept."""
    block = lab.client.write_block("v", b"of a slow writer", 2)
    write(lab, "a/moved", b"2")
    clock.ahead = 1.5 * HOUR
    done = list[str]()

    def publish(at: str) -> None:
        if at == when and not done:
            done.append(at)
            if at != "listed":  # whose name is read in any case
                assert lab.client.keep_blocks("v", [block]) == 0
            lab.client.publish("v", "x", lab.client.make_entry("v", (), [block], 2, 16), None)

    held = [lab.stores[node].blocks for node in lab.nodes]
    for each in held:
        list_held, drop = each.list_held, each.drop

        def list_then(volume: str, list_held=list_held) -> dict[str, float]:  # type: ignore[no-untyped-def]
            found = list_held(volume)
            publish("listed")
            return found

        def drop_after(volume: str, keys, older_than: float = 0.0, drop=drop) -> int:  # type: ignore[no-untyped-def]
            publish("dropped")
            return drop(volume, keys, older_than)

        monkeypatch.setattr(each, "list_held", list_then)
        monkeypatch.setattr(each, "drop", drop_after)
    list_files = lab.tree.list_files

    def list_then_publish(volume: str):  # type: ignore[no-untyped-def]
        found = list_files(volume)
        publish("read")
        return found

    monkeypatch.setattr(lab.tree, "list_files", list_then_publish)
    lab.repair("v")
    assert done and read(lab, "x") == b"of a slow writer" and read(lab, "a/moved") == b"2"


def test_no_block_of_a_file_goes_while_files_are_written_moved_and_removed(
    lab: FileNodes, clock: Clock
) -> None:
    """With an hour of nothing, each block that a repair doesn't find in a file is removed at once."""
    system = InsituFileSystem(home=str(lab.folder))
    system._cluster, system.client = lab.open_cluster(), lab.client
    for number in range(60):
        write(lab, f"d/{number}", b"%d" % number)
    clock.ahead = 2 * HOUR
    ending, errors = threading.Event(), list[Exception]()

    def change(name: str) -> None:
        try:
            for number in range(60):
                lab.client.rename("v", f"d/{number}", f"{name}/{secrets.token_hex(4)}-{number}")
                with system.open(f"v/log-{name}", "ab") as log:
                    log.write(b"%d," % number)
        except FileNotFoundError:
            pass
        except Exception as error:
            errors.append(error)
        finally:
            ending.set()

    thread = threading.Thread(target=change, args=("e",))
    thread.start()
    repairs = 0
    while not ending.is_set() or not repairs:
        lab.repair("v")
        lab.collect_garbage()
        repairs += 1
    thread.join()
    assert not errors
    files = system.find("v")
    assert len(files) == 61
    for path in files:
        if path.startswith("v/e/"):
            assert system.cat(path) == path.rpartition("-")[2].encode()
    assert system.cat("v/log-e") == b"".join(b"%d," % n for n in range(60))


def test_replaced_blocks_can_be_read_for_a_while(lab: FileNodes, clock: Clock) -> None:
    (old,) = write(lab, "x", b"old")
    write(lab, "x", b"new")
    write(lab, "d/e/y", b"y")
    lab.client.remove("v", "d", recursive=True)
    repairer = lab.repairer(read_on=repairing.READ_ON_SECONDS)
    lab.collect_garbage(repairer)
    clock.ahead = 29.0
    lab.collect_garbage(repairer)
    assert lab.client.read_block("v", old) == b"old" and count(lab) == 6
    clock.ahead = 2 * HOUR  # also if a repair finds that no file has it
    fresh = lab.repairer(read_on=repairing.READ_ON_SECONDS)
    assert lab.repair("v", fresh).removed == 0
    lab.collect_garbage(repairer)
    assert count(lab) == 2 and read(lab, "x") == b"new"
    with pytest.raises(OSError, match="replaced or removed"):
        lab.client.read_block("v", old)
    assert not [key for key in lab.metadata.records if "garbage" in key]


def test_what_a_node_that_was_away_has_of_files_that_were_removed_goes_later(
    lab: FileNodes, clock: Clock
) -> None:
    write(lab, "x", b"1", copies=4)
    lab.down = {NodeId("b")}
    lab.client.remove("v", "x", recursive=False)
    lab.collect_garbage()
    lab.down = set()
    assert count(lab) == 1
    clock.ahead = 1.1 * HOUR
    assert lab.repair("v").removed == 1


def test_upkeep_waits_until_the_nodes_stay_the_same(lab: FileNodes, clock: Clock) -> None:
    written = [block for n in range(6) for block in write(lab, f"f{n}", bytes([n]))]
    keeper = FileUpkeep(lab.metadata, lab.peers, lab.view, NamesGuard(lab.metadata, lab.peers))
    now = 1000.0
    keeper.advance(now)
    lost = next(NodeId(node) for node, keys in lab.held("v").items() if keys)
    lab.alive, lab.down = set(lab.nodes) - {lost}, {lost}
    keeper.advance(now + upkeep.SETTLED_SECONDS - 1)
    keeper.advance(now + 2 * upkeep.SETTLED_SECONDS - 2)
    left = {node: keys for node, keys in lab.held("v").items() if node != lost}
    assert any(sum(block.key in keys for keys in left.values()) == 1 for block in written)
    keeper.advance(now + 3 * upkeep.SETTLED_SECONDS)
    left = {node: keys for node, keys in lab.held("v").items() if node != lost}
    assert all(sum(block.key in keys for keys in left.values()) == 2 for block in written)
    lab.client.remove("v", "", recursive=True)
    keeper.advance(now + 4 * upkeep.SETTLED_SECONDS)
    clock.ahead = 60.0
    keeper.advance(now + 5 * upkeep.SETTLED_SECONDS)
    lab.down = set()
    assert {node for node, keys in lab.held("v").items() if keys} <= {lost}
    lab.alive = set(lab.nodes)
    clock.ahead = 2 * HOUR
    for step in range(3):  # a volume without a name, of which a node still has blocks
        keeper.advance(now + 6 * upkeep.SETTLED_SECONDS + step * upkeep.REPAIR_SECONDS + step)
        clock.ahead += 60.0
    assert count(lab) == 0


def test_old_names_are_refused_by_name_and_an_empty_table_is_removed(tmp_path: Path) -> None:
    import sqlite3

    from insitu.base.errors import InputError
    from insitu.base.paths import Paths
    from insitu.grid.shared_files import FileStore

    paths, node = Paths(tmp_path), NodeId("a")
    table = paths.old_file_names(node)
    table.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(table)) as database:
        database.execute("CREATE TABLE entries (volume TEXT, kind TEXT)")
        database.execute("INSERT INTO entries VALUES ('old', 'deleted')")
        database.commit()
        FileStore(paths, node)
    assert not table.exists()
    with contextlib.closing(sqlite3.connect(table)) as database:
        database.execute("CREATE TABLE entries (volume TEXT, kind TEXT)")
        database.execute("INSERT INTO entries VALUES ('models', 'file')")
        database.commit()
    with pytest.raises(InputError, match=r"names\.sqlite, in which .* of models\. Copy these files out"):
        FileStore(paths, node)
    table.write_bytes(os.urandom(4096))
    with pytest.raises(InputError, match="can't be read"):
        FileStore(paths, node)
