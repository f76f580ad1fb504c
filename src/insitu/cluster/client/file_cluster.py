"""Finds what holds files: the agents of a cluster, or the stores of this machine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from insitu.base.context import context
from insitu.base.errors import InputError, InsituError
from insitu.base.paths import Paths
from insitu.base.process.script_end import call_at_script_end, runs_script
from insitu.cluster.files import (
    FileClient,
    LocalNames,
    LocalPeers,
    Names,
    NameService,
    Peers,
    Publisher,
    RemoteNames,
    RemotePeers,
    Repairer,
    RepairReport,
    Suspects,
    TaskFileClient,
    View,
    ViewCache,
    WaitingFolder,
)
from insitu.cluster.nodes import make_file_view
from insitu.cluster.wire import (
    CLUSTER_ENV,
    TOKEN_FILE_ENV,
    ask_for_nodes,
    read_head,
    read_kept_members,
    read_nodes,
    read_token,
    read_token_file,
)
from insitu.grid import list_local_nodes, list_nodes_with_stores
from insitu.grid.shared_files import FILE, Entry, FileStore, GarbageList, NameTree, open_local_names

logger = logging.getLogger("insitu")
CONNECT_SECONDS, _ASK_SECONDS = 10.0, 2.0
"""Seconds within which a head is asked for its nodes; and by a process that knows some."""
_COLLECT_SECONDS = 1.0
"""Seconds between two removals of blocks on one machine: each waits for the disk."""
_STALL_SHARE = 0.8
"""Share of the seconds after which a job without progress fails: for so long a task waits for the head."""
_clusters: dict[tuple[object, ...], FileCluster] = {}
"""Clusters that this process has opened: each keeps connections."""
_opening = threading.Lock()


@dataclass(frozen=True, slots=True)
class FileCluster:
    """The files of one cluster."""

    #: Reads and writes them.
    client: FileClient
    #: The nodes.
    peers: Peers
    #: Returns the nodes as they are now.
    find_view: Callable[..., View]
    #: The names, if the metadata store is of this machine alone.
    tree: NameTree | None = None

    def repair(self, volume: str) -> RepairReport:
        """Make copies of a volume's blocks that are missing, and on one machine without agents remove those
        that no file has. Raises OSError, InsituError if a node that is alive doesn't answer."""
        view = self.find_view(fresh=True)
        repairer = Repairer(self.client, self.peers, read_on=0.0)
        return repairer.repair(volume, partial(self._list_files, volume), view)

    def _list_files(self, volume: str) -> tuple[list[tuple[str, Entry]], bool]:
        if self.tree is not None:
            return self.tree.list_files(volume)
        paths = [each.path for each in self.client.list_below(volume, "") if each.kind == FILE]
        looked = [(path, self.client.look(volume, path)[0]) for path in paths]
        return [(path, entry) for path, entry in looked if entry is not None], False


def open_file_cluster(paths: Paths, cluster: str = "", token_file: str = "") -> FileCluster:
    """Return the files of a cluster: that of the head at `cluster`, or at $INSITU_CLUSTER, else that of this
    home. A home that belongs to none has the stores of this machine.

    Raises InputError if the token can't be read.
    """
    address = cluster or os.environ.get(CLUSTER_ENV, "")
    if address:
        file = token_file or os.environ.get(TOKEN_FILE_ENV, "")
        token = read_token_file(Path(file)) if file else read_token(paths)

        def read_view(fresh: bool, known: bool) -> View:
            members = ask_for_nodes(address, token, _ASK_SECONDS if known else CONNECT_SECONDS)
            return make_file_view({member.facts.node: member for member in members})

        return _keep((address, token), lambda: _open_remote(token, read_view, paths, is_here=False))
    stores = list_nodes_with_stores(paths)
    if read_head(paths) is not None or any(paths.agent(node).exists() for node in stores):
        token = read_token(paths)
        return _keep((paths, token), lambda: _open_remote(token, partial(_read_view, paths), paths))
    with _opening:
        if (paths, _identify(paths)) not in _clusters:
            made = _open_local(paths)
            _clusters[paths, _identify(paths)] = made
        return _clusters[paths, _identify(paths)]


