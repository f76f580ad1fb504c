"""Reads the copies of jobs that hosts keep, from the machine of their head; see `store.py`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, is_simple_name
from insitu.cluster.decide import CopyVersion
from insitu.cluster.wire import read_nodes, read_token

if TYPE_CHECKING:
    from insitu.cluster.files import RemotePeers, View

_ANSWER_SECONDS = 10.0
_MAX_FILE_BYTES = 1 << 44
_MAX_NUMBER = 1 << 62


class CopyReader:
    """The copies of jobs on the hosts of a cluster."""

    def __init__(self, peers: RemotePeers, view: View) -> None:
        self._peers = peers
        self._view = view

    def list_copies(self) -> dict[str, dict[NodeId, CopyVersion]]:
        """Return how new each copy is, by job and node. Hosts that don't answer are left out."""
        found: dict[str, dict[NodeId, CopyVersion]] = {}
        for node, answer in self._ask_all():
            with contextlib.suppress(KeyError, TypeError, ValueError):
                for job_id, term, sequence in answer["copies"]:
                    if is_simple_name(job_id) and _is_number(term) and _is_number(sequence):
                        found.setdefault(job_id, {})[node] = CopyVersion(term, sequence)
        return found

    def _ask_all(self) -> Iterator[tuple[NodeId, dict[str, Any]]]:
        for node in sorted(self._view.alive):
            with contextlib.suppress(InsituError, OSError):
                answer, _ = self._peers.find(node, self._view).act("job_copies", {})
                yield node, answer

    def copy(self, node: NodeId, job_id: str, target: Path) -> None:
        """Copy all files of a job into a folder. Raises InsituError, OSError."""
        peer = self._peers.find(node, self._view)
        answer, _ = peer.act("job_copy_files", {"job": job_id})
        for name, size in _parse_files(answer.get("files")):
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", opener=_open_private) as file:
                while file.tell() < size:
                    part = {"job": job_id, "path": name, "start": file.tell()}
                    _, data = peer.act("job_copy_part", part)
                    if not data:
                        raise ClusterError(
                            f"{node} has changed its copy of {job_id}: {name} ends early. Try again"
                        )
                    file.write(data)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _parse_files(listed: Any) -> list[tuple[str, int]]:
    """Return (path, bytes) of each file. Raises ClusterError for what can't be a file of a copy."""
    found = []
    for each in listed if isinstance(listed, list) else [None]:
        name, size = each if isinstance(each, list) and len(each) == 2 else (None, None)
        if type(name) is not str or type(size) is not int or not 0 <= size < _MAX_FILE_BYTES:
            raise ClusterError(f"A copy of a job has files. Received: {each!r:.100}")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ClusterError(f"A file of a job is in its folder. Received: {name!r:.100}")
        found.append((name, size))
    return found


@contextlib.contextmanager
def open_copy_reader(paths: Paths) -> Iterator[CopyReader]:
    """Yield what reads the copies on the hosts whose agents are alive. Raises InsituError if no head
    answers."""
    from insitu.cluster.files import RemotePeers, View  # loads Flight
    from insitu.grid.transfer import ServerAddress

    members, _ = read_nodes(paths)
    alive = {
        m.facts.node: ServerAddress(m.facts.address, m.facts.port, m.facts.certificate)
        for m in members
        if m.state in ("alive", "silent") and m.connection is not None
    }
    peers = RemotePeers(read_token(paths).encode(), silence=_ANSWER_SECONDS)
    with contextlib.closing(peers):
        yield CopyReader(peers, View(alive))
