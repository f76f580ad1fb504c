"""The server's part of an import that runs elsewhere: it takes rows, and reads sources that it sees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from insitu.base.errors import (
    DamagedImages,
    GridError,
    InputError,
    SourceError,
    StorageFull,
    TransferError,
)
from insitu.base.net.ports import list_host_addresses
from insitu.base.paths import Paths
from insitu.base.spec import NodeId, check_simple_name
from insitu.grid.importing import ServerRequest, read_servers
from insitu.grid.intake import (
    FileState,
    RowIntake,
    RowMessage,
    RowPlan,
    TextsTooLong,
    Unit,
    count_rows,
    decode_options,
    read_unit,
)
from insitu.grid.partitions import check_rows
from insitu.grid.sources import Block, parse_source_file
from insitu.grid.stores import check_quota, read_settings
from insitu.grid.transfer import (
    BUSY,
    SOURCE_FAILED,
    TEXTS_TOO_LONG,
    PartitionClient,
    RowSender,
    RowsRequest,
    ServerAddress,
    Task,
    check_number,
    check_text,
)

QUOTA_BYTES = 64 << 20
"""Bytes of rows after which the quota of the store is looked at."""
_MOST_FILES = 1 << 16
_MOST_UNITS = 1 << 32
_MOST_ROWS = 1 << 62

Fields = Mapping[str, Any]
Start = Callable[[int, Callable[[Task], None]], Any]


class ImportActions:
    """The imports that one store takes part in, by the name of their staged folders."""

    def __init__(
        self,
        paths: Paths,
        node: NodeId,
        secret: bytes,
        start: Start,
        on_open: Callable[[RowPlan], None] = lambda plan: None,
    ) -> None:
        """`start` begins a task of so many bytes, and returns the answer that names it. `on_open` is called
        before an import's first rows come."""
        self._on_open = on_open
        self._paths, self._node, self._secret, self._start = paths, node, secret, start
        self._lock = threading.Lock()
        self._plans: dict[str, RowPlan] = {}
        #: The intakes of imports that have partitions for this node.
        self._intakes: dict[str, RowIntake] = {}
        #: Bytes of rows since the quota was looked at, by import.
        self._unchecked: dict[str, int] = {}
        #: The answers that name the tasks which read servers, by import.
        self._readings: dict[str, Any] = {}
        #: By action.
        self.actions: Mapping[str, Callable[[Fields], Any]] = {
            "open_rows": self._open,
            "begin_rows": self._begin,
            "finish_rows": self._finish,
            "close_rows": self._close,
            "see_files": self._see_files,
            "count_rows": self._count,
            "read_rows": self._read,
            "list_addresses": self._list_addresses,
            "read_servers": self._read_servers,
        }

    # Rows that come

    def _open(self, fields: Fields) -> Any:
        """Make ready for the rows of an import. The result: the rows of each destination that are there."""
        plan = RowPlan.from_json(fields.get("plan"))
        adopt = fields.get("adopt") is True

        def open_intake(task: Task) -> None:
            self.close(plan.token)
            self._on_open(plan)
            if plan.held_by(self._node):
                intake = RowIntake(self._paths, self._node, plan)
                try:
                    task.results.append(intake.open(adopt=adopt).tolist())
                except BaseException:
                    intake.stop()
                    raise
                with self._lock:
                    self._intakes[plan.token] = intake
            with self._lock:
                self._plans[plan.token] = plan

        return self._start(0, open_intake)

    def _begin(self, fields: Fields) -> Any:
        counts = fields.get("counts")
        if not isinstance(counts, list):
            raise InputError("counts is a list. Received: something else")
        rows = [check_number("rows", count, 0, _MOST_ROWS) for count in counts]
        self._find(_token(fields)).begin(check_number("unit", fields.get("unit"), 0, _MOST_UNITS), rows)
        return {}

    def take(self, request: RowsRequest, batch: Any, counts: bytes) -> str:
        """Take rows. Returns "" or why they weren't taken, which isn't an error.

        Raises GridError, InputError, OSError.
        """
        intake, plan = self._find(request.token), self._plans[request.token]
        try:
            if batch.num_rows:
                check_rows(plan.columns, batch)
                numbers = np.frombuffer(counts, np.int64)
            else:
                numbers = np.zeros(len(plan.held_by(self._node)), np.int64)
            if (numbers < 0).any():
                raise ValueError("counts of rows are at least 0")
        except (ValueError, pa.ArrowException) as error:
            raise InputError(f"Rows are a batch of the import's columns. Received: {error}") from None
        self._check_quota(request.token, batch.nbytes)
        message = RowMessage(request.unit, request.sequence, request.last, numbers, batch)
        try:
            return "" if intake.take(message) else BUSY
        except TextsTooLong:
            return TEXTS_TOO_LONG

    def _check_quota(self, token: str, size: int) -> None:
        """Raise InputError if the store holds too much, now and then."""
        with self._lock:
            due = self._unchecked.get(token, 0) + size
            self._unchecked[token] = 0 if due >= QUOTA_BYTES else due
        if due >= QUOTA_BYTES:
            _refuse_over_quota(self._paths, self._node)

    def _finish(self, fields: Fields) -> Any:
        """Complete the partitions. The task's results: what `Finished.to_json` says of each."""
        intake = self._find(_token(fields))
        units = check_number("units", fields.get("units"), 0, _MOST_UNITS)

        def finish(task: Task) -> None:
            _refuse_over_quota(self._paths, self._node)
            with _failures_noted(task):
                task.results += [each.to_json() for each in intake.finish(units)]
            intake.stop()

        return self._start(0, finish)

    def _close(self, fields: Fields) -> Any:
        self.close(_token(fields))
        return {}

    def close(self, token: str) -> None:
        """Take no more rows of an import. Staged rows stay."""
        with self._lock:
            intake = self._intakes.pop(token, None)
            self._plans.pop(token, None)
            self._unchecked.pop(token, None)
            self._readings.pop(token, None)
        if intake is not None:
            intake.stop()

    def _find(self, token: str) -> RowIntake:
        with self._lock:
            intake = self._intakes.get(token)
        if intake is None:
            raise GridError("This host's agent was started again in the middle of the import. Import again")
        return intake

    # Sources that are read here

    def _see_files(self, fields: Fields) -> Any:
        """Return [bytes, time of the last change] of each file, or why it can't be read here."""
        files = fields.get("files")
        if not isinstance(files, list) or len(files) > _MOST_FILES:
            raise InputError(f"files is a list of {_MOST_FILES} at most. Received: something else")
        return [_look_at(check_text("file", name)) for name in files]

    def _count(self, fields: Fields) -> Any:
        unit, options = Unit.from_json(fields.get("unit")), decode_options(fields.get("options"))

        def count(task: Task) -> None:
            with _reading_explained(), _failures_noted(task):
                task.results.append(count_rows(unit, options, task.add))

        return self._start(unit.state.size, count)

    def _read(self, fields: Fields) -> Any:
        """Send the rows of a unit to their owners. The task's result: the rows of each destination."""
        unit, options = Unit.from_json(fields.get("unit")), decode_options(fields.get("options"))
        token, given = _token(fields), fields.get("owners")
        silence = check_number("silence", fields.get("silence"), 1, 3600)
        with self._lock:
            plan = self._plans.get(token)
        if plan is None:
            raise GridError("This host's agent was started again in the middle of the import. Import again")
        if not isinstance(given, dict):
            raise InputError("owners is an object of addresses by node. Received: something else")
        named = {NodeId(check_text("node", n)): parse_address(value) for n, value in given.items()}
        owners = {
            node: partial(PartitionClient, address, self._secret, silence=silence)
            for node, address in named.items()
            if plan.held_by(node)
        }

        def read(task: Task) -> None:
            with _reading_explained(), _failures_noted(task), RowSender(plan, owners) as sender:
                sender.begin_unit(unit.number)
                counts, skipped = read_unit(plan, unit, options, sender.append, task.add)
                sender.end_unit()
                sender.flush()
                task.results += [counts.tolist(), skipped]

        return self._start(unit.state.size, read)

    # Servers of another system that are read here

    def _list_addresses(self, fields: Fields) -> Any:
        return list_host_addresses()

    def _read_servers(self, fields: Fields) -> Any:
        """Read what this node holds from servers. The task's result: that of `read_servers`."""
        token, request = _token(fields), ServerRequest.from_json(fields.get("request"))
        intake = self._find(token)
        with self._lock:
            plan = self._plans[token]

        def append(block: Block, files: npt.NDArray[np.int64]) -> None:
            self._check_quota(token, sum(values.nbytes for values in block.columns.values()))
            intake.append(block, files)

        def read(task: Task) -> None:
            with _reading_explained(), _failures_noted(task):
                found = read_servers(plan, self._node, request, append, task.add)
                intake.end_unit()
                task.results.append(found)

        with self._lock:
            if token in self._readings:
                return self._readings[token]  # the answer to the first request was lost
            self._readings[token] = answer = self._start(0, read)
        return answer


