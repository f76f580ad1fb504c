"""What the head and agents keep on disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import identify_process
from insitu.base.spec import NodeId
from insitu.cluster.nodes.hosts import take_down_hosts
from insitu.cluster.wire import records

NODE = NodeId("a")


def test_the_record_of_a_head_keeps_what_is_not_changed(home: Path) -> None:
    paths = Paths(home)
    assert records.read_head(paths) is None
    first = records.change_head(paths, epoch=1, address="10.0.0.1:7070")
    second = records.change_head(paths, hosts={"a": "stop"})
    assert second.cluster == first.cluster and second.epoch == 1
    assert records.read_head(paths) == second


@pytest.mark.parametrize("text", ["", "[]", '{"epoch": 1}', "\xff"])
def test_a_damaged_record_is_named(home: Path, text: str) -> None:
    paths = Paths(home)
    home.mkdir()
    paths.head.write_text(text)
    with pytest.raises(ClusterError, match=r"head\.json must say which cluster this is"):
        records.read_head(paths)


def test_agents_are_listed_by_their_stores(home: Path) -> None:
    paths = Paths(home)
    made = records.AgentRecord("c", "h:1", 2, "i", "host", 3, 4)
    paths.node("b").mkdir(parents=True)
    paths.node(NODE).mkdir()
    records.write_agent(paths, NODE, made)
    assert records.list_agents(paths) == {NODE: made}


def test_a_lock_is_held_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not records.is_locked(path)
    held = records.take_process_lock(path)
    assert held is not None and records.is_locked(path) and records.take_process_lock(path) is None
    os.close(held)
    assert not records.is_locked(path)


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert records.read_holder(path) is None
    held = records.take_process_lock(path)
    assert held is not None and stat.S_IMODE(path.stat().st_mode) == 0o600
    holder = records.read_holder(path)
    assert holder is not None and holder.is_here
    assert (holder.process, holder.user) == (identify_process(os.getpid()), os.geteuid())
    process = records.open_holder(holder)
    assert process is not None
    os.close(process)
    os.close(held)
    assert records.read_holder(path) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"pid": 1}', b"[" * 50_000, b"\xff"])
def test_a_lock_that_says_nothing_names_nobody(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "lock"
    held = records.take_process_lock(path)
    assert held is not None
    path.write_bytes(data)
    assert records.read_holder(path) is None and records.is_locked(path)
    os.close(held)


def test_a_lock_that_others_may_write_names_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = records.take_process_lock(path)
    assert held is not None
    path.chmod(0o660)
    for use in (records.read_holder, records.is_locked, records.take_process_lock):
        with pytest.raises(InputError, match=r"may write it\. Received: mode 660"):
            use(path)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="which is the lock '/"):
        records.read_holder(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no regular file"):
        records.is_locked(tmp_path / "link")
    os.close(held)


def test_the_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    held = records.take_process_lock(path)
    assert held is not None
    other = path.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(InputError, match=r"Received: a file of user"):
        records.read_holder(path)
    os.close(held)


def test_a_process_of_another_user_than_the_lock_is_not_opened() -> None:
    own = identify_process(os.getpid())
    assert own is not None
    with pytest.raises(InputError, match=r"Nothing was signalled"):
        records.open_holder(records.LockHolder(own, os.geteuid() + 1, True))


def test_what_agents_write_in_a_shared_home_only_they_write(home: Path) -> None:
    paths = Paths(home)
    paths.node(NODE).mkdir(parents=True)
    home.chmod(0o2770)
    records.write_agent(paths, NODE, records.AgentRecord("c", "h:1", 2, "i", "host", 3, 4))
    assert stat.S_IMODE(paths.agent(NODE).stat().st_mode) == 0o640
    paths.agent(NODE).chmod(0o660)
    with pytest.raises(InputError, match=r"agent\.json says is acted upon.*Received: mode 660"):
        records.read_agent(paths, NODE)
    assert records.list_agents(paths) == {}


def test_a_token_is_made_once_and_belongs_to_its_owner(home: Path) -> None:
    paths = Paths(home)
    token = records.make_token(paths)
    assert len(token) == 64 and records.make_token(paths) == token
    assert stat.S_IMODE(paths.token.stat().st_mode) == 0o600
    paths.token.chmod(0o644)
    with pytest.raises(InputError, match=r"Only its owner may read.*mode 644"):
        records.read_token(paths)


def test_the_token_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root would have joined with a token that a member of a shared home knows."""
    paths = Paths(home)
    records.make_token(paths)
    own = paths.token.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    monkeypatch.setattr(records, "_owner", lambda home: own + 1)
    with pytest.raises(InputError, match=rf"Received: .*token of user {own} "):
        records.read_token(paths)
    elsewhere = home / "elsewhere"
    paths.token.rename(elsewhere)
    paths.token.symlink_to(elsewhere)
    with pytest.raises(InputError, match="symbolic links"):
        records.read_token(paths)


@pytest.mark.parametrize(("mode", "is_taken"), [(0o400, True), (0o440, True), (0o460, False), (0o444, False)])
def test_root_may_give_a_token_to_a_group_as_a_mounted_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_taken: bool
) -> None:
    file = tmp_path / "token"
    file.write_text("t" * 64)
    file.chmod(mode)
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
        found = os.stat_result((*file.stat()[:4], 0, *file.stat()[5:]))
        monkeypatch.setattr(os, "fstat", lambda opened: found)
    if is_taken:
        assert records.read_token_file(file) == "t" * 64
    else:
        with pytest.raises(InputError, match=rf"with mode {mode:o}"):
            records.read_token_file(file)


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "\n" * 20, "ü" * 20])
def test_a_token_that_could_be_guessed_is_refused(home: Path, token: str) -> None:
    with pytest.raises(InputError, match="16 characters at least"):
        records.write_token(Paths(home), token)


def test_a_missing_token_says_where_it_comes_from(home: Path) -> None:
    with pytest.raises(InputError, match="Copy the file of that name from the head"):
        records.read_token(Paths(home))


def test_nobody_else_writes_the_commands_that_the_head_of_a_shared_home_runs(home: Path) -> None:
    paths = Paths(home)
    home.mkdir()
    home.chmod(0o2770)
    records.change_head(paths, launcher="ssh {host}", hosts={"a": "stop"})
    assert stat.S_IMODE(paths.head.stat().st_mode) == 0o640
    for mode in (0o660, 0o602):
        paths.head.chmod(mode)
        with pytest.raises(InputError, match=r"only its own user may write it"):
            records.change_head(paths, pid=0)
        with pytest.raises(InputError, match=r"only its own user may write it"):
            take_down_hosts(paths, delete=False, report=lambda outcome: None)


def test_a_record_that_somebody_else_has_put_there_is_not_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(home)
    records.change_head(paths, launcher="ssh {host}", hosts={"a": "stop"})
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(InputError, match=r"only its own user may write it"):
        take_down_hosts(paths, delete=False, report=lambda outcome: None)
