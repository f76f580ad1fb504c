"""The head that an agent follows, kept on its disk.

If the head was replaced from another home (`head_replacing.py`), the agent learns so from the server of its
store, from its own host or from another agent. It keeps the new claim on its disk before it answers, and
dials there from then on. The decisions are in `decide/fencing.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import identify_process
from insitu.base.spec import NodeId
from insitu.cluster.decide import Claim, find_cluster_number, is_replaced, may_accept
from insitu.cluster.wire import AgentRecord, read_agent, write_agent
from insitu.exchange import parse_address

logger = logging.getLogger("insitu")
KINDS = ("head_view", "accept_head")

Fields = dict[str, Any]


class FollowedHead:
    """Written by the agent's own thread and by those of its server."""

    def __init__(self, paths: Paths, node: NodeId) -> None:
        self._paths = paths
        self._node = node
        self._lock = threading.Lock()
        #: True while the agent is connected to a head.
        self._is_connected = False
        #: The address of the head that was accepted; "": none but the one that the agent was started with.
        self._address = ""
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return what becomes readable when there is another head to follow."""
        return self._event

    def take_address(self, address: str) -> str:
        """Return the address of the head to dial, which is `address` unless another one was accepted."""
        with self._lock, contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        return self._address or address

    def record_joined(self, head: Mapping[str, Any], address: str) -> None:
        """Keep for the next agent of this store, and for commands in this home, which head the agent follows.

        `head` is what that says about itself. Raises ClusterError if a higher one was accepted meanwhile.
        """
        own = identify_process(os.getpid())
        asked = Claim(int(head["epoch"]), str(head["instance"]))
        with self._lock:
            seen = read_agent(self._paths, self._node)
            if seen is not None and not may_accept(Claim(seen.epoch, seen.instance), asked):
                raise ClusterError(f"The head at {address} was replaced by the one at {seen.head}")
            record = AgentRecord(
                str(head["cluster"]),
                address,
                asked.number,
                asked.instance,
                socket.gethostname(),
                os.getpid(),
                own.start if own else 0,
            )
            write_agent(self._paths, self._node, record)
            self._is_connected = True

    def record_lost(self) -> None:
        """The agent has no connection to a head any more."""
        self._is_connected = False

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Say which head this agent follows, or follow another. Raises InputError if it doesn't."""
        record = read_agent(self._paths, self._node)
        if record is None or fields.get("cluster") != record.cluster:
            raise InputError(f"{self._node} belongs to another cluster")
        if kind == "accept_head":
            return self.accept(fields)
        return {"address": record.head, "epoch": record.epoch, "instance": record.instance}

    def accept(self, fields: Fields) -> Fields:
        """Follow the head with this `address`, `epoch` and `instance`. Raises InputError if it is lower."""
        address, epoch, instance = (fields.get(name) for name in ("address", "epoch", "instance"))
        if type(epoch) is not int or type(instance) is not str or type(address) is not str:
            raise InputError("A head has an address, an epoch and an instance. Received: others")
        parse_address(address)
        asked = Claim(epoch, instance)
        with self._lock:
            record = read_agent(self._paths, self._node)
            if record is None:
                raise InputError(f"{self._node} belongs to no cluster yet")
            seen = Claim(record.epoch, record.instance)
            if asked == seen:
                return {"epoch": epoch}  # the answer before was lost
            if not may_accept(seen, asked) or (self._is_connected and not is_replaced(seen, asked)):
                raise InputError(
                    f"{self._node} follows the head at {record.head}, in epoch {record.epoch}, and leaves it "
                    f"for a higher one alone, and while that lives for one that has replaced it. Received: "
                    f"epoch {epoch} of the head at {address}"
                )
            accepted = replace(record, head=address, epoch=epoch, instance=instance)
            write_agent(self._paths, self._node, accepted)
            self._address = address
            os.eventfd_write(self._event, 1)
        number = find_cluster_number(epoch)
        logger.warning("follows the head at %s from now on, in number %d of the cluster", address, number)
        return {"epoch": epoch}

    def go_back(self, tried: str) -> bool:
        """Have the head dialled that was accepted last. Returns False if that is the one that was `tried`."""
        record = read_agent(self._paths, self._node)
        if record is None or record.head == tried:
            return False
        self._address = record.head
        return True

    def find_number(self) -> int:
        """Return how often the head of the cluster was replaced, as far as this agent knows."""
        record = read_agent(self._paths, self._node)
        return 0 if record is None else find_cluster_number(record.epoch)

    def describe(self) -> Fields:
        """Return the fields of the message that gives a replaced head its successor."""
        record = read_agent(self._paths, self._node)
        if record is None:
            return {}
        return {"cluster": record.cluster, "epoch": record.epoch, "address": record.head}
