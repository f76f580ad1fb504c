"""Which store of a home an agent owns, which head it may follow, and how its store is deleted."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, check_simple_name, is_simple_name
from insitu.cluster.decide import Claim, is_replaced, may_accept
from insitu.cluster.job_files import rotated_path
from insitu.cluster.job_hosts.task_servers import end_servers
from insitu.cluster.wire import (
    AgentRecord,
    LockHolder,
    is_locked,
    list_agents,
    open_holder,
    read_agent,
    read_head,
    read_holder,
)
from insitu.grid import Catalog, is_catalog_copy, list_nodes_with_stores
from insitu.grid.shared_files import remove_file_memory


class ReplacedHead(ClusterError):
    """The head was replaced by another one."""


STOP_SECONDS = 15.0
"""Seconds in which an agent ends by itself, before it is killed."""


def choose_node(paths: Paths, name: str) -> NodeId:
    """Return the node whose store in this home an agent owns.

    A store keeps its name: it is what the catalogue knows it by. Raises InputError if there are several
    stores and none is named, or the host's name can't be a node's.
    """
    stores = list_nodes_with_stores(paths)
    if name:
        return NodeId(check_simple_name("A node's name", name))
    if len(stores) > 1:
        raise InputError(
            f"An agent owns one store. Received: {paths.home} with {', '.join(stores)}. Name one by --name, "
            f"or set INSITU_HOME to another folder"
        )
    if stores:
        return stores[0]
    host = socket.gethostname()
    if not is_simple_name(host):
        raise InputError(
            f"A node's name is made of letters, digits, '_', '.', '-'. Received: the host's name {host!r}. "
            f"Give another one by --name"
        )
    return NodeId(host)


def check_home(paths: Paths, node: NodeId, head: Mapping[str, Any], address: str) -> None:
    """Raise ClusterError or InputError unless the store of `node` may follow this head.

    `head` is what the head says about itself.
    """
    cluster, epoch, instance = (head.get(key) for key in ("cluster", "epoch", "instance"))
    if not isinstance(cluster, str) or not isinstance(epoch, int) or not isinstance(instance, str):
        raise ClusterError(f"The head at {address} must name cluster and epoch. Received: neither")
    own_head = read_head(paths)
    if own_head is not None and own_head.cluster != cluster:
        raise InputError(
            f"The home of a head takes part in its own cluster. Received: the head at {address} of cluster "
            f"{cluster[:8]}, and {paths.home}, which is of cluster {own_head.cluster[:8]}. Set INSITU_HOME "
            f"to another folder"
        )
    before = read_agent(paths, node)
    if before is not None:
        _check_same_cluster(paths, node, before, cluster, address)
        seen, asked = Claim(before.epoch, before.instance), Claim(epoch, instance)
        if is_replaced(asked, seen):
            raise ReplacedHead(
                f"A head that was replaced has no agents any more. Received: the head at {address}, which "
                f"the one at {before.head} has replaced"
            )
        if not may_accept(seen, asked):
            raise ClusterError(
                f"A cluster has one head, whose epoch grows with each start. Received: epoch {epoch} of the "
                f"head at {address}, after epoch {before.epoch} of the head at {before.head}. One home is a "
                f"copy of the other: end the head that is out of date"
            )
    if own_head is None and paths.catalog.exists() and not is_catalog_copy(paths):
        names = sorted({cache.name for cache in Catalog(paths).stored()})
        if names:
            raise InputError(
                f"The head keeps the catalogue of all nodes. Received: {paths.home}, which has a catalogue "
                f"of its own with {', '.join(names[:5])}. Set INSITU_HOME to another folder"
            )


def _check_same_cluster(paths: Paths, node: NodeId, before: AgentRecord, cluster: str, address: str) -> None:
    if before.cluster != cluster:
        raise InputError(
            f"A store belongs to one cluster. Received: the head at {address} of cluster {cluster[:8]}, and "
            f"{node}, which belongs to cluster {before.cluster[:8]} of the head at {before.head}. Set "
            f"INSITU_HOME to another folder. If that head is lost, `insitu up --hosts FILE --replace-head` "
            f"replaces it, from a home with its token. To let the store change over, remove "
            f"{paths.agent(node)}"
        )


def set_aside_store(paths: Paths, node: NodeId) -> Path:
    """Take the store of `node` out of this home, and return the folder that it is in now, to be deleted.

    With the last one of this home the copy of the catalogue and the token go, unless it is a head's.
    """
    folder = paths.node(node)
    dropped = folder.with_name(f".dropped-{node}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(dropped)
    for log in (paths.agent_log(node), rotated_path(paths.agent_log(node))):
        log.unlink(missing_ok=True)
    if not paths.head.exists() and not list_nodes_with_stores(paths):
        if is_catalog_copy(paths):
            paths.catalog.unlink(missing_ok=True)
        paths.token.unlink(missing_ok=True)
        paths.members.unlink(missing_ok=True)
        paths.metadata_settings.unlink(missing_ok=True)
        shutil.rmtree(paths.job_copies, ignore_errors=True)
    remove_file_memory(paths.file_memory(node))
    return dropped


def delete_store(paths: Paths, node: NodeId) -> None:
    """Delete the store of `node`, as `set_aside_store` says."""
    shutil.rmtree(set_aside_store(paths, node), ignore_errors=True)


def remove_new_store(paths: Paths, node: NodeId) -> None:
    """Remove the folder of a store that was made for an agent that couldn't join. One with data stays."""
    own = {paths.store_id(node), paths.agent(node), paths.agent_lock(node), paths.agent_certificate(node)}
    if set(paths.node(node).iterdir()) <= own:
        shutil.rmtree(paths.node(node), ignore_errors=True)


