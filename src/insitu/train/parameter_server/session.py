"""A worker's session with the parameter servers: its buffers, its number of the next push, and the last
pulled values."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import insitu.parameters
from insitu.base.context import Context
from insitu.base.errors import InsituError, ParameterError, TrainingError
from insitu.grid import publish_file
from insitu.parameters import Client, ClosureClient, Eviction, Future, ParameterServer, Table
from insitu.train.parameter_server.layers import Embedding
from insitu.train.parameter_server.lookup import IndexedBatch, Keys
from insitu.train.parameter_server.model_spec import (
    STATE_PREFIX,
    check_parts,
    initializer_config,
    name_variables,
    table_updater,
)
from insitu.train.parameter_server.optimizer_settings import OptimizerSettings, describe_update
from insitu.train.parameter_server.partitioners import count_parts
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.parameter_server.server_task import ServerConfig
from insitu.train.replica import Replica, Span, holds_table_rows

_LOG = logging.getLogger("insitu")
DEFAULT_SHARD_ROWS = 1024
"""Rows of a shard's batch if the data has no known batch size."""
NEVER_SPLIT = 1 << 62
_EXIT_TIMEOUT = 5.0
"""Seconds at the end of the process to notify the servers that it leaves."""


@dataclass(frozen=True, slots=True)
class ShardPush:
    """One shard's part of a step."""

    shard: int
    """The shard's number."""
    rows: int
    """The rows that gave the gradient; 0 if there is none to apply."""
    floats: NDArray[Any]
    """The gradient, laid out as the replica's floats."""
    batch: IndexedBatch | None
    """The batch with the pulled rows, or None without a gradient."""
    overflowed: bool = False
    """True if there were rows, but their gradient wasn't finite and isn't pushed."""
    finite: bool = False
    """True if all of `floats` was checked to be finite."""
    record: NDArray[np.float64] | None = None
    """Record of the shard's rows for all workers; see `ParameterServerSession.take_records`."""


