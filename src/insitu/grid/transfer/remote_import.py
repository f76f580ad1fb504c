"""One import's calls to the agents of other hosts: they take its rows, and read sources themselves."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError, TransferError
from insitu.base.spec import NodeId
from insitu.grid.ignite import normalize_address
from insitu.grid.intake import Finished, RowPlan, TextsTooLong, Unit, encode_options
from insitu.grid.sources import Block, SourceOptions
from insitu.grid.transfer.client import ServerAddress
from insitu.grid.transfer.row_sending import SOURCE_FAILED, TEXTS_TOO_LONG, RowSender

Counts = npt.NDArray[np.int64]
Progress = Callable[[NodeId, int, int], None]
"""Called with (node, bytes done there, all of them)."""


class Agents(Protocol):
    """How agents are called: `RemoteStores`. All raise TransferError."""

    #: Bytes of rows that were sent to each node from here.
    sent: Counter[NodeId]

    def ask(self, node: NodeId, kind: str, fields: Mapping[str, Any], attempts: int = ...) -> Any: ...

    def run_task(
        self,
        node: NodeId,
        kind: str,
        fields: Mapping[str, Any],
        progress: Progress,
        stopped: threading.Event,
    ) -> Mapping[str, Any]: ...

    def run_tasks(
        self, requests: Mapping[NodeId, Mapping[str, Any]], kind: str, progress: Progress = ...
    ) -> dict[NodeId, Mapping[str, Any]]: ...


class RemoteImport:
    """The calls of one import. All raise TransferError; where blocks need fewer rows, TextsTooLong; where a
    node can't read a source, SourceError."""

    def __init__(
        self,
        agents: Agents,
        addresses: Mapping[NodeId, ServerAddress],
        secret: bytes,
        silence: float,
    ) -> None:
        self._agents, self._addresses, self._secret, self._silence = agents, addresses, secret, silence
        #: Set where the results of what nodes count and read aren't needed any more.
        self.stopped = threading.Event()

    def take_rows(
        self, plan: RowPlan, nodes: Collection[NodeId], readers: Sequence[NodeId] = ()
    ) -> StoresElsewhere:
        """Return the stores that take the rows of an import, of those of `nodes` that hold some.

        `readers` are nodes that read the sources and send the rows; none: they are sent from here.
        """
        owners = {node: self._addresses[node] for node in nodes if plan.held_by(node)}
        sender = None if readers else RowSender(plan, owners, self._secret, silence=self._silence)
        return StoresElsewhere(self._agents, plan, owners, readers, sender)

    def see_files(self, node: NodeId, files: Sequence[str]) -> list[Any]:
        """Return [bytes, time of the last change] of files that a node sees, or why it can't read them."""
        return list(self._agents.ask(node, "see_files", {"files": list(files)}))

    def count_unit(
        self, node: NodeId, unit: Unit, options: SourceOptions, on_read: Callable[[int], None]
    ) -> int:
        """Have a node count the rows of a unit."""
        fields = {"unit": unit.to_json(), "options": encode_options(options)}
        return int(self._run(node, "count_rows", fields, on_read)[0])

    def read_unit(
        self,
        node: NodeId,
        plan: RowPlan,
        unit: Unit,
        options: SourceOptions,
        owners: Collection[NodeId],
        on_read: Callable[[int], None],
    ) -> Counts:
        """Have a node read a unit and send its rows to their owners. Returns the rows of each destination."""
        fields = {
            "unit": unit.to_json(),
            "options": encode_options(options),
            "token": plan.token,
            "owners": {owner: asdict(self._addresses[owner]) for owner in owners},
            "silence": max(1, round(self._silence)),
        }
        return np.array(self._run(node, "read_rows", fields, on_read)[0], np.int64)

    def list_addresses(self, nodes: Collection[NodeId]) -> dict[NodeId, frozenset[str]]:
        """Return the addresses and the name of each node's host, normalized."""
        answers = {node: self._agents.ask(node, "list_addresses", {}) for node in nodes}
        return {node: frozenset(map(normalize_address, found)) for node, found in answers.items()}

    def read_servers(
        self, requests: Mapping[NodeId, Mapping[str, Any]], token: str, progress: Progress
    ) -> dict[NodeId, Mapping[str, Any]]:
        """Have nodes read what they hold of a cache of Ignite. Returns what each has read (`read_servers`).

        `requests` are those of `ServerRequest`, as JSON.
        """
        fields = {node: {"token": token, "request": request} for node, request in requests.items()}
        answers = self._agents.run_tasks(fields, "read_servers", progress)
        return {node: _results(node, answer)[0] for node, answer in answers.items()}

    def _run(
        self, node: NodeId, kind: str, fields: Mapping[str, Any], on_read: Callable[[int], None]
    ) -> list[Any]:
        before = 0

        def count(_: NodeId, done: int, total: int) -> None:
            nonlocal before
            on_read(done - before)
            before = done

        return _results(node, self._agents.run_task(node, kind, fields, count, self.stopped))


