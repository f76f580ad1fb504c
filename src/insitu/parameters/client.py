"""A worker's access to the parameter servers: `connect`, and the `Client` that it returns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import InputError, ParameterError
from insitu.exchange import resolve_secret
from insitu.parameters import native
from insitu.parameters.closure_queue import JoinRecord
from insitu.parameters.futures import Future, chain_future, gather
from insitu.parameters.rules import (
    MIN_PIECE_BYTES,
    Array,
    Message,
    ShardingPlan,
    Variable,
    plan_cut,
    plan_sharding,
    sharding_plan,
)
from insitu.parameters.server_connection import ServerConnection
from insitu.parameters.server_requests import ServerRequests
from insitu.parameters.table_client import TableClient, as_counts, resolve_shard
from insitu.parameters.worker_buffers import WorkerBuffers, as_values

Definition = tuple[Sequence[int], str] | tuple[Sequence[int], str, Any]
"""(shape, dtype) or (shape, dtype, initial values)."""


class Client:
    """One worker's access to all servers. Several threads may use it.

    Requests return a `Future`; several may be under way. `values` and `gradients` are the client's own
    buffers, in memory that servers of this host share: nothing is copied there.
    """

    def __init__(self, requests: ServerRequests, shards: Sequence[int], chief: bool) -> None:
        self.requests = requests
        #: One for each server, in the order of their indices.
        self.connections = requests.connections
        #: The shards that this worker pushes for.
        self.shards = tuple(shards)
        #: Rows of tables. Its methods for scripts are given here, too.
        self.tables = tables = TableClient(requests, self.shards, self._make_version_meta)
        self.define_tables, self.load_rows = tables.define_tables, tables.load_rows
        self.pull_rows, self.push_rows, self.read_rows = tables.pull_rows, tables.push_rows, tables.read_rows
        #: Whether this worker brings the first values.
        self.is_chief = chief
        #: The servers' mode, received when the client connects.
        self.mode = "async"
        #: Shards that push, received when the client connects.
        self.total_replicas = 1
        #: Learning rates that a worker has set, by table, as of the last pull; "": of the dense variables.
        self.learning_rates: dict[str, float] = {}
        self._buffers: WorkerBuffers | None = None
        #: Version of each server when it last sent values.
        self._versions = [0] * len(self.connections)
        #: Mode sync: the leader's last decisions, for the other servers.
        self._decisions: list[Any] = []
        #: Mode sync: whether `_decisions` has that on this worker's last push.
        self._knows_last_decision = False
        #: Records that came with pulls and weren't taken yet, and the version that the next ones are asked
        #: from; -1: none are asked for.
        self._records: list[Array] = []
        self._records_from = -1
        #: Updates of whose records the leader kept none, since they were taken.
        self._missing = 0
        self._checkpoints_expected = False

    @property
    def version(self) -> int:
        """Updates that the values of the last pull had, as the first server counts them."""
        return self._versions[0]

    def open(self, timeout: float) -> None:
        """Connect to all servers within `timeout` seconds; `connect` has done so."""
        deadline = time.monotonic() + timeout
        for connection in self.connections:
            connection.connect(deadline)
        answers = self.requests.request_all("hello", {}).result(timeout)
        settings = [(a.meta["mode"], a.meta["total_replicas"]) for a in answers]
        if len(set(settings)) > 1:
            raise ParameterError(
                "All servers must have the same mode and total_replicas. Received, by server: "
                f"{settings}. Start them alike"
            )
        self.mode, self.total_replicas = settings[0]
        for shard in self.shards:
            if shard >= self.total_replicas:
                raise InputError(
                    f"shards must be in [0, {self.total_replicas}), the servers' total_replicas. "
                    f"Received: {shard}"
                )

    # Definition

    def define(
        self,
        variables: Mapping[str, Definition],
        *,
        updater: Mapping[str, Any] | str = "sgd",
        min_piece_bytes: int = MIN_PIECE_BYTES,
        together: bool = False,
        parts: Mapping[str, int] | None = None,
    ) -> ShardingPlan:
        """Define the dense variables, alike in all workers. Return their places.

        All start with the chief's initial values, unless the servers have values already.

        Args:
            variables: shape, dtype and perhaps initial values of each, by name.
            updater: a config that `make_updater` of the servers understands.
            min_piece_bytes: smallest piece that a large variable is cut into.
            together: the first server holds all, for an updater that must see them at once.
            parts: the pieces of each variable, by name, in place of `min_piece_bytes`. One for what isn't
                named.

        Raises DefinitionMismatch if the servers hold another model, InputError.
        """
        listed = [Variable(n, tuple(int(i) for i in d[0]), str(d[1])) for n, d in variables.items()]
        plan = plan_sharding(listed, len(self.connections), min_piece_bytes, together=together, parts=parts)
        meta = {"layout": sharding_plan.to_json(plan, min_piece_bytes), "updater": updater}
        answers = self.requests.request_all("define", meta).result()
        self._versions = [answer.meta["version"] for answer in answers]
        if self._buffers is None:
            self.requests.remember_definition("define", meta)
            shared = any(connection.shares_memory for connection in self.connections)
            self._buffers = WorkerBuffers(plan, self.shards, shared)
            self.requests.share(self._buffers)
        buffers = self._buffers
        if self.is_chief and not all(answer.meta["initialised"] for answer in answers):
            views = buffers.view_variables(None)
            for name, definition in variables.items():
                if len(definition) > 2:
                    views[name][...] = as_values(name, definition[2], views[name])
            self._send_values(again=False)
        return plan

    def assign(self, values: Mapping[str, Any]) -> None:
        """Replace the values of these variables on the servers, by name. The slots stay.

        For a time at which no worker pushes: gradients on their way belong to the values before. Raises
        InputError unless each has its variable's shape and dtype.
        """
        views = self.values
        for name, value in values.items():
            if name not in views:
                raise InputError(f"A variable must be defined before it is assigned. Received: {name!r}")
            views[name][...] = as_values(name, value, views[name])
        self._send_values(again=True)

    def _send_values(self, *, again: bool) -> None:
        """Have the servers take the values in the buffers. Unless `again`, only servers that have none do."""
        buffers = self._require_buffers()
        parts = [buffers.locate_parts(connection, None) for connection in self.connections]
        metas = [{**part[0], "again": again} for part in parts]
        self.requests.request_each("initialise", metas, [part[1] for part in parts]).result()

    @property
    def plan(self) -> ShardingPlan:
        """The server and the position of each dense variable. Raises InputError before `define`."""
        return self._require_buffers().plan

    def _require_buffers(self) -> WorkerBuffers:
        if self._buffers is None:
            raise InputError(
                "Variables must be defined (Client.define) before anything else is done with them"
            )
        return self._buffers

    # Buffers

    @property
    def values(self) -> dict[str, Array]:
        """Each variable as it was last pulled, in its shape: views that the next pull overwrites."""
        return self._require_buffers().view_variables(None)

    def flat_values(self, group: str | None = None) -> Array:
        """Return all variables of one dtype (None: there is only one), back to back in the order of
        definition."""
        return self._require_buffers().view_group(self._resolve_group(group), None)

    def gradients(self, shard: int | None = None) -> dict[str, Array]:
        """Return views by variable, into which a shard's gradients are written before `push`.

        They must not change while the push is under way.
        """
        return self._require_buffers().view_variables(resolve_shard(self.shards, shard))

    def flat_gradients(self, shard: int | None = None, group: str | None = None) -> Array:
        """Return the same memory as one flat array, of the variables of one dtype."""
        own = resolve_shard(self.shards, shard)
        return self._require_buffers().view_group(self._resolve_group(group), own)

    def _resolve_group(self, group: str | None) -> str:
        groups = self.plan.groups
        if group is None and len(groups) != 1:
            raise InputError(
                f"Variables are of {', '.join(groups) or 'no dtype'}: name one group. Received: None"
            )
        if group is not None and group not in groups:
            raise InputError(f"group must be one of {', '.join(groups)}. Received: {group!r}")
        return groups[0] if group is None else group

    # Pull

    def pull(self, shard: int | None = None, *, values: bool = True) -> Future[int]:
        """Bring `values` up to date. The result is their version (on the first server).

        For `shard` (None: this worker's only one) it waits as the mode requires: in bounded, while the shard
        is too far ahead; in sync, until its last push was applied or dropped. With `values=False` it only
        waits.
        """
        chosen = resolve_shard(self.shards, shard) if shard is not None or len(self.shards) == 1 else -1
        if self.can_pipeline_pulls or self._knows_last_decision:
            return self._pull_from(self.connections, chosen, values)
        # The other servers need the leader's decision, which its answer brings.
        self.requests.start_background_io()
        whole: Future[int] = Future(self.requests.run_until_done)

        def pull_others(leader: Future[Any]) -> None:
            if leader.error is not None:
                whole.set_exception(leader.error)
            else:
                chain_future(self._pull_from(self.connections[1:], chosen, values), whole)

        self._pull_from(self.connections[:1], chosen, values).add_done_callback(pull_others)
        return whole

    @property
    def can_pipeline_pulls(self) -> bool:
        """True if a pull may be sent before the push ahead of it is answered. It may not if a leader
        decides, because the pull needs its decision."""
        return self.mode != "sync" or len(self.connections) == 1

    def _make_version_meta(self) -> dict[str, Any]:
        """Return the fields of a pull that name the version that a server must have, and the decisions that
        lead to it (mode sync)."""
        if self.can_pipeline_pulls:
            return {}
        return {"version": self._versions[0], "decisions": self._decisions}

    def _pull_from(self, servers: Sequence[ServerConnection], shard: int, values: bool) -> Future[int]:
        self._knows_last_decision = False
        futures = []
        with self.requests.lock:
            for server in servers:
                meta: dict[str, Any] = {"shard": shard, **self._make_version_meta()}
                if values:
                    meta |= {"dense": True, **self._require_buffers().locate_parts(server, None)[0]}
                    if server.server == 0 and self._records_from >= 0:
                        meta["records"] = self._records_from
                futures.append(self.requests.request(server, "pull", meta))

        def store(answers: list[Message]) -> int:
            for server, answer in zip(servers, answers, strict=True):
                self._versions[server.server] = answer.meta["version"]
                arrays = answer.arrays
                if "missing" in answer.meta:
                    self._store_records(answer)
                    arrays = arrays[:-1]
                if arrays:
                    self._require_buffers().store_values(server.server, arrays)
                if server.server == 0:
                    self._decisions = answer.meta["decisions"]
                    self.learning_rates = answer.meta.get("learning_rates", self.learning_rates)
            return self._versions[0]

        return gather(futures, self.requests.run_until_done, store)

    def _store_records(self, answer: Message) -> None:
        if answer.arrays[-1].size:
            self._records.append(np.array(answer.arrays[-1]))
        self._missing += int(answer.meta["missing"])
        self._records_from = max(self._records_from, int(answer.meta["version"]))

    def follow_records(self) -> None:
        """Have pulls from now on bring the records of those pushes that entered the updates after the present
        values (mode sync)."""
        self._records_from, self._records, self._missing = self._versions[0], [], 0

    def take_records(self) -> tuple[Array, int]:
        """Return the records that came since the last call, float64[pushes, size], in the order in which the
        pushes were added up, and the number of updates whose records the leader no longer had."""
        records, self._records = self._records, []
        missing, self._missing = self._missing, 0
        return np.concatenate(records) if records else np.zeros((0, 0)), missing

    # Push

    def push(
        self,
        sequence: int,
        rows: int,
        *,
        shard: int | None = None,
        step: int | None = None,
        gradients: Mapping[str, Any] | None = None,
        tables: Mapping[str, tuple[Array, Array]] | None = None,
        record: Array | None = None,
        finite: bool = False,
        defer_send: bool = False,
        pull_follows: bool = False,
    ) -> Future[str]:
        """Push the gradients of a batch. The result is "applied", or "dropped" (mode sync: too late for its
        step, and none of its rows entered the model).

        Args:
            sequence: number of the push among those of its shard, from 0; see `last_applied`.
            rows: rows of data in the batch; a push with 0 has no gradients.
            shard: one of this worker's (None: its only one).
            step: version of the values that the gradients were computed on (None: the last pull's).
            gradients: by variable, copied to the client's buffer (None: they are there already). The buffer
                must not change until the result is known.
            tables: by table, int64[n] keys and [n, width] gradients; in mode sync they are part of a step.
            record: float64[size] that all workers get which `follow_records`, once the push is part of an
                update (mode sync).
            finite: the caller has checked that all gradients in the buffer are finite.
            defer_send: send it with the next request, for a caller that pulls at once.
            pull_follows: `values` may change from now on, until the pull that follows is answered.

        Fails with NotFinite, and then no server has applied any of it; SequenceError, InputError, ServerLost,
        ServerStalled.
        """
        chosen = resolve_shard(self.shards, shard)
        counts = as_counts(sequence=sequence, rows=rows, **({} if step is None else {"step": step}))
        if gradients is not None:
            self._copy_gradients(gradients, chosen)
        metas, arrays = [], []
        # If only tables are trained, only rows are ever pulled.
        seen = self.tables.row_versions if self._buffers is None and self.mode != "sync" else self._versions
        split = self.tables.split_by_server(tables or {})
        for connection in self.connections:
            meta: dict[str, Any] = {"shard": chosen, **counts}
            meta.setdefault("step", seen[connection.server])
            parts: list[Array] = []
            if rows and self._buffers is not None and self._buffers.plan.variables:
                where, parts = self._buffers.locate_parts(connection, chosen)
                meta |= {"dense": True, "finite": finite, **where}
                if pull_follows and "at" in where:
                    meta["ahead"] = self._buffers.offsets_of(None)
            if tables:
                meta["tables"] = list(tables)
                parts = [*parts, *(array for pair in split[connection.server] for array in pair)]
            if record is not None and connection.server == 0:
                meta["record"], parts = True, [*parts, record]
            metas.append(meta)
            arrays.append(parts)
        if not self.can_pipeline_pulls:
            return self._push_to_leader_last(metas, arrays)
        suspects = {*self._find_nonfinite_dense(metas)}
        suspects |= {*(self.tables.find_nonfinite_rows(split) if rows else ())}
        if suspects:
            send = [
                partial(self.requests.request, *one)
                for one in zip(self.connections, repeat("push"), metas, arrays, strict=False)
            ]
            return self._resolve_outcome(self.requests.request_suspects_first(send, suspects))
        return self._resolve_outcome(self.requests.request_each("push", metas, arrays, defer_send=defer_send))

    def _find_nonfinite_dense(self, metas: Sequence[dict[str, Any]]) -> list[int]:
        """Return the servers whose part of the gradient isn't finite, if there are several. Note in the
        requests to the others that theirs is."""
        suspects, buffers = [], self._buffers
        for server, meta in enumerate(metas if len(self.connections) > 1 else ()):
            if meta.get("finite") is False and buffers is not None:
                parts = buffers.view_parts(server, meta["shard"])
                meta["finite"] = all(native.all_finite(part) for part in parts)
                if not meta["finite"]:
                    suspects.append(server)
        return suspects

    def _push_to_leader_last(self, metas: list[dict[str, Any]], arrays: list[list[Array]]) -> Future[str]:
        """Push to the leader once all other servers hold the push: see `insitu.parameters.rules.modes`."""
        self.requests.start_background_io()
        whole: Future[str] = Future(self.requests.run_until_done)
        for meta in metas:
            meta["step"] = metas[0]["step"]

        def push_to_leader(others: Future[Any]) -> None:
            if others.error is not None:
                whole.set_exception(others.error)
                return
            leader = self.requests.request(self.connections[0], "push", metas[0], arrays[0])
            chain_future(self._resolve_outcome(gather([leader], self.requests.run_until_done, list)), whole)

        futures = [
            self.requests.request(connection, "push", meta, parts)
            for connection, meta, parts in zip(self.connections[1:], metas[1:], arrays[1:], strict=True)
        ]
        gather(futures, self.requests.run_until_done, list).add_done_callback(push_to_leader)
        return whole

    def _resolve_outcome(self, answers: Future[list[Message]]) -> Future[str]:
        """Return the future of a push's outcome, and adopt the decisions in the leader's answer."""
        whole: Future[str] = Future(self.requests.run_until_done)

        def read_outcome(done: Future[list[Message]]) -> None:
            if done.error is not None:
                whole.set_exception(done.error)
                return
            first = done.value[0].meta
            if self.mode == "sync":
                self._versions[0], self._decisions = first["version"], first["decisions"]
                self._knows_last_decision = True
            whole.set_result(first["outcome"])

        answers.add_done_callback(read_outcome)
        return whole

    def _copy_gradients(self, gradients: Mapping[str, Any], shard: int) -> None:
        views = self.gradients(shard)
        if set(gradients) != set(views):
            missing, unknown = sorted(set(views) - set(gradients)), sorted(set(gradients) - set(views))
            raise InputError(
                "A push brings a gradient for each variable that was defined, and for no other. "
                f"Missing: {missing}; not defined: {unknown}"
            )
        for name, gradient in gradients.items():
            views[name][...] = as_values(name, gradient, views[name])

    # Training

    def finish(self, shard: int | None = None, *, fit: int | None = None) -> Future[Any]:
        """Tell the servers that a shard pushes no more for now: nobody waits for it until it does again, or
        until all shards have finished. `fit`: number of the fit that it has ended, which may be repeated.
        """
        return self.requests.request_all("finish", {"shard": resolve_shard(self.shards, shard), "fit": fit})

    def finalize(self, training: int) -> None:
        """End training number `training` (from 0), once nobody pushes for it any more.

        The variables become what their updater leaves behind, such as averages. The first call for a number
        does so; later ones change nothing.
        """
        self.pull(self.shards[0] if self.shards else None).result()
        self.requests.request_all("finalize", {"training": training, **self._make_version_meta()}).result()

    def set_updater(self, updater: Mapping[str, Any] | str, *, table: str = "") -> Future[Any]:
        """Continue with other settings of the updater, such as another learning rate; the slots stay."""
        return self.requests.request_all("adjust", {"updater": updater, "table": table})

    def set_learning_rates(self, rates: Mapping[str, float]) -> Future[Any]:
        """Continue with other learning rates, by table; "": of the dense variables. The slots stay.

        An update that a server makes from then on uses them. `learning_rates` of each worker follows with its
        next pull. Fails with InputError for a rate that can't be, or an updater without one.
        """
        return self.requests.request_all("adjust", {"learning_rates": dict(rates)})

    def gather(
        self, place: str, sequence: int, arrays: Mapping[int, Array]
    ) -> Future[tuple[Array, Sequence[int]]]:
        """Bring an array for each of this worker's shards, float64[rows, size], to a place that all workers
        come to before their push `sequence`. The result has the rows of all, in the order of shards, and the
        shards that brought them. A worker that was restarted may be past the place; it isn't waited for.
        Fails with ServerStalled.
        """
        meta = {"place": place, "sequence": sequence, "shards": list(arrays)}
        meta["rows"] = [len(array) for array in arrays.values()]
        joined = np.concatenate(list(arrays.values()))
        answer = self.requests.request(self.connections[0], "gather", meta, [joined])

        def read(found: Sequence[Any]) -> tuple[Array, Sequence[int]]:
            return found[0].arrays[0], found[0].meta["shards"]

        return gather([answer], self.requests.run_until_done, read)

    # Progress

    def last_applied(self, shard: int | None = None, *, table: str = "") -> int:
        """Return the last sequence of the shard's pushes that needs not be pushed again; -1: none.

        `table`: of its pushes to that table alone. A restarted worker continues with the next sequence.
        Servers that have applied that one already don't apply it twice.
        """
        meta = {"shard": resolve_shard(self.shards, shard), "table": table}
        answers = self.requests.request_all("last_applied", meta).result()
        sequences = [int(answer.meta["sequence"]) for answer in answers]
        return sequences[0] if self.mode == "sync" and not table else min(sequences)

    def progress(self) -> dict[int, int]:
        """Return the last sequence of each shard that all servers have applied, without shards that never
        pushed."""
        applied = [dict(server["applied_by_shard"]) for server in self.stats()]
        if self.mode == "sync":
            return applied[0]
        common = set.intersection(*(set(one) for one in applied))
        return {shard: min(one[shard] for one in applied) for shard in sorted(common)}

    def stats(self) -> list[dict[str, Any]]:
        """Return the statistics of each server: pieces, bytes, version, and counts of pushes."""
        return [answer.meta for answer in self.requests.request_all("stats", {}).result()]

    # Checkpoints

    def expect_checkpoints(self) -> None:
        """Have the servers allocate memory now for the copies that checkpoints are written from. Without it
        the first checkpoint takes longer."""
        if not self._checkpoints_expected:
            self._checkpoints_expected = True
            self.requests.request_all("expect_checkpoints", {}).result()
            self.requests.remember_definition("expect_checkpoints", {})

    def checkpoint(self, directory: str | os.PathLike[str]) -> Future[int]:
        """Have all servers write their state to `directory`, consistent over all of them.

        Returns once the cut is known (see `rules/consistent_cut.py`). The result, the checkpoint's
        number, is there once it is on disk everywhere; training continues meanwhile. Only one worker may ask
        at a time.

        Raises ParameterError if a checkpoint is under way. The future fails with StorageFull,
        CheckpointError or ParameterError if it can't be written: then the previous one stays valid.
        """
        try:
            answers = self.requests.request_all("freeze", {}).result()
        except ParameterError:
            self.requests.request_all("freeze", {"thaw": True})  # for those that did freeze
            raise
        cut = plan_cut([answer.meta for answer in answers])
        whole: Future[int] = Future(self.requests.run_until_done)

        def resolve(done: Future[Any]) -> None:
            if done.error is None:
                whole.set_result(cut.number)
            else:
                whole.set_exception(done.error)

        meta = {"directory": os.fspath(directory), **cut.to_json()}
        self.requests.request_all("checkpoint", meta).add_done_callback(resolve)
        return whole

    def close(self) -> None:
        """Close all connections. Requests under way fail; values and gradients stay valid as plain memory."""
        self.requests.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Transport = Literal["auto", "shm", "tcp"]


def connect(
    addresses: Sequence[str],
    rank: int = 0,
    *,
    shards: Sequence[int] | None = None,
    chief: bool | None = None,
    secret: bytes | None = None,
    transport: Transport = "auto",
    backups: int = 0,
    timeout: float = 60.0,
    stall_timeout: float = 600.0,
) -> Client:
    """Connect a worker to all parameter servers.

    Args:
        addresses: those of all servers, in the order of their indices.
        rank: this worker's.
        shards: those that this worker pushes for (None: shard `rank`).
        chief: whether this worker brings the first values (None: rank 0 does).
        secret: the servers' (None: that of servers of this process without a secret of their own).
        transport: "shm" or "tcp"; "auto" uses shared memory to servers of this host and TCP to others.
        backups: the servers'. With 1 the state of server i is mirrored on server i + 1 (the last one's on the
            first), which takes over when it dies.
        timeout: seconds to connect, and to find a lost server again.
        stall_timeout: seconds that an answer may take.

    Raises InputError, ServerLost if a server isn't reached in time, AuthenticationError, VersionMismatch.
    """
    own_shards = (rank,) if shards is None else tuple(shards)
    if not addresses:
        raise InputError(
            "Parameter servers need at least one task: start the job with --ps auto, for one on each node, "
            "or --ps 1 or more"
        )
    if transport not in get_args(Transport):
        raise InputError(
            f"transport must be one of {', '.join(get_args(Transport))}. Received: {transport!r}"
        )
    if backups not in (0, 1) or backups >= len(addresses):
        raise InputError(
            f"backups must be 0, or 1 with two servers or more. Received: {backups} with {len(addresses)}"
        )
    if len(set(own_shards)) != len(own_shards) or any(shard < 0 for shard in own_shards):
        raise InputError(f"shards must be distinct and at least 0. Received: {own_shards}")
    secret = resolve_secret(secret)
    connections = []
    for server, address in enumerate(addresses):
        candidates = [address, *([addresses[(server + 1) % len(addresses)]] if backups else [])]
        connections.append(ServerConnection(server, candidates, rank, secret, transport))
    requests = ServerRequests(connections, timeout, stall_timeout)
    client = Client(requests, own_shards, rank == 0 if chief is None else chief)
    try:
        client.open(timeout)
    except BaseException:
        client.close()
        raise
    return client


# A worker's access to the queue of closures, which the first server holds


class ClosureClient:
    """Takes closures, and reports their outcome. See `closure_queue`."""

    def __init__(self, client: Client, worker: int, incarnation: int) -> None:
        self._client = client
        self._who = {"worker": worker, "incarnation": incarnation}

    def take(self, limit: int) -> int | None:
        """Return the number of a closure below `limit` to run; -1 while others run the last ones; None once
        all have ended."""
        answer = self._request("take", limit=limit)
        return None if answer.meta["complete"] else int(answer.meta["number"])

    def finish(self, number: int, result: bytes, delta: NDArray[np.float64], *, failed: bool = False) -> None:
        """Tell what a closure returned, or how it failed, and what it has added to summed variables."""
        arrays = (np.frombuffer(result, np.uint8), delta)
        self._request("finish", *arrays, number=number, failed=failed)

    def result(self, number: int) -> tuple[bytes, bool] | None:
        """Return what a closure returned, and whether it failed; None while it hasn't ended.

        Raises InputError for a result that isn't kept any more.
        """
        answer = self._request("result", number=number)
        if not answer.meta["ended"]:
            return None
        if not answer.arrays:
            raise InputError(
                "Results are kept up to 256 MiB, the newest first. Received: a fetch of the result of "
                f"function {number}, which was dropped. Fetch sooner, or return less."
            )
        return answer.arrays[0].tobytes(), bool(answer.meta["failed"])

    def join(self, number: int, limit: int, digest: str) -> JoinRecord:
        """Return what all workers find at join `number`. Call it once all closures below `limit` have
        ended. Raises InputError if other workers have scheduled others."""
        answer = self._request("join", number=number, limit=limit, digest=digest)
        return JoinRecord(limit, digest, answer.arrays[0], int(answer.meta["failed"]))

    def _request(self, operation: str, *arrays: NDArray[Any], **fields: Any) -> Message:
        meta = {"do": operation, **self._who, **fields}
        requests = self._client.requests
        message: Message = requests.request(requests.connections[0], "closure", meta, arrays).result()
        return message
