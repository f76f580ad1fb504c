"""What the head and the agents of a cluster keep on disk, and their locks."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from insitu.base.disk.access import PRIVATE_FILE, make_folder, owner_file_mode
from insitu.base.disk.durable import replace_file
from insitu.base.disk.guarded_paths import WRITABLE_BY_OTHERS, check_written_by, read_guarded
from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import (
    ProcessIdentity,
    has_ended,
    identify_process,
    open_process,
    read_boot,
    read_host,
)
from insitu.base.spec import NodeId
from insitu.cluster.wire.options import COPY_LOST_AFTER
from insitu.grid import full_disk_as_error, list_nodes_with_stores, publish_file

logger = logging.getLogger("insitu")
TOKEN_BYTES = 32
_MIN_TOKEN_BYTES = 16
_MOST_LOCK_BYTES = _MOST_TOKEN_BYTES = 1 << 16


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
    #: The command by which the last `insitu up` has run something on hosts.
    launcher: str = ""
    #: That of each of `hosts`, where an `insitu up` of several has reached it.
    launchers: Mapping[str, str] | None = None
    #: The hosts whose agents `insitu up` has started and `insitu down` hasn't ended yet, with the command for
    #: each that ends its agent.
    hosts: Mapping[str, str] | None = None
    #: Seconds after which the copies of a node that is away are made again; None: never.
    copy_lost_after: float | None = COPY_LOST_AFTER
    #: The Ray cluster, as host:port, whose agents `insitu down` hasn't ended yet; empty: none.
    ray: str = ""
    #: The address of the head that this one has replaced (`head`), and when (`at`, in seconds since 1970).
    #: None: it is the first one of its cluster.
    replaces: Mapping[str, Any] | None = None
    #: The address of the head that has replaced the one of this home; empty: none has.
    replaced_by: str = ""
    #: Whether its metadata store was made: if that isn't there any more, it was lost.
    has_metadata: bool = False
    #: The process that the head which runs ends with, and when that was started, in clock ticks. None: none.
    tied_to: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who holds a lock, as it has written itself into the lock's file, which it alone may write."""

    #: The process.
    process: ProcessIdentity
    #: The user whose file and process it is.
    user: int
    #: True: it runs on this host.
    is_here: bool


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What a store says about the agent that has served it last."""

    #: The cluster that the store belongs to.
    cluster: str
    #: The head's address, as host:port.
    head: str
    #: The highest epoch of a head that the agent has accepted.
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


def _read(kind: type[Record], home: Path, path: Path) -> Record | None:
    try:
        values = json.loads(read_guarded(home, path))
        known = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in values.items() if name in known})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ClusterError(
            f"{path} must say which cluster this is, as JSON. Received: what can't be read ({error}). Remove "
            f"it, and the cluster's hosts get an identity again with `insitu up --hosts`"
        ) from error


def read_head(paths: Paths) -> HeadRecord | None:
    """Return the record of the head whose home this is; None where it is none.

    Raises ClusterError, and InputError for one that a stranger may have written.
    """
    return _read(HeadRecord, paths.home, paths.head)


def write_head(paths: Paths, record: HeadRecord) -> None:
    make_folder(paths.home, paths.home)
    # It holds commands that the owner runs, so nobody else may write it, in a shared home either.
    publish_file(paths.head, json.dumps(asdict(record)).encode(), owner_file_mode(paths.home))


def check_record_owner(paths: Paths) -> None:
    """Raise InputError if another user has written the head's record, whose commands are run.

    Nobody else can put another one in the place of this user's: the folder of a shared home is sticky.
    """
    try:
        found = paths.head.lstat()
    except FileNotFoundError:
        return
    try:
        check_written_by(paths.head, found, {os.geteuid()})
    except InputError as error:
        raise InputError(
            f"The record of a head holds commands, so only its own user may write it, who alone brings hosts "
            f"up and down. Received: {paths.head} of user {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Remove it, or set INSITU_HOME to another folder"
        ) from error


def change_head(paths: Paths, **values: Any) -> HeadRecord:
    """Change fields of the head's record, which is made on first use. Returns the new one.

    Raises InputError for a record that another user could have written.
    """
    check_record_owner(paths)
    record = read_head(paths) or HeadRecord(secrets.token_hex(16))
    record = replace(record, **values)
    write_head(paths, record)
    return record


def start_record(paths: Paths, address: str, **won: Any) -> HeadRecord:
    """Write down that this process is the head now, in a new epoch, tied to no other. Returns the record.

    `won`: what etcd has given it instead, such as the epoch.
    """
    own = identify_process(os.getpid())
    before = read_head(paths)
    drawn = {"epoch": (before.epoch if before else 0) + 1, "instance": os.urandom(16).hex()}
    return change_head(
        paths,
        **(drawn | won),
        address=address,
        pid=os.getpid(),
        start=own.start if own else 0,
        tied_to=None,
    )


def is_orphaned(record: HeadRecord) -> bool:
    """Return whether the process that a head of this host is tied to has ended."""
    return record.tied_to is not None and has_ended(ProcessIdentity(*record.tied_to))


def read_agent(paths: Paths, node: NodeId) -> AgentRecord | None:
    """Return the record of a store's agent; None where none has served it.

    Raises ClusterError, and InputError for one that a stranger may have written.
    """
    return _read(AgentRecord, paths.home, paths.agent(node))


def list_agents(paths: Paths) -> dict[NodeId, AgentRecord]:
    """Return the records of all stores in this home, without those that a stranger may have written. Raises
    ClusterError."""
    found = {}
    for node in list_nodes_with_stores(paths):
        try:
            record = read_agent(paths, node)
        except InputError as error:
            logger.warning("the agent of %s isn't known: %s", node, error)
            continue
        if record is not None:
            found[node] = record
    return found


def find_head_of_agents(paths: Paths) -> str:
    """Return the address of the head that the agents of this home follow; empty if there are none."""
    if read_head(paths) is not None:
        return ""
    return next((record.head for record in list_agents(paths).values()), "")


def write_agent(paths: Paths, node: NodeId, record: AgentRecord) -> None:
    """Raises GridError for a disk that is full or fails, OSError."""
    data = json.dumps(asdict(record)).encode()
    with full_disk_as_error(paths.agent(node), "The one before stays"):
        replace_file(paths.agent(node), data, sync=True, mode=owner_file_mode(paths.home))


def _open_lock(path: Path, flags: int = 0) -> int:
    """Open a lock's file. Raises FileNotFoundError, OSError, and InputError for one of another user."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags, PRIVATE_FILE)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP):
            raise
        check_written_by(path, path.lstat(), {os.geteuid()})
        raise
    try:
        found = os.fstat(file)
        # Root acts for the user whose file it is: `open_holder` looks at the process, too.
        check_written_by(path, found, {os.geteuid()} if os.geteuid() else {0, found.st_uid})
    except BaseException:
        os.close(file)
        raise
    return file


