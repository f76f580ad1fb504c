"""Asks several nodes, so that none that is silent holds up the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from insitu.base.spec import NodeId
from insitu.cluster.files.peers import Busy, Unreachable

Answer = TypeVar("Answer")
HEDGE_SECONDS = 1.0
"""Seconds without an answer after which another node is asked, too."""
SUSPECT_SECONDS = 30.0
"""Seconds for which a node that gave no answer is asked last."""
BUSY_SECONDS = 0.1
"""Seconds after which a node is asked again that has too much to do."""
CLIENT_SECONDS = 15.0
"""Seconds after which a client gives up."""


class Suspects:
    """Remembers which nodes gave no answer. For several threads."""

    def __init__(self) -> None:
        #: Until when each is asked last, on the monotonic clock.
        self._until: dict[NodeId, float] = {}

    def note(self, node: NodeId) -> None:
        """Note that a node gave no answer."""
        self._until[node] = time.monotonic() + SUSPECT_SECONDS

    def clear(self, node: NodeId) -> None:
        """Note that a node has answered."""
        self._until.pop(node, None)

    def has(self, node: NodeId) -> bool:
        """Return whether a node gave no answer recently."""
        return self._until.get(node, 0.0) > time.monotonic()

    def order(self, nodes: Iterable[NodeId]) -> list[NodeId]:
        """Put those last that gave no answer recently."""
        return sorted(nodes, key=self.has)


class Calls:
    """Calls that run in threads of their own. Their results come in the order in which they end."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._results: queue.SimpleQueue[tuple[NodeId, Any, BaseException | None]] = queue.SimpleQueue()
        #: The nodes of which no result has come.
        self.running: list[NodeId] = []

    def begin(self, node: NodeId, call: Callable[[], Any]) -> None:
        """Call something that asks a node. It is asked again while it has too much to do."""
        self.running.append(node)
        threading.Thread(target=self._run, args=(node, call), name="insitu-ask", daemon=True).start()

    def _run(self, node: NodeId, call: Callable[[], Any]) -> None:
        deadline = time.monotonic() + CLIENT_SECONDS
        while True:
            try:
                answer = call()
            except Busy as error:
                if time.monotonic() > deadline:
                    self._results.put((node, None, error))
                    return
                time.sleep(BUSY_SECONDS)
            except Unreachable as error:
                self._suspects.note(node)
                self._results.put((node, None, error))
                return
            except BaseException as error:
                self._results.put((node, None, error))
                return
            else:
                self._suspects.clear(node)
                self._results.put((node, answer, None))
                return

    def take(self, seconds: float) -> tuple[NodeId, Any, BaseException | None] | None:
        """Return the next result, None: there is none within so many seconds."""
        try:
            found = self._results.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        self.running.remove(found[0])
        return found

    def suspect_running(self) -> None:
        """Note all nodes that haven't answered yet."""
        for node in self.running:
            self._suspects.note(node)


def ask_first(
    nodes: Sequence[NodeId], call: Callable[[NodeId], Answer], suspects: Suspects, seconds: float
) -> Answer:
    """Return the answer of the first node that gives one. The next is asked once one has failed, or was
    silent for HEDGE_SECONDS seconds. Raises the last error; Unreachable after `seconds`."""
    calls, left, deadline = Calls(suspects), list(nodes), time.monotonic() + seconds
    failure: BaseException = Unreachable("no node answers")
    while left or calls.running:
        if left:
            node = left.pop(0)
            calls.begin(node, lambda node=node: call(node))  # type: ignore[misc]
        wait = deadline - time.monotonic()
        found = calls.take(min(HEDGE_SECONDS, wait) if left else wait)
        if found is None:
            calls.suspect_running()
            if time.monotonic() >= deadline:
                break
        elif found[2] is None:
            answer: Answer = found[1]
            return answer
        else:
            failure = found[2]
    raise failure


def ask_all(
    nodes: Iterable[NodeId], call: Callable[[NodeId], Answer], suspects: Suspects, seconds: float
) -> tuple[dict[NodeId, Answer], dict[NodeId, BaseException]]:
    """Return the answers of all nodes that give one within some seconds, and why the others gave none."""
    calls, deadline = Calls(suspects), time.monotonic() + seconds
    answers, failures = dict[NodeId, Answer](), dict[NodeId, BaseException]()
    for node in nodes:
        calls.begin(node, lambda node=node: call(node))  # type: ignore[misc]
    while calls.running:
        found = calls.take(deadline - time.monotonic())
        if found is None:
            calls.suspect_running()
            failures |= {node: Unreachable(f"{node} gives no answer") for node in calls.running}
            break
        node, answer, failure = found
        if failure is None:
            answers[node] = answer
        else:
            failures[node] = failure
    return answers, failures