def _identify(paths: Paths) -> tuple[int, int] | None:
    """Distinguish the names of this home from those that replace them after `insitu down`."""
    try:
        found = os.stat(paths.local_files)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _keep(key: tuple[object, ...], make: Callable[[], FileCluster]) -> FileCluster:
    """Return a cluster, which is opened on first use."""
    with _opening:
        if key not in _clusters:
            _clusters[key] = make()
        return _clusters[key]


def _open_remote(
    token: str, read_view: Callable[[bool, bool], View], paths: Paths, *, is_here: bool = True
) -> FileCluster:
    peers, suspects, views = RemotePeers(token.encode()), Suspects(), ViewCache(read_view)
    own = list_nodes_with_stores(paths) if is_here else []
    names = RemoteNames(peers, views.find, suspects, own)
    make = _make_task_client if is_here and _is_of_task(paths) else FileClient
    return FileCluster(make(names, peers, views.find, suspects), peers, views.find)


def _is_of_task(paths: Paths) -> bool:
    """Return whether this process is a task of a job whose files are in the cluster of a home."""
    return runs_script() and context().job_id is not None and context().paths == paths


def _make_task_client(
    names: Names, peers: Peers, find_view: Callable[..., View], suspects: Suspects
) -> FileClient:
    """Return the files for a task, once what an earlier process of it has left is published. Raises
    Unpublished if the head doesn't come back for that."""
    me = context()
    folder = WaitingFolder(me.paths.unpublished(str(me.job_id), me.task), me.paths.home)
    client = TaskFileClient(names, peers, find_view, suspects, folder)
    seconds = _STALL_SHARE * me.stall_timeout
    if client.publisher.load():
        client.publisher.finish(seconds, "An earlier process of this task has ended")
    call_at_script_end(lambda: client.publisher.finish(seconds))
    return client


def publish_waiting(paths: Paths, folder: Path) -> list[Path]:
    """Publish what a task has left in a folder of a home. Return the changes that were refused, as files.
    Raises InputError for another folder, ClusterError if the head is unreachable, OSError."""
    place = WaitingFolder(folder.absolute(), paths.home)
    if not (place.path.is_relative_to(paths.home) and (place.path / "lock").exists()):
        raise InputError(
            f"FOLDER is one in {paths.home / 'unpublished'} in which changes of insitu:// wait. Received: "
            f"{folder}"
        )
    publisher = Publisher(open_file_cluster(paths).client, place, in_thread=False)
    publisher.load()
    while publisher.count():
        publisher.advance(raises=True)
    place.close()
    return place.list_refused()


def _read_view(paths: Paths, fresh: bool, known: bool) -> View:
    """Return the nodes as the head has said them to an agent of this home, or by `fresh` as it says them now.
    Raises ClusterError."""
    kept = read_kept_members(paths)
    if kept and not fresh:
        return make_file_view(kept)
    try:
        members, _ = read_nodes(paths, seconds=_ASK_SECONDS)
    except InsituError:
        if not kept:
            raise
        return make_file_view(kept)
    return make_file_view({member.facts.node: member for member in members})


def _open_local(paths: Paths) -> FileCluster:
    def find_view(*, fresh: bool = False) -> View:
        nodes = (*list_local_nodes(paths), *list_nodes_with_stores(paths))
        return View(dict.fromkeys(nodes))

    store = open_local_names(paths)
    peers, suspects, garbage = LocalPeers(partial(FileStore, paths)), Suspects(), GarbageList(store)
    names = LocalNames(NameService(store), then=lambda: collect_garbage())
    client = FileClient(names, peers, find_view, suspects, writes_manifests=False)
    repairer = Repairer(client, peers, read_on=0.0)

    collect_at = 0.0

    def collect_garbage() -> None:
        nonlocal collect_at
        if time.monotonic() < collect_at:
            return
        collect_at = time.monotonic() + _COLLECT_SECONDS
        try:
            repairer.collect_garbage(garbage, find_view())
        except (InsituError, OSError) as error:  # the next change does it
            logger.warning("blocks of files that were removed stay for now: %s", error)

    return FileCluster(client, peers, find_view, NameTree(store))