def find_running(paths: Paths) -> dict[NodeId, AgentRecord]:
    """Return the records of the agents of this home that run, on any host that sees it, without those of
    other users."""
    running = {}
    for node, record in list_agents(paths).items():
        with contextlib.suppress(InputError):
            if is_locked(paths.agent_lock(node)):
                running[node] = record
    return running


def stop_agents(paths: Paths) -> list[NodeId]:
    """End the agents of this home that run on this host. Returns their nodes.

    Which process that is, the agent itself has written into its lock, which nobody else may write: in a
    shared home others may put any record into the store. Raises ClusterError, and InputError for the lock of
    another user, after the others have been ended.
    """
    stopped, refused = [], None
    for node in list_nodes_with_stores(paths):
        try:
            holder = _find_holder(paths, node)
            process = open_holder(holder) if holder is not None and holder.is_here else None
        except InputError as error:
            refused = error
            continue
        if holder is None or not holder.is_here:
            continue
        if process is not None:
            try:
                end_process(process)
            finally:
                os.close(process)
        _wait_for_lock(paths, node)
        stopped.append(node)
    for node in list_nodes_with_stores(paths):
        end_servers(paths, node)  # of an agent that was killed
    if refused is not None:
        raise refused
    return stopped


def _find_holder(paths: Paths, node: NodeId) -> LockHolder | None:
    """Return the process that serves a store; None if nobody does. Raises InputError, and ClusterError if the
    holder of the lock doesn't say who it is."""
    path = paths.agent_lock(node)
    deadline = time.monotonic() + STOP_SECONDS
    while (holder := read_holder(path)) is None and is_locked(path):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The agent of {node} writes into its lock who it is. Received: nothing in {path}. `fuser "
                f"{path}` names the process; end it"
            )
        time.sleep(0.05)
    return holder


def end_process(process: int, seconds: float = STOP_SECONDS) -> None:
    """End a process that is given by its descriptor, by a signal that it may handle, or else by SIGKILL after
    so many seconds."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)
        if poll.poll(seconds * 1000):
            return


def _wait_for_lock(paths: Paths, node: NodeId) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while is_locked(paths.agent_lock(node)):
        if time.monotonic() > deadline:
            raise ClusterError(
                f"The agent of {node} must end when it is asked to. Received: its lock is still held. `fuser "
                f"{paths.agent_lock(node)}` names the process"
            )
        time.sleep(0.05)
