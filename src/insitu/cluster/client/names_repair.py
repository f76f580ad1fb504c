"""Puts the names of `insitu://` back that were lost with a head, from what nodes hold."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from insitu.base.errors import ClusterError
from insitu.base.paths import Paths
from insitu.cluster.files import (
    FileClient,
    LocalNames,
    NameService,
    NamesReport,
    RemotePeers,
    Suspects,
    View,
    drop_replaced,
    survey_names,
)
from insitu.cluster.nodes import make_file_view
from insitu.cluster.wire import change_head, is_locked, read_head, read_nodes, read_token
from insitu.grid.shared_files import Entry, NameTree, forget_others, read_state, rebuild_names
from insitu.metadata import MetadataStore, open_fenced, open_store, read_settings


def begin_lost_store(paths: Paths) -> bool:
    """Have the head of this home begin with an empty metadata store if its own is lost. Return whether.

    The head doesn't begin with one by itself. It answers no question about names then until these were put
    back, or given up. Raises InsituError.
    """
    record = read_head(paths)
    if record is None or not record.has_metadata or paths.metadata.exists():
        return False
    if read_settings(paths) is not None:
        return False
    if is_locked(paths.head_lock):
        return False
    change_head(paths, has_metadata=False)
    return True


def find_lost_names(paths: Paths) -> NamesReport | None:
    """Return what the nodes of a head's home hold; None if the home has no head with a metadata store.

    Raises ClusterError if the head doesn't run, MetadataError.
    """
    record = read_head(paths)
    if record is None or not record.has_metadata:
        return None
    view, peers = _read_view(paths), RemotePeers(read_token(paths).encode())
    with contextlib.closing(_open(paths)) as store, contextlib.closing(peers):
        names = LocalNames(NameService(store))
        client = FileClient(names, peers, lambda *, fresh=False: view, Suspects(), writes_manifests=False)
        return survey_names(read_state(store), NameTree(store), client, peers, view)


def put_names_back(paths: Paths, report: NamesReport) -> None:
    """Put the files that were found into the metadata store, which has no names. Raises GridError,
    MetadataError."""
    files: dict[str, dict[str, Entry]] = defaultdict(dict)
    for each in report.found:
        files[each.volume][each.path] = each.entry
    with contextlib.closing(_open(paths)) as store:
        rebuild_names(store, files, report.generation, is_whole=report.is_whole)
    with contextlib.closing(RemotePeers(read_token(paths).encode())) as peers:
        drop_replaced(report, peers, _read_view(paths))


def forget_lost_names(paths: Paths, report: NamesReport) -> None:
    """Have files on nodes removed that the metadata store doesn't know. Raises GridError, MetadataError."""
    with contextlib.closing(_open(paths)) as store:
        forget_others(store, report.generation)


def _read_view(paths: Paths) -> View:
    members, _ = read_nodes(paths)
    return make_file_view({member.facts.node: member for member in members})


def _open(paths: Paths) -> MetadataStore:
    record = read_head(paths)
    if record is None:
        raise ClusterError(f"Names of insitu:// are put back in the home of a head. Received: {paths.home}")
    return open_fenced(paths) or open_store(paths.metadata, record.cluster)
