"""The head's care for copies of partitions: has them made again if nodes are lost or leave.

When that begins is decided in `decide/copy_orders.py`. A process of its own does it
(`re_replication_process.py`).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from typing import IO, Any

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import (
    CopyOrder,
    CopyOrders,
    Membership,
    find_copy_order,
    find_departed,
    membership,
)
from insitu.cluster.wire import choose_copy_rate, open_input

logger = logging.getLogger("insitu")
RESTORE_COMMAND = (sys.executable, "-P", "-m", "insitu.cluster.nodes.re_replication_process")


class CopyUpkeep:
    """Carries out one order after another, without waiting for any."""

    def __init__(self, paths: Paths, command: Sequence[str] = RESTORE_COMMAND) -> None:
        self._paths = paths
        self._command = command
        self._orders = CopyOrders()
        #: The process that carries out an order, and what it says.
        self._process: tuple[subprocess.Popen[bytes], IO[bytes]] | None = None
        #: Grows with each change of the catalogue. Written by `record_change`.
        self._changes = 0
        #: The last message about nodes that leave.
        self._said = ""

    @property
    def is_busy(self) -> bool:
        """Whether an order is being carried out."""
        return self._process is not None

    def record_change(self) -> None:
        """Note that the catalogue has changed, so that copies may be missing."""
        self._changes += 1

    def advance(self, members: Membership, grace: float | None, now: float) -> list[membership.Checked]:
        """Do what is due. Returns what was found out about nodes that leave. `now`: the monotonic clock."""
        found: list[membership.Checked] = []
        if self._process is not None:
            process, said = self._process
            if process.poll() is None:
                return found
            self._process = None
            found = self._note(process.returncode, said, members, now)
        order = find_copy_order(members, grace, now)
        there = _list_there(order.leaving, members) if order else []
        unfinished = any(not members.members[node].is_empty for node in there)
        before = self._orders.running
        self._orders = self._orders.begin(order, self._changes, now, unfinished=unfinished)
        if self._orders.running is not None and before is None:
            cores = [member.facts.cores for member in members.members.values() if member.state == "alive"]
            # A node that leaves has little time.
            self._begin(self._orders.running[0], None if there else choose_copy_rate(cores), now)
        return found

    def _begin(self, order: CopyOrder, rate: float | None, now: float) -> None:
        message = json.dumps({"leaving": order.leaving, "waiting": order.waiting, "rate": rate})
        said = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with open_input(message) as source:
                command = [*self._command, str(self._paths.home)]
                self._process = subprocess.Popen(command, stdin=source, stdout=said), said
        except OSError as error:
            said.close()
            logger.warning("copies aren't made again: %s", error)
            self._orders = self._orders.end(now, failed=True)

    def _note(self, code: int, said: IO[bytes], members: Membership, now: float) -> list[membership.Checked]:
        answer: dict[str, Any]
        with said:
            said.seek(0)
            try:
                answer = json.loads(said.read())
            except ValueError:
                answer = {"error": f"the process that does it ended with exit code {code}"}
        order = self._orders.running[0] if self._orders.running is not None else None
        problems = [answer["error"]] if "error" in answer else answer["failed"]
        outdated = order is not None and bool(find_departed(order, members))
        for why in () if outdated else problems:
            logger.warning("copies aren't made again: %s", why)
        if answer.get("moved") and order is not None:
            causes = ", ".join([*order.lost, *order.leaving])
            logger.info("%d bytes were copied again for %s", answer["moved"], causes)
        self._orders = self._orders.end(now, failed=bool(problems), outdated=outdated)
        left = answer.get("left", {})
        if (text := ", ".join(f"{n}: {c} copies, {t} tasks" for n, (c, t) in left.items())) != self._said:
            self._said = text
            logger.info("left on nodes that leave: %s", text or "nothing")
        there = _list_there(map(NodeId, left), members)
        return [
            membership.Checked(NodeId(node), not copies and not (tasks and node in there))
            for node, (copies, tasks) in left.items()
        ]

    def close(self) -> None:
        """End what is under way."""
        if self._process is not None:
            process, said = self._process
            process.kill()
            process.wait()
            said.close()


def _list_there(nodes: Iterable[NodeId], members: Membership) -> list[NodeId]:
    """Return those of the nodes that aren't lost."""
    return [n for n in nodes if (member := members.members.get(n)) is not None and member.state != "lost"]
