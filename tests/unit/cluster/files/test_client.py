"""Files on nodes in this process: what is lost, and what isn't, when nodes die, are silent or busy."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_nodes import FileNodes

from insitu.base.errors import ClusterError, InputError, StoreUnavailable
from insitu.base.spec import NodeId
from insitu.cluster.client.file_system import InsituFileSystem
from insitu.cluster.decide import rank_nodes
from insitu.cluster.files import asking, names_client
from insitu.cluster.files import client as client_module
from insitu.grid.shared_files import Block, entries


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileNodes]:
    monkeypatch.setattr(client_module, "VIEW_SECONDS", 0.0)
    monkeypatch.setattr(names_client, "RETRY_SECONDS", 0.0)
    with contextlib.closing(FileNodes(tmp_path, ("a", "b", "c", "d"))) as nodes:
        yield nodes


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a tenth of the times."""
    for module, name, seconds in (
        (asking, "HEDGE_SECONDS", 0.1),
        (client_module, "HEDGE_SECONDS", 0.1),
        (names_client, "HEDGE_SECONDS", 0.1),
        (names_client, "SECONDS", 0.5),
        (names_client, "CLIENT_SECONDS", 1.5),
        (client_module, "CLIENT_SECONDS", 1.5),
    ):
        monkeypatch.setattr(module, name, seconds)


def write(
    lab: FileNodes, path: str, data: bytes, copies: int = 2, expected: int | None = None
) -> list[Block]:
    blocks = [lab.client.write_block("v", data, copies)]
    lab.client.publish("v", path, lab.client.make_entry("v", (), blocks, copies, len(data)), expected)
    return blocks


def read(lab: FileNodes, path: str) -> bytes:
    return b"".join(lab.client.read_blocks("v", lab.client.find_file("v", path).blocks))


def open_system(lab: FileNodes) -> InsituFileSystem:
    system = InsituFileSystem(home=str(lab.folder))
    system._cluster = lab.open_cluster()
    system.client = lab.client
    return system


def test_errors_name_the_path_with_its_volume(lab: FileNodes) -> None:
    for change in (
        lambda: lab.client.remove("v", "no/x", recursive=False),
        lambda: lab.client.rename("v", "no/x", "y"),
        lambda: lab.client.find_file("v", "no/x"),
    ):
        with pytest.raises(FileNotFoundError) as missing:
            change()
        assert missing.value.filename == "insitu://v/no/x"
    write(lab, "file", b"1")
    with pytest.raises(NotADirectoryError) as below:
        write(lab, "file/below", b"1")
    assert below.value.filename == "insitu://v/file"


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


def test_a_file_with_k_copies_survives_the_loss_of_all_but_one_of_its_nodes(lab: FileNodes) -> None:
    write(lab, "x", b"safe", copies=4)
    for left in lab.nodes:
        lab.alive = {left}
        lab.down = set(lab.nodes) - {left}
        assert read(lab, "x") == b"safe"


def test_a_node_that_the_head_has_lost_is_read_from_if_it_is_there(lab: FileNodes) -> None:
    write(lab, "x", b"1", copies=1)
    (holder,) = [NodeId(node) for node, keys in lab.held("v").items() if keys]
    lab.alive.discard(holder)
    assert read(lab, "x") == b"1"


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


@pytest.mark.usefixtures("hurried")
def test_one_silent_node_holds_up_nothing_and_is_asked_last_afterwards(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_client, "SECONDS", 20.0)
    for module in (names_client, client_module):
        monkeypatch.setattr(module, "CLIENT_SECONDS", 60.0)
    written = {f"f{n}": bytes([n]) for n in range(8)}
    for path, data in written.items():
        write(lab, path, data)
    entries = {path: lab.client.find_file("v", path) for path in written}
    for node in lab.nodes:
        lab.silent = {node}
        for first in (
            lambda: lab.client.look("v", "f0"),
            lambda: write(lab, "first", b"1", copies=3),
            lambda: [lab.client.read_block("v", entry.blocks[0]) for entry in entries.values()],
        ):
            lab.client = lab.connect(node)  # whose host's agent is asked first
            began = time.monotonic()
            first()
            # Far below the limits for an answer, which is what a wait for the silent one would take.
            assert time.monotonic() - began < 10.0
        write(lab, "second", b"2", copies=3)
        lab.calls.clear()
        for path, data in written.items():
            write(lab, "again", data)
            assert read(lab, path) == data
        assert sum(called == node for called, _ in lab.calls) <= 1


