"""The nodes that hold files, as other processes call them: by their servers, or as stores of this machine."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from insitu.errors import ClusterError, GridError, InputError, InsituError, TransferError
from insitu.grid.transfer import PartitionClient, ServerAddress
from insitu.spec import NodeId

Fields = dict[str, Any]
SECONDS = 5.0
"""Seconds without an answer after which a node counts as one that can't be reached."""


class Unreachable(TransferError):
    """A node gives no answer."""


@dataclass(frozen=True, slots=True)
class View:
    """The nodes of the cluster as one process knows them."""

    #: Those that live, by name, with the address of the server; None: a store of this machine.
    alive: Mapping[NodeId, ServerAddress | None] = field(default_factory=dict)
    #: How many belong to the cluster, also those that are lost.
    known: int = 0
    #: True: the head says it, or there is none because all is on this machine.
    is_led: bool = True


class Peer(Protocol):
    """One node."""

    def act(self, kind: str, fields: Fields, payload: bytes = b"") -> tuple[Fields, bytes]:
        """Have the node do something. Raises Unreachable, InputError, GridError, OSError."""


class Peers(Protocol):
    """The nodes that can be called."""

    def find(self, node: NodeId, view: View) -> Peer:
        """Return a node of a view."""

    def close(self) -> None:
        """Close the connections."""


def describe_error(error: BaseException) -> Fields:
    """Return what an answer says about a failure, without a path of the host. Other errors are raised."""
    if isinstance(error, InputError):
        return {"refused": error.message}
    if isinstance(error, InsituError):
        return {"failed": error.message}
    if isinstance(error, OSError):
        number = error.errno or errno.EIO
        return {"errno": number, "why": error.strerror or os.strerror(number)}
    raise error


def raise_described(answer: Fields, path: str) -> None:
    """Raise what an answer says has failed. OSError becomes the class that Python has for its number."""
    if "refused" in answer:
        raise InputError(str(answer["refused"]))
    if "failed" in answer:
        raise GridError(str(answer["failed"]))
    if "errno" in answer:
        raise OSError(int(answer["errno"]), str(answer.get("why")), path or None)


class _RemotePeer:
    """A node by the server of its agent."""

    def __init__(self, node: NodeId, client: PartitionClient) -> None:
        self._node = node
        self._client = client

    def act(self, kind: str, fields: Fields, payload: bytes = b"") -> tuple[Fields, bytes]:
        try:
            answer, data = self._client.act_on_files(kind, fields, payload)
        except TransferError as error:
            raise Unreachable(f"{self._node}: {error.message}") from error
        raise_described(answer, str(fields.get("path", "")))
        return answer, data


class RemotePeers:
    """The servers of agents, each with one connection that is kept. For several threads."""

    def __init__(self, secret: bytes, *, silence: float = SECONDS) -> None:
        self._secret = secret
        self._silence = silence
        self._clients: dict[ServerAddress, PartitionClient] = {}
        self._lock = threading.Lock()
        #: The process whose connections these are: a fork has to make its own.
        self._process = os.getpid()

    def find(self, node: NodeId, view: View) -> Peer:
        address = view.alive.get(node)
        if address is None:
            raise Unreachable(f"{node}: no agent of this name is alive. `insitu nodes` shows all")
        with self._lock:
            if self._process != os.getpid():
                self._clients, self._process = {}, os.getpid()
            client = self._clients.get(address)
            if client is None:
                client = PartitionClient(address, self._secret, silence=self._silence)
                self._clients[address] = client
        return _RemotePeer(node, client)

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.__exit__()
            self._clients = {}


class LocalPeers:
    """Stores of this machine, each with a service in this process."""

    def __init__(self, make: Callable[[NodeId], Peer]) -> None:
        self._make = make
        self._made: dict[NodeId, Peer] = {}
        self._lock = threading.Lock()

    def find(self, node: NodeId, view: View) -> Peer:
        if node not in view.alive:
            raise ClusterError(f"A node is one of {', '.join(view.alive)}. Received: {node}")
        with self._lock:
            if node not in self._made:
                self._made[node] = self._make(node)
            return self._made[node]

    def close(self) -> None:
        pass