class ParameterServerSession:
    """This task's connections to all servers; in a plain process, to one server in a thread of it.

    The pushes of all shards of this task in one step have the same `sequence`.
    """

    def __init__(self, context: Context, config: ServerConfig, *, tables_follow_model: bool = True) -> None:
        """`tables_follow_model`: the model's optimizer updates tables too, so they have its learning rate."""
        addresses: Sequence[str] = context.servers
        own_server: ParameterServer | None = None
        if not addresses:
            own_server = config.server("127.0.0.1:0", context).start()
            addresses = (own_server.address,)
        self._context = context
        self._client = _connect(context, addresses)
        self.servers = len(addresses)
        """The number of servers."""
        self.sequence = 0
        """Steps of this task over all fits: the number of the next push."""
        self.coordinated = False
        """True if a coordinator says which worker runs a step."""
        self.pushes = True
        """False while a step is tried: then `exchange` only pulls."""
        self.left_out: frozenset[int] = frozenset()
        """Shards whose gradients of the last step entered no update."""
        self._applied_sequence = 0
        """Steps below this number are on the servers already, from an earlier incarnation of this task."""
        self._names: list[str] = []
        """The names of the variables on the servers, in the replica's order."""
        self._variables: list[Any] = []
        """The same variables in this process."""
        self._finalizes = False
        """True if the optimizer keeps averages, which become the variables' values when a fit ends."""
        self._floats: list[NDArray[Any]] = []
        """A gradient buffer for each shard of this task."""
        self._values: NDArray[Any] = np.empty(0)
        """The last pulled values."""
        self._dense_slices: list[tuple[slice, slice]] = []
        """As `match_dense_slices`; empty if the buffers are the client's own memory."""
        self._row_spans: dict[str, Any] = {}
        """The spans of tables' rows in the floats, by the path of the layer's variable."""
        self._tables_follow_model = tables_follow_model
        self._tables: list[str] = []
        """The tables that this task has defined."""
        self._settings: OptimizerSettings | None = None
        """Common settings of this task's optimizer and the servers'."""
        self.marks = ServerMarks(self._client, context.num_shards, context.stall_timeout)
        self._writing: Future[int] | None = None
        """The checkpoint that the servers write."""
        self._leaves_at_exit = False
        self._ending: weakref.finalize[..., ParameterServerSession] | None = None
        """Closes everything with the session, if the server is its own."""
        if own_server is None:
            atexit.register(self._end)
        else:
            self._ending = weakref.finalize(self, _close, self._client, own_server)

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of this task."""
        return self._context.shards

    def _end(self) -> None:
        if self._leaves_at_exit:
            # The process is not to wait at its end for servers that have ended before it.
            self._client.requests.limit_search(_EXIT_TIMEOUT)
            with contextlib.suppress(InsituError):
                for shard in self._context.shards:
                    self._client.finish(shard).result(_EXIT_TIMEOUT)
        self.close()

    def leave_at_exit(self) -> None:
        """Release the other workers from waiting for this process's shards when it ends. Nothing else shows
        the end of a custom loop."""
        self._leaves_at_exit = True

    def close(self) -> None:
        if self._ending is not None:
            self._ending()
        else:
            self._client.close()

    def coordinate(self) -> ClosureClient:
        """Have a coordinator say which worker runs a step. Returns this worker's access to its queue."""
        self.coordinated = True
        return ClosureClient(self._client, self._context.index, self._context.incarnation)

    # Definition

    def define(
        self,
        model: Any,
        optimizer: Any,
        replica: Replica,
        *,
        exact: bool,
        min_piece_bytes: int,
        partitioner: Any = None,
    ) -> None:
        """Define on the servers the variables that `replica` computes gradients for, and give `replica` their
        values on the servers. `partitioner` says into how many pieces a variable is cut, in place of
        `min_piece_bytes`. Raises DefinitionMismatch if the servers hold another model, TrainingError if this
        task has defined other variables before, InputError for a bad answer of `partitioner`."""
        state = {id(v) for v in model.non_trainable_variables}
        spans = replica.float_spans()
        dense = [(v, span) for v, span in spans if not holds_table_rows(v)]
        prefixes = [STATE_PREFIX if id(v) in state else "" for v, _ in dense]
        names = name_variables([(p, v) for p, (v, _) in zip(prefixes, dense, strict=True)])
        if self._names:
            _check_same(self._names, names)
            if any(a is not b for (a, _), b in zip(dense, self._variables, strict=True)):
                replica.assign(self.pull())  # of another model with the same variables
            return
        dtype = replica.floats_dtype.name
        parts = None
        if partitioner is not None:
            counts = [count_parts(partitioner, v.shape, v.dtype) for v, _ in dense]
            parts = dict(zip(names, counts, strict=True))
            check_parts(parts, optimizer)
        named = {name: variable for name, (variable, _) in zip(names, dense, strict=True)}
        update = describe_update(optimizer, named, exact=exact, jit=bool(model.jit_compile))
        self._client.define(
            {
                name: (span.shape, dtype, variable.numpy().astype(dtype).reshape(span.shape))
                for name, (variable, span) in zip(names, dense, strict=True)
            },
            updater={**update.config, "has_state": any(prefixes)},
            min_piece_bytes=min_piece_bytes if update.can_be_split else NEVER_SPLIT,
            together=update.together,
            parts=parts,
        )
        self._names, self._variables = names, [v for v, _ in dense]
        self._finalizes = update.finalizes
        self._lay_out(replica, spans)
        self.follow_settings(optimizer, members=update.members)
        if exact:
            self._client.follow_records()
        replica.assign(self.pull())

    def follow_settings(self, optimizer: Any, *, dense: bool = True, members: Sequence[Any] = ()) -> None:
        """Send the servers what changes of `optimizer` from now on; see `OptimizerSettings`. `dense`: it
        updates the dense variables there; `members`: those of a MultiOptimizer."""
        if self._settings is None:
            tables = self._tables if self._tables_follow_model else ()
            self._settings = OptimizerSettings(
                optimizer, self._client, tables, dense=dense, any_worker=self.coordinated, members=members
            )

    def replace_values(self, replica: Replica) -> None:
        """Have the servers take the values of `replica`, which a script has changed between two fits."""
        spans = [(v, span) for v, span in replica.float_spans() if not holds_table_rows(v)]
        dtype = replica.floats_dtype.name
        self._client.assign(
            {
                name: variable.numpy().astype(dtype).reshape(span.shape)
                for name, (variable, span) in zip(self._names, spans, strict=True)
            }
        )

    def _lay_out(self, replica: Replica, spans: Sequence[Any]) -> None:
        """Map the replica's floats to the client's buffers. They are the same memory, unless the floats
        include rows of tables, which are pushed apart."""
        shards = self._context.shards
        self.locate_table_rows(spans)
        if not self._row_spans:
            self._dense_slices = []
            self._floats = [self._client.flat_gradients(shard) for shard in shards]
            self._values = self._client.flat_values()
            return
        self._floats = [np.zeros(replica.floats_size, replica.floats_dtype) for _ in shards]
        self._values = np.zeros(replica.floats_size, replica.floats_dtype)
        self._dense_slices = match_dense_slices(spans)

    def locate_table_rows(self, spans: Sequence[Any]) -> None:
        """Note the places of the gradients of tables' rows in the replica's floats."""
        self._row_spans = {v.path: span for v, span in spans if holds_table_rows(v)}

    def table(self, layer: Embedding, optimizer: Any) -> ServerTable:
        """Define the table of `layer` on the servers, with updates as `optimizer` says, and return it."""
        table = Table(
            layer.name,
            layer.output_dim,
            initializer=initializer_config(layer.embeddings_initializer),
            updater=table_updater(optimizer),
            seed=self._context.seed,
            eviction=Eviction(**layer.eviction) if layer.eviction else None,
        )
        self._client.define_tables([table])
        self._tables.append(layer.name)
        return ServerTable(self._client, layer, self.initialize_table)

    # Steps

    def gradient_buffer(self, index: int) -> NDArray[Any]:
        """Return the buffer for the gradient of this task's shard `index`, laid out as the replica's floats.
        Its content stays until the next step."""
        return self._floats[index]

    @property
    def values(self) -> NDArray[Any]:
        """The last pulled values, laid out as the replica's floats. The next pull overwrites them."""
        return self._values

    @property
    def rate_variable(self) -> Any:
        """See `OptimizerSettings`."""
        return None if self._settings is None else self._settings.rate_variable

    def exchange(self, outgoing: Sequence[ShardPush], *, rate: float | None = None) -> NDArray[Any]:
        """Push one step of this task's shards, and pull `values` once each push is applied or dropped. A step
        that the servers have from an earlier incarnation of this task isn't pushed again. `rate` is the
        learning rate's variable if it was just read."""
        self.left_out = frozenset()
        if not self.pushes:
            return self.pull()
        self.sequence += 1
        if self.sequence <= self._applied_sequence:
            return self.pull()
        if self._settings is not None:
            self._settings.send(rate)
        together = self._client.can_pipeline_pulls
        pushes = [self._push(push, together, pulls=together and push is outgoing[-1]) for push in outgoing]
        pulls = self._request_values() if together else []
        outcomes = [push.result() for push in pushes]
        self.left_out = frozenset(
            push.shard
            for push, outcome in zip(outgoing, outcomes, strict=True)
            if outcome == "dropped" or push.overflowed
        )
        return self._receive(pulls or self._request_values(), is_sent=True)

    def _push(self, push: ShardPush, hold: bool, *, pulls: bool) -> Future[str]:
        if self._dense_slices and push.rows:
            buffer = self._client.flat_gradients(push.shard)
            for whole, dense in self._dense_slices:
                buffer[dense] = push.floats[whole]
        tables = self._row_gradients(push) if push.batch is not None else None
        return self._client.push(
            self.sequence - 1,
            push.rows,
            shard=push.shard,
            tables=tables or None,
            record=push.record,
            finite=push.finite,
            defer_send=hold,
            pull_follows=pulls,
        )

    def push_rows_of(self, outgoing: Sequence[ShardPush]) -> list[Future[str]]:
        """Push only the gradients of tables' rows, of one step of this task's shards."""
        if self._settings is not None:
            self._settings.send()
        self.sequence += 1
        return [
            self._client.push(
                self.sequence - 1, push.rows, shard=push.shard, tables=self._row_gradients(push) or None
            )
            for push in outgoing
        ]

    def _row_gradients(self, push: ShardPush) -> dict[str, tuple[Keys, NDArray[Any]]]:
        gradients = {}
        for pulled in push.batch.pulled if push.batch is not None else ():
            span = self._row_spans[pulled.layer.rows.path]
            rows = push.floats[span.start : span.stop].reshape(span.shape)[: len(pulled.keys)]
            gradients[pulled.layer.name] = (pulled.keys, np.ascontiguousarray(rows, pulled.rows.dtype))
        return gradients

    def pull(self, *, enters: bool = False) -> NDArray[Any]:
        """Pull `values`; wait if the mode says so. Forget records of updates until then. `enters`: see
        `OptimizerSettings.receive`."""
        values = self._receive(self._request_values(), enters=enters)
        self._client.take_records()
        return values

    def take_records(self) -> NDArray[np.float64]:
        """Return the records of all pushes that have entered updates since the last call or `pull`, of all
        workers, float64[pushes, size] (mode sync)."""
        records, missing = self._client.take_records()
        if missing:
            _LOG.warning(
                "This worker comes %d updates late, too late for their records. Its losses and metrics of "
                "this epoch leave out the rows of these updates.",
                missing,
            )
        return records

    def _request_values(self) -> list[Future[int]]:
        """Ask for the next step of each shard. The values come with the last."""
        shards = self._context.shards
        return [self._client.pull(shard, values=shard == shards[-1]) for shard in shards]

    def _receive(self, pulls: Sequence[Future[int]], **how: bool) -> NDArray[Any]:
        version = [future.result() for future in pulls][-1]
        if self._settings is not None:
            self._settings.receive(version, **how)
        if self._dense_slices:
            flat = self._client.flat_values()
            for whole, dense in self._dense_slices:
                self._values[whole] = flat[dense]
        return self._values

    def gather(
        self, place: str, sequence: int, arrays: Mapping[int, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], Sequence[int]]:
        """See `Client.gather`."""
        return self._client.gather(place, sequence, arrays).result()

    @property
    def num_shards(self) -> int:
        """The number of shards of all workers."""
        return self._context.num_shards

    def pull_rows(self, table: str, keys: Keys, *, create: bool) -> NDArray[Any]:
        """See `RowSource`."""
        return self._client.pull_rows(table, keys, create=create).result()

    # Fits

    def applied(self) -> int:
        """Return the number of steps, over all fits, whose gradients the servers have from all shards of this
        task."""
        return min(self._client.last_applied(shard) for shard in self._context.shards) + 1

    def begin(self, sequence: int, applied: int = 0) -> None:
        """Continue with this number of the next push. The servers have those before `applied` already."""
        self.sequence, self._applied_sequence = sequence, applied

    def show_updates(self) -> None:
        """See `OptimizerSettings`."""
        if self._settings is not None:
            self._settings.show_updates()

    def resume_epoch(self) -> None:
        """Continue in the middle of an epoch with the servers' learning rate."""
        if self._settings is not None:
            self._settings.resume()

    def start_fit(self, fit: int, replica: Replica, *, changed: bool, waiting: Callable[[], None]) -> None:
        """Start fit number `fit` for all workers, with the chief's learning rate and weights.

        The chief sends its weights if they have `changed` since they were last pulled. The others wait for
        it, and all pull. Nobody pushes meanwhile, since a fit begins once all have ended the previous one. A
        fit that the chief has started before, in an earlier incarnation, continues with the servers' values.
        Raises ServerStalled.
        """
        if self._client.is_chief and not self.marks.is_started(fit):
            if self._settings is not None:
                self._settings.send()
            if changed:
                self.replace_values(replica)
            self.marks.set_started(fit)
        self.marks.wait_for_start(fit, waiting)
        replica.assign(self.pull(enters=True))

    def expect_checkpoints(self) -> None:
        """Tell the servers that checkpoints will follow."""
        self._client.expect_checkpoints()

    def checkpoint(self, directory: Path) -> None:
        """Have the servers begin a checkpoint, unless the last one is still being written. A failure is
        logged, and doesn't end the training."""
        if self._writing is not None and not self._writing.done():
            return
        self.wait_for_checkpoint()
        try:
            self._writing = self._client.checkpoint(directory)
        except ParameterError as error:  # as when an earlier incarnation of this task has begun one
            _LOG.warning("The servers can't begin a checkpoint. Training continues: %s", error)

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except InsituError as error:
            _LOG.warning("The servers failed to write a checkpoint. Training continues: %s", error)

    def finish(self, fit: int, *, waiting: Callable[[], None]) -> None:
        """Mark this task's shards as done with fit number `fit`. Wait for all other shards, and for the
        chief, which then has the servers finalize the variables. Nobody waits for further pushes of these
        shards, until all have ended the fit. `waiting` is called repeatedly. A fit that was ended before may
        be ended again. Raises ServerStalled."""
        self.wait_for_checkpoint()
        client, shards, marks = self._client, self._context.shards, self.marks
        for shard in shards:
            client.finish(shard, fit=fit).result()
        marks.set_ends(fit, shards)
        marks.wait_for_ends(fit, waiting)
        if not self._finalizes:
            return
        if client.is_chief:
            client.finalize(fit)
            marks.set_finalized(fit)
        marks.wait_for_finalized(fit, waiting)

    def initialize_table(self, name: str, keys: Keys, rows: NDArray[Any]) -> None:
        """Load the chief's saved rows into a new table, once. Who comes later, or again, finds the trained
        rows. The others wait until the rows are there. Raises ServerStalled."""
        client = self._client
        if client.is_chief and not self.marks.is_table_begun(name):
            client.load_rows(name, keys, rows).result()
            self.marks.set_table_begun(name)
        self.marks.wait_for_table(name)


