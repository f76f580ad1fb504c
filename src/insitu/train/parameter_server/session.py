"""A worker's side: its buffers, its place in the order of pushes, and what it last pulled."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

import insitu.parameters
from insitu.context import Context
from insitu.errors import InsituError, ParameterError, ServerStalled, TrainingError
from insitu.parameters import Client, Eviction, Future, ParameterServer, Table
from insitu.parameters.hashing import stable_hash
from insitu.train.parameter_server.layers import Embedding, embeddings_of
from insitu.train.parameter_server.lookup import Batch, Keys, find_leaves
from insitu.train.parameter_server.loss_scale import inner_optimizer
from insitu.train.parameter_server.model_spec import (
    STATE,
    check_norms_of_rows,
    initializer_config,
    may_be_split,
    must_be_together,
    name_variables,
    table_updater,
    updater_config,
)
from insitu.train.parameter_server.server_task import Service
from insitu.train.replica import Replica, holds_rows_of_table

_LOG = logging.getLogger("insitu")
DEFAULT_PART_ROWS = 1024
"""Rows of a shard's batch where the data doesn't tell."""
NEVER_SPLIT = 1 << 62
_ENDS = Table("insitu/ends of fits", 1, initializer={"name": "constant", "value": 0.0})
"""A row for each fit and shard: 1 once the shard has ended it. One more says that its variables were
finalized. So too, at a negative key, for each table that began with saved rows: 1 once it has them. Kept by
the servers, whoever restarts."""
_FAREWELL = 5.0
"""Seconds that servers have at the end of the process to hear that it leaves."""
_PAUSE = 0.02
"""Seconds between two looks whether the other workers have come to the end of a fit."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One shard's part of a step: `rows` rows gave the gradient `floats`, laid out as the replica has it.
    `batch` is None where there were none. `overflowed`: there were, but they gave nothing to be sent.
    `finite`: all of `floats` was seen to be."""

    shard: int
    rows: int
    floats: NDArray[Any]
    batch: Batch | None
    overflowed: bool = False
    finite: bool = False


class Link:
    """This task's connection to all servers; in a plain process, to one that is a thread of it.

    A push of any shard of this task has the same `sequence`, which counts its steps over all fits.
    """

    def __init__(self, context: Context, service: Service) -> None:
        addresses: Sequence[str] = context.servers
        self._own_server: ParameterServer | None = None
        if not addresses:
            self._own_server = service.server("127.0.0.1:0", context).start()
            addresses = (self._own_server.address,)
        self._context = context
        self._client: Client = insitu.parameters.connect(
            addresses,
            context.index,
            shards=context.shards,
            chief=context.is_chief,
            secret=context.secret(),
            backups=context.server_backups,
            timeout=context.stall_timeout,
            stall_timeout=context.stall_timeout,
        )
        self.servers = len(addresses)
        self.sequence = 0
        self.left_out: frozenset[int] = frozenset()
        """Shards whose gradients of the last step entered no update."""
        self._behind = 0
        self._names: list[str] = []
        self._finalizes = False
        self._floats: list[NDArray[Any]] = []
        self._values: NDArray[Any] = np.empty(0)
        self._parts: list[tuple[slice, slice]] = []
        self._row_spans: dict[str, Any] = {}
        self._writing: Future[int] | None = None
        self._leaves = False
        atexit.register(self._end)

    @property
    def shards(self) -> tuple[int, ...]:
        """Those of this task."""
        return self._context.shards

    def _end(self) -> None:
        if self._leaves:
            with contextlib.suppress(InsituError):
                for shard in self._context.shards:
                    self._client.finish(shard).result(_FAREWELL)
        self.close()

    def leave_at_exit(self) -> None:
        """When this process ends, nobody waits for its shards any more: nothing else says where a custom loop
        ends."""
        self._leaves = True

    def close(self) -> None:
        self._client.close()
        if self._own_server is not None:
            self._own_server.stop()
            self._own_server = None

    # Definition

    def define(
        self, model: Any, optimizer: Any, replica: Replica, *, exact: bool, min_piece_bytes: int
    ) -> None:
        """Tells the servers of the variables that `replica` computes gradients for, and gives it the values
        that they have. Raises DefinitionMismatch where they hold another model, TrainingError where this
        task told them of others before."""
        state = {id(v) for v in model.non_trainable_variables}
        spans = replica.float_spans()
        dense = [(v, span) for v, span in spans if not holds_rows_of_table(v)]
        prefixes = [STATE if id(v) in state else "" for v, _ in dense]
        names = name_variables([(p, v) for p, (v, _) in zip(prefixes, dense, strict=True)])
        if self._names:
            _check_same(self._names, names)
            replica.assign(self.pull())
            return
        dtype = replica.floats_dtype.name
        updater = updater_config(optimizer, exact=exact, jit=bool(model.jit_compile))
        self._client.define(
            {
                name: (span.shape, dtype, variable.numpy().astype(dtype).reshape(span.shape))
                for name, (variable, span) in zip(names, dense, strict=True)
            },
            updater={**updater, "has_state": any(prefixes)},
            min_piece_bytes=min_piece_bytes if may_be_split(optimizer) else NEVER_SPLIT,
            together=must_be_together(optimizer, exact=exact),
        )
        self._names = names
        self._finalizes = bool(optimizer.use_ema)
        self._lay_out(replica, spans, dense)
        replica.assign(self.pull())

    def _lay_out(self, replica: Replica, spans: Sequence[Any], dense: Sequence[Any]) -> None:
        """Where the replica's floats lie in the client's buffers: in the same places, unless rows of tables
        lie among them, which aren't sent that way."""
        shards = self._context.shards
        self.lay_out_rows(spans)
        if not self._row_spans:
            self._parts = []
            self._floats = [self._client.flat_gradients(shard) for shard in shards]
            self._values = self._client.flat_values()
            return
        self._floats = [np.zeros(replica.floats_size, replica.floats_dtype) for _ in shards]
        self._values = np.zeros(replica.floats_size, replica.floats_dtype)
        at = 0
        for _, span in dense:
            size = span.stop - span.start
            ours, theirs = slice(span.start, span.stop), slice(at, at + size)
            last = self._parts[-1] if self._parts else None
            if last and last[0].stop == ours.start:
                self._parts[-1] = slice(last[0].start, ours.stop), slice(last[1].start, theirs.stop)
            else:
                self._parts.append((ours, theirs))
            at += size

    def lay_out_rows(self, spans: Sequence[Any]) -> None:
        """Where the gradients of tables' rows lie in the replica's floats."""
        self._row_spans = {v.path: span for v, span in spans if holds_rows_of_table(v)}

    def table(self, layer: Embedding, optimizer: Any) -> ServerTable:
        """The table of `layer` on the servers, its rows updated as `optimizer` says."""
        table = Table(
            layer.name,
            layer.output_dim,
            initializer=initializer_config(layer.embeddings_initializer),
            updater=table_updater(optimizer),
            seed=self._context.seed,
            eviction=Eviction(**layer.eviction) if layer.eviction else None,
        )
        self._client.define_tables([table])
        return ServerTable(self._client, layer, self.begin_table)

    # Steps

    def gradient_buffer(self, index: int) -> NDArray[Any]:
        """Where the gradient of this task's shard `index` is to be put, as the replica lays it out. It stays
        until the next step."""
        return self._floats[index]

    @property
    def values(self) -> NDArray[Any]:
        """What was last pulled, in the same places. The next pull overwrites it."""
        return self._values

    def exchange(self, outgoing: Sequence[Outgoing]) -> NDArray[Any]:
        """Pushes one step of this task's shards, and brings `values` up to date once each is applied or
        dropped. A step that the servers have from another life of this task isn't pushed again."""
        self.left_out = frozenset()
        self.sequence += 1
        if self.sequence <= self._behind:
            return self.pull()
        together = self._client.can_pipeline_pulls
        pushes = [self._push(one, together, pulls=together and one is outgoing[-1]) for one in outgoing]
        pulls = self._ask() if together else []
        outcomes = [push.result() for push in pushes]
        self.left_out = frozenset(
            one.shard
            for one, outcome in zip(outgoing, outcomes, strict=True)
            if outcome == "dropped" or one.overflowed
        )
        return self._receive(pulls or self._ask())

    def _push(self, one: Outgoing, hold: bool, *, pulls: bool) -> Future[str]:
        if self._parts and one.rows:
            buffer = self._client.flat_gradients(one.shard)
            for ours, theirs in self._parts:
                buffer[theirs] = one.floats[ours]
        tables = self._row_gradients(one) if one.batch is not None else None
        return self._client.push(
            self.sequence - 1,
            one.rows,
            shard=one.shard,
            tables=tables or None,
            finite=one.finite,
            defer_send=hold,
            pull_follows=pulls,
        )

    def push_rows_of(self, outgoing: Sequence[Outgoing]) -> list[Future[str]]:
        """Pushes the gradients of tables' rows alone, of one step of this task's shards."""
        self.sequence += 1
        return [
            self._client.push(
                self.sequence - 1, one.rows, shard=one.shard, tables=self._row_gradients(one) or None
            )
            for one in outgoing
        ]

    def _row_gradients(self, one: Outgoing) -> dict[str, tuple[Keys, NDArray[Any]]]:
        gradients = {}
        for pulled in one.batch.pulled if one.batch is not None else ():
            span = self._row_spans[pulled.layer.rows.path]
            rows = one.floats[span.start : span.stop].reshape(span.shape)[: len(pulled.keys)]
            gradients[pulled.layer.name] = (pulled.keys, np.ascontiguousarray(rows, pulled.rows.dtype))
        return gradients

    def pull(self) -> NDArray[Any]:
        """Brings `values` up to date; waits where the mode says so."""
        return self._receive(self._ask())

    def _ask(self) -> list[Future[int]]:
        """Each shard may go on; the values come with the last."""
        shards = self._context.shards
        return [self._client.pull(shard, values=shard == shards[-1]) for shard in shards]

    def _receive(self, pulls: Sequence[Future[int]]) -> NDArray[Any]:
        for future in pulls:
            future.result()
        if self._parts:
            flat = self._client.flat_values()
            for ours, theirs in self._parts:
                self._values[ours] = flat[theirs]
        return self._values

    def pull_rows(self, table: str, keys: Keys, *, create: bool) -> NDArray[Any]:
        """See `RowSource`."""
        return self._client.pull_rows(table, keys, create=create).result()

    # Fits

    def applied(self) -> int:
        """The steps, over all fits, whose gradients the servers have from all shards of this task."""
        return min(self._client.last_applied(shard) for shard in self._context.shards) + 1

    def begin(self, sequence: int, applied: int = 0) -> None:
        """Steps go on with this number; those before `applied` are in the servers already."""
        self.sequence, self._behind = sequence, applied

    def expect_checkpoints(self) -> None:
        """There will be some."""
        self._client.expect_checkpoints()

    def checkpoint(self, directory: Path) -> None:
        """Has the servers begin to write a checkpoint, unless they still write the last one. What became of
        that is logged: training doesn't end of it."""
        if self._writing is not None and not self._writing.done():
            return
        self.end_of_checkpoint()
        try:
            self._writing = self._client.checkpoint(directory)
        except ParameterError as error:  # as where another life of this task has begun one
            _LOG.warning("The servers begin no checkpoint, and training goes on: %s", error)

    def end_of_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except InsituError as error:
            _LOG.warning("The servers wrote no checkpoint, and training goes on: %s", error)

    def finish(self, fit: int, *, leave: bool, waiting: Callable[[], None]) -> None:
        """Says that this task's shards have ended fit number `fit`, and waits for those of all others, and
        for the chief, which then has the servers finalize the variables. Until then nobody waits for pushes
        of shards that `leave`, and `waiting` is called now and then. Raises ServerStalled."""
        self.end_of_checkpoint()
        client, shards = self._client, self._context.shards
        client.define_tables([_ENDS])
        for shard in shards if leave else ():
            client.finish(shard).result()
        self._tell_end(shards, fit)
        self._await_end(range(self._context.num_shards), fit, waiting)
        if not self._finalizes:
            return
        if client.is_chief:
            client.finalize(fit)
            self._tell_end([self._context.num_shards], fit)
        self._await_end([self._context.num_shards], fit, waiting)

    def _tell_end(self, shards: Sequence[int], fit: int) -> None:
        ones = np.ones((len(shards), 1), np.float32)
        self._client.load_rows(_ENDS.name, _end_keys(shards, fit), ones).result()

    def _await_end(self, shards: Sequence[int], fit: int, waiting: Callable[[], None]) -> None:
        deadline = time.monotonic() + self._context.stall_timeout
        keys = _end_keys(shards, fit)
        while not (ended := self._told(keys)).all():
            if time.monotonic() >= deadline:
                raise ServerStalled(
                    f"Shards {np.flatnonzero(~ended).tolist()} didn't end their fit within "
                    f"{self._context.stall_timeout:g} s of this task's."
                )
            waiting()
            time.sleep(_PAUSE)

    def _told(self, keys: Keys) -> NDArray[np.bool_]:
        told: NDArray[np.bool_] = self._client.pull_rows(_ENDS.name, keys, create=False).result()[:, 0] > 0
        return told

    def begin_table(self, name: str, keys: Keys, rows: NDArray[Any]) -> None:
        """A table begins with the chief's saved rows, once: who comes later, or again, finds what training
        has made of them. The others wait until they are there. Raises ServerStalled."""
        client = self._client
        client.define_tables([_ENDS])
        key = np.array([-1 - stable_hash("begun", name) // 4], np.int64)
        deadline = time.monotonic() + self._context.stall_timeout
        while not self._told(key).all():
            if client.is_chief:
                client.load_rows(name, keys, rows).result()
                client.load_rows(_ENDS.name, key, np.ones((1, 1), np.float32)).result()
                return
            if time.monotonic() >= deadline:
                raise ServerStalled(
                    f"The chief didn't give table {name!r} its saved rows within "
                    f"{self._context.stall_timeout:g} s."
                )
            time.sleep(_PAUSE)


def attach_tables(
    model: Any,
    example: Any,
    part_rows: int | None,
    link: Callable[[], Link],
    optimizer: Any,
    *,
    bounded: bool = False,
) -> None:
    """Gives each Embedding of `model` a table of `link()`, whose rows `optimizer` updates, and room for the
    rows of a shard's batch like `example`, of `part_rows` rows if that is known. Norms of rows' gradients are
    `bounded` by the worker, or not at all."""
    layers = embeddings_of(model)
    if not layers:
        return
    if not bounded:
        check_norms_of_rows(optimizer)
    leaves = find_leaves(model, layers, example)
    arrays = keras.tree.flatten(example)
    for layer, numbers in zip(layers, leaves, strict=True):
        if layer.rows is None or not getattr(layer.rows, "insitu_rows", False):
            keys = sum(int(arrays[n][0].size) for n in numbers) * (part_rows or DEFAULT_PART_ROWS)
            layer.attach(link().table(layer, optimizer), keys)
            _renew_optimizer(model)


def _renew_optimizer(model: Any) -> None:
    """A model that was loaded has an optimizer that knows its tables as they were saved, or not at all, and
    its state isn't taken up on servers: another one of the same configuration takes its place."""
    if model.optimizer is not None and inner_optimizer(model.optimizer).built:
        model.optimizer = type(model.optimizer).from_config(model.optimizer.get_config())


def _check_same(known: Sequence[str], names: Sequence[str]) -> None:
    if list(known) != list(names):
        others = sorted(set(known) ^ set(names)) or list(names)
        raise TrainingError(
            "The servers of a job hold the variables of one model, and each step trains all of them in the "
            f"same order. Received: a step that differs in {', '.join(others[:3])}. Train them in one "
            "step, or use MultiWorkerMirroredStrategy."
        )


def _end_keys(shards: Sequence[int], fit: int) -> Keys:
    return np.array([(fit << 32) + shard for shard in shards], np.int64)


class ServerTable:
    """See `insitu.train.parameter_server.layers.Table`."""

    def __init__(
        self, client: Client, layer: Embedding, begin: Callable[[str, Keys, NDArray[Any]], None]
    ) -> None:
        self._client = client
        self._begin = begin
        self._name = layer.name
        self._width = layer.output_dim

    def pull(self, keys: Keys) -> NDArray[Any]:
        return self._client.pull_rows(self._name, keys).result()

    def everything(self) -> tuple[Keys, NDArray[Any]]:
        blocks = list(self._client.read_rows(self._name))
        keys = np.concatenate([np.empty(0, np.int64), *(keys for keys, _ in blocks)])
        rows = np.concatenate([np.empty((0, self._width), np.float32), *(rows for _, rows in blocks)])
        order = np.argsort(keys)
        return keys[order], rows[order]

    def begin(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._begin(self._name, keys, rows)

    def fill(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._client.load_rows(self._name, keys, rows).result()