def _look_at(name: str) -> Any:
    try:
        state = FileState.of(parse_source_file(name))
    except SourceError as error:
        return error.message
    return [state.size, state.mtime_ns]


def _token(fields: Fields) -> str:
    return check_simple_name("An import's token", check_text("token", fields.get("token")))


def parse_address(value: Any) -> ServerAddress:
    """Return the address of a server as JSON has it. Raises InputError."""
    if not isinstance(value, dict) or value.keys() != {"host", "port", "certificate"}:
        raise InputError(f"An address has host, port and certificate. Received: {value!r:.100}")
    port = check_number("port", value["port"], 1, 1 << 16)
    return ServerAddress(
        check_text("host", value["host"]), port, check_text("certificate", value["certificate"])
    )


def _refuse_over_quota(paths: Paths, node: NodeId) -> None:
    """Raise InputError if the store holds more than it may, without a name of a path."""
    try:
        check_quota(paths, node, 0)
    except StorageFull:
        quota = read_settings(paths, node).quota
        raise InputError(
            f"The quota of {node} is {quota} bytes. Received: rows for which it has no room. "
            f"Allow more with `insitu quota {node} SIZE`, or make room with `insitu delete CACHE`"
        ) from None


@contextlib.contextmanager
def _failures_noted(task: Task) -> Iterator[None]:
    """Have the result say that blocks need fewer rows, or that the source can't be read."""
    try:
        yield
    except TextsTooLong:
        task.results[:] = [TEXTS_TOO_LONG]
    except SourceError as error:
        problems = list(error.problems) if isinstance(error, DamagedImages) else []
        task.results[:] = [[SOURCE_FAILED, error.message, problems]]


@contextlib.contextmanager
def _reading_explained() -> Iterator[None]:
    """Turn what a package of some protocol raises into an error that names it."""
    try:
        yield
    except (GridError, InputError, TextsTooLong, OSError):
        raise
    except Exception as error:
        raise TransferError(f"reading failed: {type(error).__name__}: {error}") from error
