"""The file system on nodes in this process: what is lost, and what isn't, when nodes die or can't talk."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_nodes import FileNodes

from insitu.cluster.decide import rank_nodes
from insitu.cluster.files import client as client_module
from insitu.cluster.files import repairing
from insitu.cluster.files import service as service_module
from insitu.cluster.files.repairing import OrphanWatch, find_old_here, repair_volume
from insitu.errors import ClusterError, InputError
from insitu.grid.shared_files import Block
from insitu.spec import NodeId


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileNodes]:
    monkeypatch.setattr(service_module, "_REACH_SECONDS", 0.0)
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(client_module, "_RETRY_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as nodes:
        yield nodes


def write(
    lab: FileNodes, path: str, data: bytes, copies: int = 2, expected: int | None = None
) -> list[Block]:
    blocks = [lab.client.write_block("v", data, copies)]
    lab.client.publish("v", path, blocks, copies, expected)
    return blocks


def read(lab: FileNodes, path: str) -> bytes:
    return b"".join(lab.client.read_blocks("v", lab.client.find_file("v", path).blocks))


def leader(lab: FileNodes) -> NodeId:
    return rank_nodes("v", lab.nodes)[0]


def test_what_is_not_there_is_named_with_its_volume(lab: FileNodes) -> None:
    for change in (
        lambda: lab.client.remove("v", "no/x", recursive=False),
        lambda: lab.client.rename("v", "no/x", "y"),
    ):
        with pytest.raises(FileNotFoundError) as missing:
            change()
        assert missing.value.filename == "insitu://v/no/x"


def test_any_node_may_die_and_what_was_written_is_read(lab: FileNodes) -> None:
    (block,) = write(lab, "x", b"first")
    assert sum(block.key in keys for keys in lab.held("v").values()) == 2
    for node in lab.nodes:
        lab.down = {node}
        assert read(lab, "x") == b"first"
        write(lab, f"while-{node}", node.encode())
    lab.down = set()
    assert [c.path for c in lab.client.list_children("v", "")] == [*(f"while-{n}" for n in "abcd"), "x"]
    assert [read(lab, f"while-{n}") for n in lab.nodes] == [b"a", b"b", b"c", b"d"]
    assert lab.client.list_volumes() == ["v"]


def test_a_warning_says_once_that_files_have_fewer_copies(
    lab: FileNodes, caplog: pytest.LogCaptureFixture
) -> None:
    def list_warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "copies" in record.getMessage()]
        caplog.clear()
        return found

    write(lab, "x", b"x", copies=9)  # as many as there are nodes
    assert list_warnings() == []
    lab.alive = {NodeId("a"), NodeId("b"), NodeId("c")}
    write(lab, "x", b"y", copies=4)
    write(lab, "x", b"z", copies=4)
    (warning,) = list_warnings()
    assert "files of v get 3 of 4 copies" in warning and "alive" in warning
    lab.alive.add(NodeId("d"))
    write(lab, "x", b"z", copies=4)
    lab.down = {NodeId("d")}
    write(lab, "x", b"z", copies=4)
    (warning,) = list_warnings()
    assert "d gives no answer" in warning


def test_a_file_with_k_copies_survives_the_loss_of_all_but_one_of_its_nodes(lab: FileNodes) -> None:
    write(lab, "x", b"safe", copies=4)
    for left in lab.nodes:
        lab.alive = {left}
        lab.down = set(lab.nodes) - {left}
        assert read(lab, "x") == b"safe"


def test_the_first_node_comes_back_with_old_names_and_learns_before_it_answers(lab: FileNodes) -> None:
    write(lab, "x", b"old")
    write(lab, "gone", b"gone")
    lab.down = {leader(lab)}
    write(lab, "x", b"new")
    lab.client.remove("v", "gone", recursive=False)
    lab.start(leader(lab))  # another process, with the same store
    lab.calls.clear()
    assert read(lab, "x") == b"new" and lab.client.look("v", "gone") == (None, None)
    assert (leader(lab), "look") in lab.calls


def test_a_leader_that_was_cut_off_takes_what_it_has_missed_before_it_changes(lab: FileNodes) -> None:
    first = write(lab, "x", b"1")
    lab.client.look("v", "x")  # its names are compared with all others
    lab.cut = {frozenset((leader(lab), other)) for other in ("", *lab.nodes)}
    stamp = lab.client.publish("v", "x", [*first, lab.client.write_block("v", b"2", 2)], 2, 1).stamp
    lab.cut = set()
    # Behind the old version nothing can be put, though the leader has it.
    with pytest.raises(OSError) as stale:
        lab.client.publish("v", "x", [*first, lab.client.write_block("v", b"3", 2)], 2, 1)
    assert stale.value.errno == errno.ESTALE
    assert lab.client.find_file("v", "x").stamp == stamp and read(lab, "x") == b"12"


def test_without_a_head_the_smaller_part_changes_nothing(lab: FileNodes) -> None:
    write(lab, "x", b"1", copies=4)
    lab.is_led = False
    lab.down = {lab.nodes[0]}
    write(lab, "x", b"2", copies=4)
    lab.down = set(lab.nodes[:2])
    with pytest.raises(OSError, match="without a head") as refused:
        write(lab, "x", b"3")
    assert refused.value.errno == errno.EROFS
    assert read(lab, "x") == b"2"


def test_of_a_cluster_that_was_cut_the_head_alone_makes_no_majority(lab: FileNodes) -> None:
    assert len(lab.nodes) == 4
    write(lab, "x", b"1", copies=4)
    # The head hasn't noticed yet, and then it has.
    for lost in (set(lab.nodes[:2]), set(lab.nodes[:3])):
        for known in (set(lab.nodes), set(lab.nodes) - lost):
            lab.down, lab.alive = lost, known
            if len(lost) == 2:
                write(lab, "x", b"2", copies=4)
                continue
            with pytest.raises(OSError, match=r"half of the nodes .* 1 of 4 .*insitu drain NODE") as refused:
                write(lab, "x", b"3", copies=4)
            assert refused.value.errno == errno.EROFS and read(lab, "x") == b"2"


def test_a_damaged_copy_is_passed_over_and_made_again(lab: FileNodes) -> None:
    (block,) = write(lab, "x", b"whole")
    order = [n for n in rank_nodes(block.key, lab.nodes) if block.key in lab.held("v")[n]]
    path = lab.services[order[0]].store.blocks._find("v", block.key)
    assert path is not None
    path.write_bytes(b"wrong")
    assert read(lab, "x") == b"whole"
    assert block.key not in lab.held("v")[order[0]]  # nobody reads it again
    assert lab.client.repair("v").copied == 1
    assert sum(block.key in keys for keys in lab.held("v").values()) == 2


def test_a_lost_node_is_made_up_for_and_too_much_goes_when_it_returns(lab: FileNodes) -> None:
    blocks = [block for n in range(6) for block in write(lab, f"f{n}", bytes([n]) * 10)]
    lost = next(node for node, keys in lab.held("v").items() if keys)
    lab.alive, lab.down = set(lab.nodes) - {lost}, {lost}
    report = lab.client.repair("v")
    assert report.copied == len(lab.held("v")[lost]) and not report.lost and not report.failed
    assert lab.client.repair("v").copied == 0
    lab.alive, lab.down = set(lab.nodes), set()
    assert lab.client.repair("v").removed == report.copied
    held = lab.held("v")
    assert all(sum(block.key in keys for keys in held.values()) == 2 for block in blocks)


def test_what_no_node_has_is_named_and_nothing_is_removed_unless_all_answer(lab: FileNodes) -> None:
    write(lab, "x", b"1", copies=1)
    (holder,) = [node for node, keys in lab.held("v").items() if keys]
    lab.down = {holder}
    with pytest.raises(Exception, match="gives no answer"):
        lab.client.repair("v")
    lab.alive = set(lab.nodes) - {holder}
    assert lab.client.repair("v").lost == ("x",)
    with pytest.raises(OSError, match="can't be read") as lost:
        read(lab, "x")
    assert lost.value.errno == errno.EIO


def test_old_blocks_that_no_name_has_go_and_young_ones_stay(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = write(lab, "x", b"1")
    lab.client.write_block("v", b"of a writer that was killed", 2)
    files = [lab.client.find_file("v", "x")]

    def repair() -> int:
        peers = lab.services[lab.nodes[0]]._peers
        return repair_volume("v", files, peers, lab.view(), None, find_old_here).removed

    assert repair() == 0
    later = time.time() + 4000
    monkeypatch.setattr(time, "time", lambda: later)
    assert repair() == 2
    assert set().union(*lab.held("v").values()) == {kept[0].key}


def test_a_wrong_clock_removes_nothing_of_a_file_that_is_being_written(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader whose clock was an hour ahead removed it, and what was published then couldn't be read."""
    block = lab.client.write_block("v", b"of a writer that goes on", 2)
    left = lab.client.write_block("v", b"of a writer that was killed", 2)
    watch, peers = OrphanWatch(), lab.services[lab.nodes[0]]._peers
    real, ahead = time.monotonic, [0.0]
    monkeypatch.setattr(repairing.time, "monotonic", lambda: real() + ahead[0])

    def repair() -> int:
        return repair_volume("v", [], peers, lab.view(), None, watch.find_old).removed

    for node in lab.nodes:
        held = lab.services[node].store.blocks
        for key in held.list_held("v"):
            path = held._find("v", key)
            assert path is not None
            os.utime(path, (1.0, 1.0))  # by the clock of its host
    assert repair() == 0
    ahead[0] = 3000.0
    assert lab.client.keep_blocks("v", [block]) == 0
    assert repair() == 0
    ahead[0] = 4000.0
    assert repair() == 2
    assert lab.client.keep_blocks("v", [block, left]) == 1
    ahead[0] = 9000.0
    assert repair() == 0 and repair() == 0  # it was kept in between
    ahead[0] = 13000.0
    assert repair() == 2