def _close(client: Client, server: ParameterServer) -> None:
    client.close()
    server.stop()


def _connect(context: Context, addresses: Sequence[str]) -> Client:
    return insitu.parameters.connect(
        addresses,
        context.index,
        shards=context.shards,
        chief=context.is_chief,
        secret=context.secret(),
        backups=context.server_backups,
        timeout=context.stall_timeout,
        stall_timeout=context.stall_timeout,
    )


def _check_same(known: Sequence[str], names: Sequence[str]) -> None:
    if list(known) != list(names):
        others = sorted(set(known) ^ set(names)) or list(names)
        raise TrainingError(
            "The servers of a job hold the variables of one model, and each step trains all of them in the "
            f"same order. Received: a step that differs in {', '.join(others[:3])}. Train them in one "
            "step, or use MultiWorkerMirroredStrategy."
        )


# A table on the servers, as an Embedding reads and writes it


class ServerTable:
    """See `insitu.train.parameter_server.layers.EmbeddingStorage`."""

    def __init__(
        self, client: Client, layer: Embedding, begin: Callable[[str, Keys, NDArray[Any]], None]
    ) -> None:
        self._client = client
        self._begin = begin
        self._name = layer.name
        self._width = layer.output_dim

    def pull(self, keys: Keys) -> NDArray[Any]:
        return self._client.pull_rows(self._name, keys).result()

    def read_all(self) -> tuple[Keys, NDArray[Any]]:
        blocks = list(self._client.read_rows(self._name))
        keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
        rows = np.concatenate([np.empty((0, self._width), np.float32), *(rows for _, rows in blocks)])
        order = np.argsort(keys)
        return keys[order], rows[order]

    def begin(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._begin(self._name, keys, rows)

    def assign(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._client.load_rows(self._name, keys, rows).result()


# Match a replica's floats to those without rows of tables, the dense ones


def match_dense_slices(spans: Sequence[tuple[Any, Span]]) -> list[tuple[slice, slice]]:
    """Return (slice of all floats, slice of the dense floats) for each run of neighbouring dense variables.

    `spans` are those of `Replica.float_spans`.
    """
    found: list[tuple[slice, slice]] = []
    dense_stop = 0
    for variable, span in spans:
        if holds_table_rows(variable):
            continue
        whole = slice(span.start, span.stop)
        dense = slice(dense_stop, dense_stop + span.stop - span.start)
        if found and found[-1][0].stop == whole.start:
            found[-1] = slice(found[-1][0].start, whole.stop), slice(found[-1][1].start, dense.stop)
        else:
            found.append((whole, dense))
        dense_stop = dense.stop
    return found


# Remembers the ends of a worker's fits on servers, also for a later incarnation of its task


class EndedFits:
    """The number of pushes of a shard up to the end of each fit that has ended, in this incarnation of the
    task or in an earlier one."""

    def __init__(self, context: Context) -> None:
        self._path = context.job.fits(context.task) if context.job is not None else None
        self._ends: list[int] = []

    def read(self) -> list[int]:
        """Return the ends, the first fit's first. Raises OSError if the storage fails."""
        if not self._ends and self._path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._ends = [int(number) for number in json.loads(self._path.read_text())]
        return self._ends

    def read_valid(self, applied: int) -> list[int]:
        """Return the ends, or none if the servers, which have `applied` so many pushes of a shard, are new
        and don't know them."""
        ends = self.read()
        if ends and applied < ends[-1]:
            ends = self._ends = []
        return ends

    def append(self, sequence: int) -> None:
        """Remember the end of the fit that follows."""
        self._ends = [*self.read(), sequence]
        if self._path is not None:
            publish_file(self._path, json.dumps(self._ends).encode())
