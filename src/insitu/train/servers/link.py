"""A worker's side: its buffers, its place in the order of pushes, and what it last pulled."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import insitu.parameters
from insitu.context import Context
from insitu.errors import InsituError, ServerStalled
from insitu.parameters import Client, Eviction, Future, ParameterServer, Table
from insitu.train.backends import Replica
from insitu.train.layers import Embedding
from insitu.train.servers.definition import (
    STATE,
    initializer_config,
    may_be_split,
    name_variables,
    table_updater,
    updater_config,
)
from insitu.train.servers.lookup import Batch, Keys
from insitu.train.servers.serving import Service
from insitu.train.state import holds_rows_of_table

_LOG = logging.getLogger("insitu")
NEVER_SPLIT = 1 << 62
_ENDS = Table("insitu/ends of fits", 1, initializer={"name": "constant", "value": 0.0})
"""A row for each fit and shard: 1 once the shard has ended it. Kept by the servers, whoever restarts."""
_PAUSE = 0.02
"""Seconds between two looks whether the other workers have come to the end of a fit."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One shard's part of a step: `rows` rows gave the gradient `floats`, laid out as the replica has it.
    `batch` is None where there were none."""

    shard: int
    rows: int
    floats: NDArray[Any]
    batch: Batch | None


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
        self._floats: list[NDArray[Any]] = []
        self._values: NDArray[Any] = np.empty(0)
        self._parts: list[tuple[slice, slice]] = []
        self._row_spans: dict[str, Any] = {}
        self._writing: Future[int] | None = None
        atexit.register(self.close)

    def close(self) -> None:
        self._client.close()
        if self._own_server is not None:
            self._own_server.stop()
            self._own_server = None

    # Definition

    def define(self, model: Any, replica: Replica, *, exact: bool, min_piece_bytes: int) -> None:
        """Tells the servers of the variables that `replica` computes gradients for, and gives it the values
        that they have. Raises DefinitionMismatch where they hold another model."""
        state = {id(v) for v in model.non_trainable_variables}
        if len(self._values):
            replica.assign(self.pull())
            return
        spans = replica.float_spans()
        dense = [(v, span) for v, span in spans if not holds_rows_of_table(v)]
        prefixes = [STATE if id(v) in state else "" for v, _ in dense]
        names = name_variables([(p, v) for p, (v, _) in zip(prefixes, dense, strict=True)])
        dtype = replica.floats_dtype.name
        updater = updater_config(model.optimizer, exact=exact, jit=bool(model.jit_compile))
        self._client.define(
            {
                name: (span.shape, dtype, variable.numpy().astype(dtype).reshape(span.shape))
                for name, (variable, span) in zip(names, dense, strict=True)
            },
            updater={**updater, "has_state": any(prefixes)},
            min_piece_bytes=min_piece_bytes if may_be_split(model.optimizer) else NEVER_SPLIT,
        )
        self._lay_out(replica, spans, dense)
        replica.assign(self.pull())

    def _lay_out(self, replica: Replica, spans: Sequence[Any], dense: Sequence[Any]) -> None:
        """Where the replica's floats lie in the client's buffers: in the same places, unless rows of tables
        lie among them, which aren't sent that way."""
        shards = self._context.shards
        self._row_spans = {v.path: span for v, span in spans if holds_rows_of_table(v)}
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
        return ServerTable(self._client, layer)

    # Steps

    def gradient_buffer(self, index: int) -> NDArray[Any]:
        """Where the gradient of this task's shard `index` is to be put, as the replica lays it out. It stays
        until the next step."""
        return self._floats[index]

    @property
    def values(self) -> NDArray[Any]:
        """What was last pulled, in the same places. The next pull overwrites it."""
        return self._values

    def push(self, outgoing: Sequence[Outgoing]) -> None:
        """Pushes one step of this task's shards, and waits until each is applied or dropped."""
        futures = []
        for one in outgoing:
            if self._parts and one.rows:
                buffer = self._client.flat_gradients(one.shard)
                for ours, theirs in self._parts:
                    buffer[theirs] = one.floats[ours]
            tables = self._row_gradients(one) if one.batch is not None else None
            futures.append(self._client.push(self.sequence, one.rows, shard=one.shard, tables=tables or None))
        for future in futures:
            future.result()
        self.sequence += 1

    def _row_gradients(self, one: Outgoing) -> dict[str, tuple[Keys, NDArray[Any]]]:
        gradients = {}
        for pulled in one.batch.pulled if one.batch is not None else ():
            span = self._row_spans[pulled.layer.rows.path]
            rows = one.floats[span.start : span.stop].reshape(span.shape)[: len(pulled.keys)]
            gradients[pulled.layer.name] = (pulled.keys, np.ascontiguousarray(rows, pulled.rows.dtype))
        return gradients

    def pull(self) -> NDArray[Any]:
        """Brings `values` up to date; waits where the mode says so."""
        futures = [self._client.pull(shard) for shard in self._context.shards]
        for future in futures:
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

    def begin(self, sequence: int) -> None:
        """Steps go on with this number."""
        self.sequence = sequence

    def checkpoint(self, directory: Path) -> None:
        """Has the servers begin to write a checkpoint, unless they still write the last one. What became of
        that is logged: training doesn't end of it."""
        if self._writing is not None and not self._writing.done():
            return
        self.end_of_checkpoint()
        self._writing = self._client.checkpoint(directory)

    def end_of_checkpoint(self) -> None:
        """Waits for the checkpoint that is being written."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except InsituError as error:
            _LOG.warning("The servers wrote no checkpoint, and training goes on: %s", error)

    def finish(self, fit: int, *, leave: bool, waiting: Callable[[], None]) -> None:
        """Says that this task's shards have ended fit number `fit`, and waits for those of all others. Until
        then nobody waits for pushes of shards that `leave`, and `waiting` is called now and then. Raises
        ServerStalled."""
        self.end_of_checkpoint()
        client, shards = self._client, self._context.shards
        client.define_tables([_ENDS])
        for shard in shards if leave else ():
            client.finish(shard).result()
        client.load_rows(_ENDS.name, _end_keys(shards, fit), np.ones((len(shards), 1), np.float32)).result()
        deadline = time.monotonic() + self._context.stall_timeout
        everyone = _end_keys(range(self._context.num_shards), fit)
        while True:
            ended = client.pull_rows(_ENDS.name, everyone, create=False).result()[:, 0] > 0
            if ended.all():
                return
            if time.monotonic() >= deadline:
                raise ServerStalled(
                    f"Shards {np.flatnonzero(~ended).tolist()} didn't end their fit within "
                    f"{self._context.stall_timeout:g} s of this task's."
                )
            waiting()
            time.sleep(_PAUSE)


def _end_keys(shards: Sequence[int], fit: int) -> Keys:
    return np.array([(fit << 32) + shard for shard in shards], np.int64)


class ServerTable:
    """See `insitu.train.layers.Table`."""

    def __init__(self, client: Client, layer: Embedding) -> None:
        self._client = client
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

    def fill(self, keys: Keys, rows: NDArray[Any]) -> None:
        self._client.load_rows(self._name, keys, rows).result()