def test_replaced_blocks_can_be_read_for_a_while(lab: FileNodes) -> None:
    write(lab, "x", b"old")
    before = lab.client.find_file("v", "x")
    write(lab, "x", b"new")
    first = lab.services[leader(lab)]
    first.drop_replaced(time.monotonic())
    assert list(lab.client.read_blocks("v", before.blocks)) == [b"old"]
    first.drop_replaced(time.monotonic() + service_module.DROP_SECONDS)
    with pytest.raises(OSError, match="replaced or removed"):
        list(lab.client.read_blocks("v", before.blocks))


def test_full_nodes_are_passed_over_and_a_full_cluster_is_said(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = set(lab.nodes[:3])
    for node in lab.nodes:
        blocks = lab.services[node].store.blocks
        put = blocks.put

        def refuse(volume: str, key: str, data: bytes, node: NodeId = node, put=put) -> None:  # type: ignore[no-untyped-def]
            if node in full:
                raise OSError(errno.ENOSPC, f"the quota of {node} is reached")
            put(volume, key, data)

        monkeypatch.setattr(blocks, "put", refuse)
    write(lab, "x", b"1")
    assert {node for node, keys in lab.held("v").items() if keys} == {lab.nodes[3]}
    full.add(lab.nodes[3])
    with pytest.raises(OSError, match="quota") as found:
        write(lab, "x", b"2")
    assert found.value.errno == errno.ENOSPC
    assert read(lab, "x") == b"1"


def test_a_rename_whose_answer_was_lost_has_been_done(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(lab, "x", b"1")
    first = lab.services[leader(lab)]
    answer = first.answer

    def die_before_the_answer(kind, fields, payload):  # type: ignore[no-untyped-def]
        found = answer(kind, fields, payload)
        if kind == "rename":
            lab.down.add(leader(lab))
            raise client_module.Unreachable("it has died")
        return found

    monkeypatch.setattr(first, "answer", die_before_the_answer)
    lab.client.rename("v", "x", "y")
    assert leader(lab) in lab.down and read(lab, "y") == b"1"
    with pytest.raises(FileNotFoundError):
        lab.client.rename("v", "no", "y2")


def test_nodes_that_join_learn_the_names_and_what_isnt_known_is_refused(lab: FileNodes) -> None:
    last = rank_nodes("v", lab.nodes)[0]
    lab.alive = set(lab.nodes) - {last}
    write(lab, "x", b"1")
    assert lab.services[last].store.names.find("v", "x") is None
    lab.alive = set(lab.nodes)
    assert lab.services[last].compare_names() == 1
    assert lab.services[last].compare_names() == 0 and lab.services[last].list_led() == ["v"]
    for kind, fields in (
        ("format", {}),
        ("look", {"volume": "..", "path": ""}),
        ("look", {"volume": "v", "path": "a//b"}),
        ("publish", {"volume": "v", "path": "x", "entry": []}),
        ("rename", {"volume": "v", "path": "x", "target": "../x"}),
        ("put", {"volume": "v", "key": "../x"}),
        ("drop", {"volume": "v", "keys": "all"}),
    ):
        with pytest.raises(InputError):
            lab.services[last].act(kind, fields)
    with pytest.raises(OSError, match="damaged on its way"):
        lab.services[last].act("put", {"volume": "v", "key": "0" * 32, "checksum": "xxh3:"}, b"x")


def test_without_any_node_a_caller_hears_why(lab: FileNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "ASK_SECONDS", 0.0)
    lab.down = set(lab.nodes)
    with pytest.raises(ClusterError, match=r"must be reachable.*gives no answer"):
        lab.client.look("v", "x")
    lab.alive = set()
    with pytest.raises(ClusterError, match="none that is alive"):
        lab.client.look("v", "x")
