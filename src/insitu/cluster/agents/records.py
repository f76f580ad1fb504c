"""What the head and the agents of a cluster keep on disk, and their locks."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from insitu.access import PRIVATE_FILE, file_mode, make_folder
from insitu.durable import replace_file
from insitu.errors import ClusterError, InputError
from insitu.grid import list_nodes_with_stores, publish_file
from insitu.paths import Paths
from insitu.spec import NodeId

TOKEN_BYTES = 32
_MIN_TOKEN_BYTES = 16
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """What the home of the head says about the cluster, also while no head runs."""

    #: Tells the cluster from others; drawn when its first head is started.
    cluster: str
    #: Grows with each start of the head. Agents refuse a lower one.
    epoch: int = 0
    #: Drawn with each start of the head.
    instance: str = ""
    #: Where the head listens, as host:port; empty before its first start.
    address: str = ""
    #: The head's process; 0: none.
    pid: int = 0
    #: When that was started, in clock ticks.
    start: int = 0
    #: The command by which `insitu up` runs something on a host.
    launcher: str = ""
    #: The hosts whose agents `insitu up` has started and `insitu down` hasn't ended yet, with the command for
    #: each that ends its agent.
    hosts: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What a store says about the agent that has served it last."""

    #: The cluster that the store belongs to.
    cluster: str
    #: The head's address, as host:port.
    head: str
    #: The highest epoch of a head that the agent has obeyed.
    epoch: int
    #: The instance of that head.
    instance: str
    #: The agent's host.
    host: str
    #: Its process.
    pid: int
    #: When that was started, in clock ticks.
    start: int


Record = TypeVar("Record", HeadRecord, AgentRecord)


def _read(kind: type[Record], path: Path) -> Record | None:
    try:
        values = json.loads(path.read_bytes())
        known = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise ClusterError(
            f"{path} must say which cluster this is, as JSON. Received: what can't be read ({error}). Remove "
            f"it, and the cluster's hosts get an identity again with `insitu up --hosts`"
        ) from error


def read_head(paths: Paths) -> HeadRecord | None:
    """Return the record of the head whose home this is; None where it is none. Raises ClusterError."""
    return _read(HeadRecord, paths.head)


def write_head(paths: Paths, record: HeadRecord) -> None:
    make_folder(paths.home, paths.home)
    # It holds commands that the owner runs, so nobody else may write it, in a shared home either.
    mode = file_mode(paths.home) & ~_WRITABLE_BY_OTHERS
    publish_file(paths.head, json.dumps(asdict(record)).encode(), mode)


def check_record_owner(paths: Paths) -> None:
    """Raise InputError where another user could have written the head's record, whose commands are run."""
    try:
        found = paths.head.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _WRITABLE_BY_OTHERS:
        raise InputError(
            f"The record of a head holds commands, so only its own user may write it, who alone brings hosts "
            f"up and down. Received: {paths.head} of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Remove it, or set INSITU_HOME to another folder"
        )


def change_head(paths: Paths, **values: Any) -> HeadRecord:
    """Change fields of the head's record, which is made on first use. Returns the new one.

    Raises InputError for a record that another user could have written.
    """
    check_record_owner(paths)
    record = read_head(paths) or HeadRecord(secrets.token_hex(16))
    record = replace(record, **values)
    write_head(paths, record)
    return record


def read_agent(paths: Paths, node: NodeId) -> AgentRecord | None:
    """Return the record of a store's agent; None where none has served it. Raises ClusterError."""
    return _read(AgentRecord, paths.agent(node))


def list_agents(paths: Paths) -> dict[NodeId, AgentRecord]:
    """Return the records of all stores in this home. Raises ClusterError."""
    found = {node: read_agent(paths, node) for node in list_nodes_with_stores(paths)}
    return {node: record for node, record in found.items() if record is not None}


def write_agent(paths: Paths, node: NodeId, record: AgentRecord) -> None:
    replace_file(
        paths.agent(node), json.dumps(asdict(record)).encode(), sync=True, mode=file_mode(paths.home)
    )


def take_process_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None where another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def is_locked(path: Path) -> bool:
    """Return whether a process has the lock."""
    if not path.exists():
        return False
    file = take_process_lock(path)
    if file is not None:
        os.close(file)
    return file is None


def make_token(paths: Paths) -> str:
    """Return the cluster's token, made on first use. Raises InputError where others may read it."""
    if not paths.token.exists():
        write_token(paths, secrets.token_hex(TOKEN_BYTES))
    return read_token(paths)


def write_token(paths: Paths, token: str) -> None:
    """Keep the token for processes of this home. Raises InputError for one that could be guessed."""
    check_token(token)
    make_folder(paths.home, paths.home)
    replace_file(paths.token, f"{token}\n".encode(), sync=True, mode=PRIVATE_FILE)


def read_token(paths: Paths) -> str:
    """Return the cluster's token. Raises InputError where it isn't there, or others may read it."""
    try:
        found = paths.token.stat()
        text = paths.token.read_text(errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"The cluster's token must be in {paths.token}. Received: {error.strerror}. Copy the file of "
            f"that name from the head, with mode 0600"
        ) from error
    if found.st_mode & 0o077:
        raise InputError(
            f"Only its owner may read the cluster's token. Received: {paths.token} with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Give it mode 0600"
        )
    return check_token(text)


def check_token(token: str) -> str:
    """Return the token. Raises InputError for one that could be guessed."""
    if len(token) < _MIN_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise InputError(
            f"A cluster's token has {_MIN_TOKEN_BYTES} characters at least. Received: {len(token)}. Copy the "
            f"file `token` of the head's INSITU_HOME"
        )
    return token