class StoresElsewhere:
    """Stores on other hosts that take the rows of one import: `RowStores` of `importing/row_routing.py`."""

    def __init__(
        self,
        agents: Agents,
        plan: RowPlan,
        owners: Collection[NodeId],
        readers: Sequence[NodeId],
        sender: RowSender | None,
    ) -> None:
        """`sender` sends rows to the `owners`; None: the `readers` do."""
        self._agents, self._plan = agents, plan
        self._held = {node: plan.held_by(node) for node in owners}
        self._readers, self._sender = readers, sender

    def open(self, *, adopt: bool) -> Iterable[tuple[int, int]]:
        fields = {"plan": self._plan.to_json(), "adopt": adopt}
        nodes = sorted({*self._held, *self._readers})
        answers = self._agents.run_tasks(dict.fromkeys(nodes, fields), "open_rows")
        return [
            pair
            for node, held in self._held.items()
            for pair in zip(held, map(int, answers[node]["results"][0]), strict=True)
        ]

    def begin(self, unit: int, counts: Counts) -> None:
        for node, held in self._held.items():
            fields = {"token": self._plan.token, "unit": unit, "counts": counts[held].tolist()}
            self._agents.ask(node, "begin_rows", fields)
        if self._sender is not None:
            self._sender.begin_unit(unit)

    def append(self, block: Block, destinations: Counts | None) -> None:
        if self._sender is not None:
            self._sender.append(block, destinations)

    def finish(self, units: int) -> Iterable[tuple[int, NodeId, Finished]]:
        if self._sender is not None:
            self._sender.end_unit()
            self._sender.flush()
            self._agents.sent.update(self._sender.sent)
        fields = {"token": self._plan.token, "units": units}
        answers = self._agents.run_tasks(dict.fromkeys(self._held, fields), "finish_rows")
        return [
            (number, node, Finished.from_json(each))
            for node, answer in answers.items()
            for number, each in zip(self._held[node], _results(node, answer), strict=True)
        ]

    def stop(self, *, close: bool) -> None:
        if self._sender is not None:
            self._sender.__exit__()
        if close:  # a node that doesn't answer is left alone
            nodes = {*self._held, *self._readers}
            threads = [threading.Thread(target=self._close, args=(node,), daemon=True) for node in nodes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _close(self, node: NodeId) -> None:
        with contextlib.suppress(TransferError):
            self._agents.ask(node, "close_rows", {"token": self._plan.token}, 1)


def _results(node: NodeId, answer: Mapping[str, Any]) -> list[Any]:
    """Return what a node has found. Raises TextsTooLong, SourceError."""
    results = list(answer["results"])
    if results == [TEXTS_TOO_LONG]:
        raise TextsTooLong
    if results and isinstance(results[0], list) and results[0][:1] == [SOURCE_FAILED]:
        raise SourceError(f"{node}: {results[0][1]}")
    return results
