"""The nodes that hold blocks, as others call them: by their servers, or as stores of this machine."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from insitu.base.errors import GridError, InputError, InsituError, StorageFull, TransferError
from insitu.base.spec import NodeId
from insitu.grid.transfer import PartitionClient, ServerAddress

Fields = dict[str, Any]
SECONDS = 5.0
"""Seconds within which a node does what it is asked for."""


class Unreachable(TransferError):
    """A node gives no answer."""


class Busy(TransferError):
    """A node has too much to do. It lives: who asks waits, and asks the same one again."""


@dataclass(frozen=True, slots=True)
class View:
    """The nodes of the cluster as one process knows them."""

    #: Those that live, by name, with the address of the server; None: a store of this machine.
    alive: Mapping[NodeId, ServerAddress | None] = field(default_factory=dict)
    #: Those that were lost, and may be there again.
    away: Mapping[NodeId, ServerAddress | None] = field(default_factory=dict)


class Peer(Protocol):
    """One node."""

    def act(
        self, kind: str, fields: Fields, payload: bytes = b"", seconds: float | None = None
    ) -> tuple[Fields, bytes]:
        """Have the node do something within some seconds. Raises Unreachable, Busy, InputError, GridError,
        OSError."""


class Peers(Protocol):
    """The nodes that can be called."""

    def find(self, node: NodeId, view: View) -> Peer:
        """Return a node of a view."""


def describe_error(error: BaseException) -> Fields:
    """Return what an answer says about a failure, without a path of the host. Other errors are raised."""
    if isinstance(error, InputError):
        return {"refused": error.message}
    if isinstance(error, StorageFull):
        return {"errno": errno.ENOSPC, "why": error.message, "path": None}
    if isinstance(error, InsituError):
        return {"failed": error.message}
    if isinstance(error, OSError):
        number = error.errno or errno.EIO
        why = error.strerror or os.strerror(number)
        return {"errno": number, "why": why, "path": error.filename}
    raise error


def raise_described(answer: Fields) -> None:
    """Raise what an answer says has failed. OSError becomes the class that Python has for its number."""
    if "busy" in answer:
        raise Busy("the node has too much to do")
    if "refused" in answer:
        raise InputError(str(answer["refused"]))
    if "failed" in answer:
        raise GridError(str(answer["failed"]))
    if "errno" in answer:
        raise OSError(int(answer["errno"]), str(answer.get("why")), answer.get("path"))


class _RemotePeer:
    """A node by the server of its agent."""

    def __init__(self, node: NodeId, client: PartitionClient, order: Fields) -> None:
        self._node = node
        self._client = client
        self._order = order

    def act(
        self, kind: str, fields: Fields, payload: bytes = b"", seconds: float | None = None
    ) -> tuple[Fields, bytes]:
        try:
            answer, data = self._client.act_on_files(kind, {**fields, **self._order}, payload, seconds)
        except TransferError as error:
            raise Unreachable(f"{self._node}: {error.message}") from error
        raise_described(answer)
        return answer, data


class RemotePeers:
    """The servers of agents, each with one connection that is kept. For several threads."""

    def __init__(self, secret: bytes, *, silence: float = SECONDS, number: int | None = None) -> None:
        """`number`: how often the head of the cluster was replaced before the one that asks; None: another
        process does. Agents that know of more refuse to drop anything."""
        self._secret = secret
        self._order: Fields = {} if number is None else {"cluster_number": number}
        self._silence = silence
        self._clients: dict[ServerAddress, PartitionClient] = {}
        self._lock = threading.Lock()
        #: The process whose connections these are: a fork has to make its own.
        self._process = os.getpid()

    def find(self, node: NodeId, view: View) -> Peer:
        address = view.alive.get(node) or view.away.get(node)
        if address is None:
            raise Unreachable(f"{node}: no agent of this name is alive. `insitu nodes` shows all")
        with self._lock:
            if self._process != os.getpid():
                self._clients, self._process = {}, os.getpid()
            client = self._clients.get(address)
            if client is None:
                client = PartitionClient(address, self._secret, silence=self._silence)
                self._clients[address] = client
        return _RemotePeer(node, client, self._order)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.__exit__()
            self._clients = {}


class LocalPeers:
    """Stores of this machine, in this process: `make` opens that of a node."""

    def __init__(self, make: Callable[[NodeId], Peer]) -> None:
        self._make = make
        self._made: dict[NodeId, Peer] = {}
        self._lock = threading.Lock()

    def find(self, node: NodeId, view: View) -> Peer:
        with self._lock:
            if node not in self._made:
                self._made[node] = self._make(node)
            return self._made[node]
