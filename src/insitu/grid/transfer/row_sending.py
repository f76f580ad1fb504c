"""Sends the rows of an import to the hosts that own their partitions, each host by a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import TransferError
from insitu.base.spec import Column, NodeId
from insitu.grid.intake import Finished, RowPlan, TextsTooLong
from insitu.grid.partitions import is_variable, make_batch
from insitu.grid.sources import Block
from insitu.grid.transfer.client import PartitionClient, Refused
from insitu.grid.transfer.remote_stores import RemoteStores, read_results
from insitu.grid.transfer.requests import BUSY, TEXTS_TOO_LONG, RowsRequest

ROUNDS = 3
"""How often in a row an owner may not answer."""
_PAUSE_SECONDS = 0.2
_QUEUED = 2
"""Messages that wait to be sent to one owner. More would take memory and save no time."""

Rows = npt.NDArray[np.int64]
Connect = Callable[[], PartitionClient]


@dataclass(frozen=True, slots=True)
class _Message:
    #: What announces it.
    request: RowsRequest
    #: The rows.
    batch: Any
    #: How many go to each destination of the owner, as int64.
    counts: bytes


class StoresElsewhere:
    """Stores on other hosts that take the rows of one import: `RowStores` of `importing/row_router.py`."""

    def __init__(
        self, remote: RemoteStores, plan: RowPlan, nodes: Collection[NodeId], readers: Sequence[NodeId] = ()
    ) -> None:
        """Those of `nodes` take rows that hold some. `readers` are nodes that read the sources and send the
        rows; none: they are sent from here."""
        self._remote, self._plan, self._readers = remote, plan, readers
        self._held = {node: held for node in nodes if (held := plan.held_by(node))}
        self._sender = None
        if not readers:
            self._sender = RowSender(plan, {node: partial(remote.make_client, node) for node in self._held})

    def open(self, *, adopt: bool) -> Iterable[tuple[int, int]]:
        fields = {"plan": self._plan.to_json(), "adopt": adopt}
        nodes = sorted({*self._held, *self._readers})
        answers = self._remote.run_tasks(dict.fromkeys(nodes, fields), "open_rows")
        return [
            pair
            for node, held in self._held.items()
            for pair in zip(held, map(int, answers[node]["results"][0]), strict=True)
        ]

    def begin(self, unit: int, counts: Rows) -> None:
        for node, held in self._held.items():
            fields = {"token": self._plan.token, "unit": unit, "counts": counts[held].tolist()}
            self._remote.ask(node, "begin_rows", fields)
        if self._sender is not None:
            self._sender.begin_unit(unit)

    def append(self, block: Block, destinations: Rows | None) -> None:
        if self._sender is not None:
            self._sender.append(block, destinations)

    def finish(self, units: int) -> Iterable[tuple[int, NodeId, Finished]]:
        if self._sender is not None:
            self._sender.end_unit()
            self._sender.flush()
            self._remote.sent.update(self._sender.sent)
        fields = {"token": self._plan.token, "units": units}
        answers = self._remote.run_tasks(dict.fromkeys(self._held, fields), "finish_rows")
        return [
            (number, node, Finished.from_json(each))
            for node, answer in answers.items()
            for number, each in zip(self._held[node], read_results(node, answer), strict=True)
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
            self._remote.ask(node, "close_rows", {"token": self._plan.token}, 1)


class RowSender:
    """Sends rows to owners, in the order in which they come. Use it in a `with` statement.

    A message that may have been lost is sent again; its number tells the owner whether it has it. Errors are
    raised by a later call. `sent[node]` counts bytes.
    """

    def __init__(self, plan: RowPlan, owners: Mapping[NodeId, Connect]) -> None:
        """`owners` are nodes that hold some and get them. Others who hold partitions are left out."""
        self.sent: Counter[NodeId] = Counter()
        self._owners = [_Owner(plan, node, connect, self.sent) for node, connect in owners.items()]

    def __enter__(self) -> RowSender:
        return self

    def __exit__(self, *_: object) -> None:
        for owner in self._owners:
            owner.stop()

    def begin_unit(self, unit: int) -> None:
        """Send what follows as the rows of a unit."""
        for owner in self._owners:
            owner.begin_unit(unit)

    def append(self, block: Block, destinations: Rows | None) -> None:
        """Send the rows of `block`, row i to the owners of `destinations[i]`, or of destination 0 where it is
        None. Raises TransferError, TextsTooLong."""
        given = np.zeros(block.rows, np.int64) if destinations is None else destinations
        for owner in self._owners:
            owner.append(block, given)

    def end_unit(self) -> None:
        """Tell the owners that the unit has no more rows. Raises TransferError, TextsTooLong."""
        for owner in self._owners:
            owner.end_unit()

    def flush(self) -> None:
        """Wait until the owners have everything. Raises TransferError, TextsTooLong."""
        for owner in self._owners:
            owner.flush()


class _Owner:
    """One host, and the thread that sends to it."""

    def __init__(self, plan: RowPlan, node: NodeId, connect: Connect, sent: Counter[NodeId]) -> None:
        self._plan, self._node, self._connect, self._sent = plan, node, connect, sent
        held = plan.held_by(node)
        #: By destination: its number among those of this owner; `len(held)`: it isn't the owner's.
        self._own = np.full(len(plan.destinations), len(held), np.int64)
        self._own[held] = np.arange(len(held))
        self._held = len(held)
        self._empty = _empty_batch(plan.columns)
        self._unit = self._sequence = 0
        self._messages: queue.Queue[_Message | None] = queue.Queue(_QUEUED)
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._client: PartitionClient | None = None
        self._thread = threading.Thread(target=self._run, name=f"insitu-rows-{node}", daemon=True)
        self._thread.start()

    def begin_unit(self, unit: int) -> None:
        self._unit, self._sequence = unit, 0

    def append(self, block: Block, destinations: Rows) -> None:
        own = self._own[destinations]
        counts = np.bincount(own, minlength=self._held)[: self._held]
        rows = int(counts.sum())
        if not rows:
            return
        order = np.argsort(own.astype(np.uint16 if self._held < 1 << 16 else np.int64), kind="stable")[:rows]
        self._put(make_batch(self._plan.columns, rows, _take(self._plan.columns, block, order)), counts)

    def end_unit(self) -> None:
        self._put(self._empty, np.zeros(self._held, np.int64), last=True)

    def _put(self, batch: Any, counts: Rows, *, last: bool = False) -> None:
        self._raise()
        request = RowsRequest(self._plan.token, self._unit, self._sequence, last)
        self._sequence += 1
        self._messages.put(_Message(request, batch, counts.astype(np.int64).tobytes()))

    def flush(self) -> None:
        self._messages.join()
        self._raise()

    def stop(self) -> None:
        self._stopped.set()
        self._messages.put(None)
        self._thread.join()
        if self._client is not None:
            self._client.__exit__()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                if self._error is None and not self._stopped.is_set():
                    self._send(message)
            except BaseException as error:
                self._error = error
            finally:
                self._messages.task_done()

    def _send(self, message: _Message) -> None:
        """Send until it is taken. Raises TransferError, TextsTooLong."""
        vain = 0
        while not self._stopped.is_set():
            try:
                if self._client is None:
                    self._client = self._connect()
                refused = self._client.send_rows(message.request, message.batch, message.counts)
            except Refused as error:
                raise TransferError(f"{self._node}: {error.message}") from error
            except TransferError as error:
                vain += 1
                if vain >= ROUNDS:
                    raise TransferError(f"{self._node}: {error.message}") from error
                if self._client is not None:
                    self._client.__exit__()
                    self._client = None
                time.sleep(_PAUSE_SECONDS * 2**vain)
                continue
            vain = 0
            if not refused:
                self._sent[self._node] += message.batch.nbytes
                return
            if refused == TEXTS_TOO_LONG:
                raise TextsTooLong
            if refused != BUSY:
                raise TransferError(f"{self._node}: {refused}")


def _take(columns: Sequence[Column], block: Block, rows: Rows) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for column in columns:
        given = block.columns[column.name]
        if is_variable(column):
            values[column.name] = given.take(pa.array(rows))
        else:
            values[column.name] = given.take(rows, 0, None, "clip")
    return values


def _empty_batch(columns: tuple[Column, ...]) -> Any:
    values = {
        column.name: pa.array([], pa.large_utf8() if column.dtype == "str" else pa.large_binary())
        if is_variable(column)
        else np.empty((0, *column.shape), column.dtype)
        for column in columns
    }
    return make_batch(columns, 0, values)
