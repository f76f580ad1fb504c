"""One import's calls to the agents of other hosts: they take its rows, and read sources themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import SourceError, TransferError
from insitu.base.spec import NodeId
from insitu.grid.intake import Finished, RowPlan, TextsTooLong, Unit, encode_options
from insitu.grid.layout import normalize_address
from insitu.grid.sources import SourceOptions
from insitu.grid.transfer.client import ServerAddress
from insitu.grid.transfer.row_sending import SOURCE_FAILED, TEXTS_TOO_LONG, RowSender

Counts = npt.NDArray[np.int64]
Progress = Callable[[NodeId, int, int], None]
"""Called with (node, bytes done there, all of them)."""


class Agents(Protocol):
    """How agents are called: `RemoteStores`. All raise TransferError."""

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

    def open(self, nodes: Collection[NodeId], plan: RowPlan, *, adopt: bool) -> dict[NodeId, list[int]]:
        """Have nodes make ready. Returns the rows that each has of the destinations that it holds.

        Without `adopt` they remove what is there; nodes that hold none are left out of the answer.
        """
        fields = {"plan": plan.to_json(), "adopt": adopt}
        answers = self._agents.run_tasks(dict.fromkeys(nodes, fields), "open_rows")
        return {node: list(map(int, a["results"][0])) for node, a in answers.items() if a["results"]}

    def begin(self, node: NodeId, token: str, unit: int, counts: Sequence[int]) -> None:
        """Have a node take rows from a unit on, before which its destinations have `counts` rows."""
        self._agents.ask(node, "begin_rows", {"token": token, "unit": unit, "counts": list(counts)})

    def finish(self, nodes: Collection[NodeId], token: str, units: int) -> dict[NodeId, list[Finished]]:
        """Have nodes complete what they hold. Returns what each says of its destinations."""
        fields = {"token": token, "units": units}
        answers = self._agents.run_tasks(dict.fromkeys(nodes, fields), "finish_rows")
        return {node: list(map(Finished.from_json, _results(node, a))) for node, a in answers.items()}

    def close(self, nodes: Iterable[NodeId], token: str) -> None:
        """Have nodes take no more rows. What is staged stays. One that doesn't answer is left alone."""

        def close(node: NodeId) -> None:
            with contextlib.suppress(TransferError):
                self._agents.ask(node, "close_rows", {"token": token}, 1)

        threads = [threading.Thread(target=close, args=(node,), daemon=True) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def make_sender(self, plan: RowPlan, nodes: Collection[NodeId]) -> RowSender:
        """Return what sends rows from here to some nodes."""
        owners = {node: self._addresses[node] for node in nodes}
        return RowSender(plan, owners, self._secret, silence=self._silence)

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
        """Have nodes read what they hold of a table of another system. Returns what each has read.

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


def _results(node: NodeId, answer: Mapping[str, Any]) -> list[Any]:
    """Return what a node has found. Raises TextsTooLong, SourceError."""
    results = list(answer["results"])
    if results == [TEXTS_TOO_LONG]:
        raise TextsTooLong
    if results and isinstance(results[0], list) and results[0][:1] == [SOURCE_FAILED]:
        raise SourceError(f"{node}: {results[0][1]}")
    return results
