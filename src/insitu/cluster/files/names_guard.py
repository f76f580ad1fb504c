"""Keeps names that were lost with a head from looking like a cluster without files."""

from __future__ import annotations

import threading
import time

from insitu.base.errors import GridError
from insitu.base.spec import NodeId
from insitu.base.wording import format_count
from insitu.cluster.files.asking import Suspects, ask_all
from insitu.cluster.files.peers import Peers, View
from insitu.grid.shared_files import NamesState, make_origin, read_state, split_key
from insitu.metadata import MetadataStore

_AGAIN_SECONDS = 2.0
"""Seconds for which what nodes say is believed while the store has no names."""
_ASK_SECONDS = 3.0
"""Seconds within which nodes say what they hold: who asks for a name waits for that."""
_LOST = (
    "The head knows the names of insitu://. Received: {}. They were lost with the head of before. Bring up "
    "all nodes, then put the names back by `insitu repair` on the head's machine, or give these files up by "
    "`insitu repair --forget-files` there. Until then nothing is opened, changed or removed"
)


class NamesGuard:
    """Decides whether the names in a metadata store are all there are. For several threads."""

    def __init__(self, store: MetadataStore, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        self._suspects = Suspects()
        self._lock = threading.Lock()
        #: Whether the store has had names, or nobody wants those of others. Written under the lock.
        self._is_sure = False
        #: The last finding of nodes, "": nothing is wrong; and until when it counts. Written under the lock.
        self._found = ""
        self._until = 0.0

    def check(self, view: View) -> None:
        """Raise GridError if the store has no names, and nodes hold files of another store."""
        with self._lock:
            is_due = time.monotonic() >= self._until
            # That something is wrong is looked at each time: names that were put back count at once.
            if not self._is_sure and (is_due or self._found):
                self._found = self._look(read_state(self._store), view, is_due)
            if self._found:
                raise GridError(self._found)

    def _look(self, state: NamesState, view: View, is_due: bool) -> str:
        """Return what is wrong; "": nothing. Nodes are asked if that `is_due`."""
        if state.is_rebuilding:
            return (
                "The names of insitu:// are being put back. If no `insitu repair` runs on the head's "
                "machine, it was interrupted: run it again"
            )
        self._is_sure = state.has_names or (state.origin is not None and state.origin.forgets)
        if self._is_sure or not is_due:
            return "" if self._is_sure else self._found
        found = self._ask(state, view)
        self._until = time.monotonic() + _AGAIN_SECONDS
        return found

    def _ask(self, state: NamesState, view: View) -> str:
        """Return what nodes say that is wrong."""
        if holding := self._find_holding(state, view):
            nodes = f"{format_count(len(holding), 'node')} with files ({', '.join(holding[:5])}), and no name"
            return _LOST.format(nodes)
        if state.origin is None and view.alive:
            make_origin(self._store)
        return ""

    def _find_holding(self, state: NamesState, view: View) -> list[NodeId]:
        """Return the nodes that hold files of another store."""
        kind = "usage" if state.origin is None else "manifests"
        answers, _ = ask_all(
            view.alive,
            lambda node: self._peers.find(node, view).act(kind, {})[0],
            self._suspects,
            _ASK_SECONDS,
        )
        if state.origin is None:
            return sorted(node for node, answer in answers.items() if answer["memory"] + answer["disk"])
        own = ("", state.origin.id)
        keys = {node: [k for found in a["held"].values() for k in found] for node, a in answers.items()}
        return sorted(node for node in keys if any(split_key(key)[1] not in own for key in keys[node]))