def take_process_lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None where another process has it.

    This process writes itself into the file. Raises InputError for the file of another user.
    """
    file = _open_lock(path, os.O_CREAT)
    if not _lock(file):
        os.close(file)
        return None
    own = identify_process(os.getpid())
    record = {
        "path": str(path.resolve()),
        "host": read_host(),
        "boot": read_boot(),
        "pid": os.getpid(),
        "start": own.start if own else 0,
    }
    data = json.dumps(record).encode()
    try:
        with full_disk_as_error(path):
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a process has the lock. Raises InputError for the file of another user."""
    try:
        file = _open_lock(path)
    except FileNotFoundError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def read_holder(path: Path) -> LockHolder | None:
    """Return who holds a lock; None where nobody does, or hasn't written itself into the file yet.

    What it returns was written by a process of the user whose file it is: nobody else may write there. Raises
    InputError for a file of another user, or one that was put at `path` from elsewhere.
    """
    try:
        file = _open_lock(path)
    except FileNotFoundError:
        return None
    try:
        if _lock(file):
            return None
        user = os.fstat(file).st_uid
        record = json.loads(os.pread(file, _MOST_LOCK_BYTES, 0))
        identity = ProcessIdentity(int(record["pid"]), int(record["start"]))
        place, host, boot = record["path"], record["host"], record["boot"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    finally:
        os.close(file)
    if place != str(path.resolve()):
        raise InputError(
            f"A lock's file says where it is. Received: {path}, which is the lock {place!r:.200}: somebody "
            f"has put it there. Remove it"
        )
    is_here = bool(boot and boot == read_boot()) or host == read_host()
    return LockHolder(identity, user, is_here)


def open_holder(holder: LockHolder) -> int | None:
    """Return a descriptor by which the holder of a lock can be signalled; None where it has ended.

    Raises InputError if the process is of another user than the lock: the record isn't its own then.
    """
    process = open_process(holder.process)
    if process is None:
        return None
    try:
        user = os.stat(f"/proc/{holder.process.pid}").st_uid
    except OSError:
        os.close(process)
        return None
    if user != holder.user:
        os.close(process)
        raise InputError(
            f"The holder of a lock is of the lock's own user, {holder.user}. Received: process "
            f"{holder.process.pid} of user {user}. Nothing was signalled. Remove the lock's file"
        )
    return process


def make_token(paths: Paths) -> str:
    """Return the cluster's token, made on first use. Raises InputError if others may read it."""
    if not paths.token.exists():
        write_token(paths, secrets.token_hex(TOKEN_BYTES))
    return read_token(paths)


def write_token(paths: Paths, token: str) -> None:
    """Keep the token for processes of this home. Raises InputError for one that could be guessed."""
    check_token(token)
    make_folder(paths.home, paths.home)
    replace_file(paths.token, f"{token}\n".encode(), sync=True, mode=PRIVATE_FILE)


def read_token(paths: Paths) -> str:
    """Return the cluster's token. Raises InputError if it isn't there, or others may read it."""
    return _read_token(paths.token, paths.home)


def read_token_file(path: Path) -> str:
    """Return the token in a file that the user names, maybe by a link, as a mounted secret is: that belongs
    to root, who may have given it to a group. Raises as `read_token`."""
    return _read_token(path, None)


def _read_token(path: Path, home: Path | None) -> str:
    """Return the token in a file of this user, or else of who owns `home`; None: of the system."""
    try:
        with open(path, "rb", opener=_open_itself if home else None) as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_TOKEN_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise InputError(
            f"The cluster's token must be in {path}. Received: {error.strerror}. Copy the file of "
            f"that name from the head, with mode 0600"
        ) from error
    by_root = not home and found.st_uid == 0
    others = 0o037 if by_root else 0o077
    if found.st_mode & others or found.st_uid not in {os.geteuid(), _owner(home) if home else 0}:
        raise InputError(
            f"Only its owner may read the cluster's token. Received: {path} of user {found.st_uid} "
            f"with mode {stat.S_IMODE(found.st_mode):o}. Give it mode 0600, or have that user remove it"
        )
    return check_token(text)


def _open_itself(name: str, flags: int) -> int:
    """Open a file, not what a link in its place leads to, and don't wait for a writer of a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def is_own_folder(folder: Path) -> bool:
    """Return whether a folder is this user's, who alone may write there: code in it is run. In a shared home
    others can make one, or a link, before this process does."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & WRITABLE_BY_OTHERS
    )


def _owner(home: Path) -> int:
    """Return the user whose home it is: root may act for that user."""
    return home.stat().st_uid


def check_token(token: str) -> str:
    """Return the token. Raises InputError for one that could be guessed."""
    if len(token) < _MIN_TOKEN_BYTES or not token.isascii() or not token.isprintable():
        raise InputError(
            f"A cluster's token has {_MIN_TOKEN_BYTES} characters at least. Received: {len(token)}. Copy the "
            f"file `token` of the head's INSITU_HOME"
        )
    return token