@pytest.mark.usefixtures("hurried")
def test_a_node_that_is_slow_but_lives_is_waited_for(lab: FileNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    put, slow = lab.stores[NodeId("a")].blocks.put, threading.Event()

    def put_slowly(volume: str, key: str, data: bytes) -> None:
        slow.wait(0.4)
        put(volume, key, data)

    monkeypatch.setattr(lab.stores[NodeId("a")].blocks, "put", put_slowly)
    write(lab, "x", b"1", copies=4)
    assert all(lab.held("v").values())


def test_the_last_blocks_and_the_manifest_are_written_at_the_same_time(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each put waits until all others have begun: two copies of a block, and of its manifest."""
    together = threading.Barrier(4)
    for store in lab.stores.values():
        put = store.blocks.put

        def put_together(volume: str, key: str, data: bytes, put=put) -> None:  # type: ignore[no-untyped-def]
            together.wait(30.0)
            put(volume, key, data)

        monkeypatch.setattr(store.blocks, "put", put_together)
    system = open_system(lab)
    system.pipe("v/x", b"1")
    with system.open("v/y", "ab") as file:
        file.write(b"2")
    assert system.cat("v/x") == b"1" and system.cat("v/y") == b"2"


def test_who_is_busy_is_asked_again_and_nobody_else(lab: FileNodes) -> None:
    lab.client = lab.connect(NodeId("c"))
    lab.busy = {NodeId("c"): 2}
    lab.client.make_folder("v", "x")
    assert lab.calls == [("c", "folder")] * 3


def test_an_agent_without_its_head_says_so_and_another_one_is_asked(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.headless = {NodeId("a"), NodeId("b"), NodeId("c")}
    write(lab, "x", b"1")
    lab.headless.add(NodeId("d"))
    monkeypatch.setattr(names_client, "CLIENT_SECONDS", 0.3)
    before = len(lab.metadata.transactions)
    for ask in (lambda: lab.client.look("v", "x"), lambda: lab.client.make_folder("v", "y")):
        with pytest.raises(ClusterError, match="the head was last heard 9 s ago") as away:
            ask()
        assert "may have been made" not in str(away.value)
    assert len(lab.metadata.transactions) == before
    lab.headless.clear()
    assert read(lab, "x") == b"1"


def test_nobody_waits_for_a_head_that_no_other_one_follows(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.headless, lab.waits = set(lab.nodes) - {NodeId("d")}, False
    write(lab, "x", b"1")  # one of all knows the head
    lab.headless.add(NodeId("d"))
    monkeypatch.setattr(names_client, "CLIENT_SECONDS", 1e6)
    with pytest.raises(ClusterError, match=r"must be there\. Received: the head was last heard 9 s ago"):
        lab.client.make_folder("v", "y")


def test_a_silent_agent_is_not_waited_for_where_others_have_no_head(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = lab.nodes[0]
    lab.headless, lab.waits, lab.silent = set(lab.nodes) - {silent}, False, {silent}
    monkeypatch.setattr(names_client, "CLIENT_SECONDS", 1e6)
    monkeypatch.setattr(names_client, "HEDGE_SECONDS", 0.01)
    lab.client = lab.connect(silent)
    for _ in range(2):
        with pytest.raises(ClusterError, match=r"must be there\. Received: the head was last heard 9 s ago"):
            lab.client.make_folder("v", "y")
    assert [node for node, _ in lab.calls].count(silent) == 1  # asked by the first question alone


def test_a_damaged_copy_is_passed_over_and_made_again(lab: FileNodes) -> None:
    (block,) = write(lab, "x", b"whole")
    order = [n for n in rank_nodes(block.key, lab.nodes) if block.key in lab.held("v")[n]]
    path = lab.stores[order[0]].blocks._find("v", block.key)
    assert path is not None
    path.write_bytes(b"wrong")
    assert read(lab, "x") == b"whole"
    assert block.key not in lab.held("v")[order[0]]  # nobody reads it again
    assert lab.repair("v").copied == 1
    assert sum(block.key in keys for keys in lab.held("v").values()) == 2


def test_full_nodes_are_passed_over_and_a_full_cluster_is_said(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = set(lab.nodes[:3])
    for node in lab.nodes:
        blocks = lab.stores[node].blocks
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


def lose_once(lab: FileNodes, kind: str, then: Callable[[], object] = lambda: None) -> list[str]:
    """Lose the next answer of a kind, and then do something. Return what names the loss once it was."""
    lost: list[str] = []

    def note() -> None:
        lab.losing.clear()
        lost.append(kind)
        then()

    lab.losing, lab.on_loss = {kind}, note
    return lost


def test_a_change_whose_answer_was_lost_is_made_once(lab: FileNodes) -> None:
    write(lab, "x", b"1")
    lost = lose_once(lab, "rename")
    lab.client.rename("v", "x", "y")
    assert lost and read(lab, "y") == b"1"
    write(lab, "d/old", b"2")
    # What another writer has put into the place meanwhile stays.
    lost = lose_once(lab, "remove", lambda: write(lab, "d/new", b"3"))
    lab.client.remove("v", "d", recursive=True)
    assert lost and read(lab, "d/new") == b"3" and lab.client.look("v", "d/old") == (None, None)
    lost = lose_once(lab, "rename", lambda: write(lab, "d/newer", b"4"))
    lab.client.rename("v", "d", "e")
    assert lost and read(lab, "e/new") == b"3" and read(lab, "d/newer") == b"4"
    lost = lose_once(lab, "publish")
    write(lab, "only", b"5", expected=0)
    assert lost and read(lab, "only") == b"5"
    with pytest.raises(FileNotFoundError):
        lab.client.rename("v", "no", "y2")


@pytest.mark.usefixtures("hurried")
def test_an_error_of_the_first_call_says_nothing_if_a_second_one_was_made(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, to another agent, makes the file; then the first finds it there."""
    first, release = NodeId("a"), threading.Event()
    lab.client = lab.connect(first)
    answer = lab.service.answer
    asked: list[bool] = []

    def hold_first(kind: str, fields: dict[str, object]) -> dict[str, object]:
        if kind == "publish":
            asked.append("again" in fields)
            if len(asked) == 1:
                release.wait(5.0)
                found = answer(kind, fields)
                assert found["errno"] == errno.EEXIST
                return found
            found = answer(kind, fields)
            release.set()
            time.sleep(0.2)  # the first answer comes first
            return found
        return answer(kind, fields)

    monkeypatch.setattr(lab.service, "answer", hold_first)
    write(lab, "x", b"1", expected=0)
    assert asked[:2] == [False, True] and read(lab, "x") == b"1"


@pytest.mark.parametrize("mode", ["wb", "ab"])
@pytest.mark.usefixtures("hurried")
def test_a_file_stays_whose_publication_nobody_heard_of(lab: FileNodes, mode: str) -> None:
    """The writer removed the blocks of what was published, and the version before was garbage, too."""
    system = open_system(lab)
    system.pipe("v/x", b"old")
    lab.losing = {"publish"}
    file = system.open("v/x", mode)
    file.write(b"new")
    with pytest.raises(ClusterError, match="may have been made or not"):
        file.close()
    lab.losing = set()
    lab.collect_garbage()
    assert system.cat("v/x") == (b"new" if mode == "wb" else b"oldnew")


def test_what_is_appended_comes_once_also_behind_another_writer(lab: FileNodes) -> None:
    system = open_system(lab)
    system.pipe("v/x", b"0")
    file = system.open("v/x", "ab")
    file.write(b"1")

    def append_elsewhere() -> None:
        with system.open("v/x", "ab") as other:
            other.write(b"2")

    lost = lose_once(lab, "publish", append_elsewhere)
    file.flush()
    file.write(b"3")
    file.close()
    assert lost and system.cat("v/x") == b"0123"
    # Where the file was replaced, what was appended before isn't appended to the new one.
    file = system.open("v/x", "ab")
    file.write(b"4")
    lost = lose_once(lab, "publish", lambda: system.pipe("v/x", b"new"))
    file.close()
    assert lost and system.cat("v/x") == b"new"
    file = system.open("v/x", "ab")
    file.write(b"5")
    lost = lose_once(lab, "publish", lambda: system.rm("v/x"))
    file.flush()
    file.write(b"6")
    file.close()
    assert lost and system.cat("v/x") == b"6"


def test_two_appenders_whose_answers_are_lost_lose_nothing(lab: FileNodes) -> None:
    system = open_system(lab)
    calls = [0]

    def is_losing(id: str) -> bool:
        calls[0] += 1
        return calls[0] % 3 == 0

    lab.metadata.is_losing = is_losing

    def append(name: str) -> None:
        with system.open("v/log", "ab") as file:
            for number in range(15):
                file.write(b"%s%d," % (name.encode(), number))
                file.flush()

    threads = [threading.Thread(target=append, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lab.metadata.lost) > 10
    parts = system.cat("v/log").decode().split(",")[:-1]
    for name in "xyz":
        assert [part for part in parts if part[0] == name] == [f"{name}{n}" for n in range(15)]
    assert len(parts) == 45


def test_a_file_of_many_blocks_keeps_their_list_in_blocks(
    lab: FileNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.cluster.client.open_files.BLOCK_BYTES", 10)
    monkeypatch.setattr("insitu.cluster.client.open_files.SMALL_BYTES", 4)
    monkeypatch.setattr(client_module, "BLOCKS_A_LIST", 50)
    system = open_system(lab)
    data = os.urandom(2005)
    system.pipe("v/x", data)
    entry = lab.client.find_file("v", "x")
    assert len(entry.lists) == 5 and not entry.blocks and entry.block_count == 201
    assert system.cat("v/x") == data and system.cat_file("v/x", 995, 1013) == data[995:1013]
    with system.open("v/x", "ab") as file:
        for number in range(150):
            data += b"%03d" % number * 4
            file.write(b"%03d" % number * 4)
            file.flush()
    assert system.cat("v/x") == data and system.info("v/x")["size"] == len(data)
    assert len(lab.client.find_file("v", "x").blocks) <= entries.MAX_LISTED
    assert sum(system.count_blocks("v/x").values()) == 2 * system.info("v/x")["blocks"]
    held = lab.held("v")
    system.pipe("v/x", b"small")
    lab.collect_garbage()
    # What appending has left over goes later; blocks that the last version had go now.
    assert sum(map(len, lab.held("v").values())) < sum(map(len, held.values())) / 2
    assert system.cat("v/x") == b"small"


def test_what_nobody_knows_or_what_is_wrong_is_refused(lab: FileNodes) -> None:
    for kind, fields in (
        ("format", {}),
        ("look", {"volume": "..", "path": ""}),
        ("look", {"volume": "v", "path": "a//b"}),
        ("look", {"volume": "v", "path": "/".join("x" * 41)}),
        ("publish", {"volume": "v", "path": "x", "change": "0" * 32, "entry": []}),
        ("publish", {"volume": "v", "path": "x", "change": "0" * 32, "entry": [1, 0.0, 1, [], [], 0]}),
        ("folder", {"volume": "v", "path": "x"}),
        ("folder", {"volume": "v", "path": "", "change": "0" * 32}),
        ("rename", {"volume": "v", "path": "x", "target": "../x", "change": "0" * 32}),
        ("put", {"volume": "v", "key": "../x"}),
        ("drop", {"volume": "v", "keys": "all"}),
        ("drop", {"volume": "v", "keys": [], "older_than": "1"}),
    ):
        with pytest.raises(InputError):
            lab.peers.find(NodeId("a"), lab.view()).act(kind, fields)
    with pytest.raises(OSError, match="damaged on its way"):
        lab.peers.find(NodeId("a"), lab.view()).act(
            "put", {"volume": "v", "key": "0" * 32, "checksum": "xxh3:"}, b"x"
        )


def test_without_any_node_a_caller_hears_why(lab: FileNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_client, "CLIENT_SECONDS", 0.3)
    lab.down = set(lab.nodes)
    with pytest.raises(ClusterError, match=r"must answer within.*gives no answer"):
        lab.client.look("v", "x")
    lab.nodes = []
    with pytest.raises(ClusterError, match=r"Received: none"):
        lab.client.read_block("v", Block("0" * 32, 1, f"xxh3:{0:032x}"))


def test_what_may_have_been_appended_is_not_appended_again(lab: FileNodes, hurried: None) -> None:
    """Neither by `close`, which flushes, nor by a caller that catches the error and writes on."""
    system = open_system(lab)
    lab.losing = {"publish"}
    with (
        pytest.raises(ClusterError, match="may have been made or not"),
        system.open("v/closed", "ab") as file,
    ):
        file.write(b"1")
    log = system.open("v/log", "ab")
    log.write(b"1")
    with pytest.raises(ClusterError, match="may have been made or not"):
        log.flush()
    lab.losing = set()
    for again in (log.flush, lambda: log.write(b"2"), log.close):
        with pytest.raises(OSError, match="open the file again"):
            again()
    assert log.closed and system.cat("v/log") == b"1" == system.cat("v/closed")


def test_the_reason_is_that_of_a_question_with_time(lab: FileNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names_client, "CLIENT_SECONDS", 0.3)
    reasons: list[str] = []

    def fail(call: str) -> None:
        reasons.append(f"reason {len(reasons)}.")
        raise StoreUnavailable(reasons[-1])

    lab.metadata.before = fail
    with pytest.raises(ClusterError, match=r"must answer within.*Received: reason 0\."):
        lab.client.look("v", "x")
    assert len(reasons) > 1, "later ones had less than a second"
    reasons.clear()
    monkeypatch.setattr(names_client, "HEDGE_SECONDS", 0.0)
    with pytest.raises(ClusterError, match=r"Received: reason [1-9]\d*\."):
        lab.client.look("v", "x")
