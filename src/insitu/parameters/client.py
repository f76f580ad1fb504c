"""A worker's side of the parameter servers: `connect`, and the `Client` that it returns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, Literal, get_args

from numpy.typing import NDArray

from insitu.errors import InputError, ParameterError
from insitu.exchange.handshake import check_secret
from insitu.parameters import native, sharding_plan
from insitu.parameters.futures import Future, gathered, pass_on
from insitu.parameters.server_connection import ServerConnection
from insitu.parameters.sharding_plan import MIN_PIECE_BYTES, ShardingPlan, Variable
from insitu.parameters.table_client import TableClient, as_counts
from insitu.parameters.wire import Message
from insitu.parameters.worker_buffers import WorkerBuffers, as_values

Array = NDArray[Any]
Transport = Literal["auto", "shm", "tcp"]
Definition = tuple[Sequence[int], str] | tuple[Sequence[int], str, Any]
"""(shape, dtype) or (shape, dtype, initial values)."""


def connect(
    addresses: Sequence[str],
    rank: int = 0,
    *,
    shards: Sequence[int] | None = None,
    chief: bool | None = None,
    secret: bytes = b"",
    transport: Transport = "auto",
    backups: int = 0,
    timeout: float = 60.0,
    stall_timeout: float = 600.0,
) -> Client:
    """Connects worker `rank` to all parameter servers, in their order.

    `shards` are those that this worker pushes for (None: shard `rank`). The `chief` (None: rank 0) brings the
    first values. `transport` "auto" takes shared memory to servers of this host and TCP to others. With
    `backups` 1 the state of server i is mirrored on server i + 1 (the last one's on the first), which takes
    over when it dies. `timeout` bounds the connecting, and the finding of a lost server again; and
    `stall_timeout` every wait for an answer; in seconds.

    Raises InputError, ServerLost where a server isn't reached in time, AuthenticationError, VersionMismatch.
    """
    hosted = (rank,) if shards is None else tuple(shards)
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
    if len(set(hosted)) != len(hosted) or any(shard < 0 for shard in hosted):
        raise InputError(f"shards must be distinct and at least 0. Received: {hosted}")
    check_secret(secret)
    links = []
    for server, address in enumerate(addresses):
        candidates = [address, *([addresses[(server + 1) % len(addresses)]] if backups else [])]
        links.append(ServerConnection(server, candidates, rank, secret, transport))
    client = Client(links, hosted, rank == 0 if chief is None else chief, timeout, stall_timeout)
    try:
        client.open()
    except BaseException:
        client.close()
        raise
    return client


class Client(TableClient):
    """One worker's access to all servers. May be used by several threads.

    Requests return a `Future`; several may be under way. `values` and `gradients` are the client's own
    buffers, in memory that servers of this host share: nothing is copied where they are used.
    """

    def __init__(
        self,
        links: Sequence[ServerConnection],
        shards: Sequence[int],
        chief: bool,
        timeout: float,
        stall_timeout: float,
    ) -> None:
        super().__init__(links, shards, timeout, stall_timeout)
        self.is_chief = chief
        self.mode = "async"
        self.total_replicas = 1
        self._buffers: WorkerBuffers | None = None
        self._versions = [0] * len(self.links)
        self._decisions: list[Any] = []
        self._told = False
        self._expects = False

    def open(self) -> None:
        """Connects; `connect` has done so."""
        deadline = time.monotonic() + self._timeout
        for link in self.links:
            link.connect(deadline)
        answers = self.everywhere("hello", {}).result(self._timeout)
        told = [(a.meta["mode"], a.meta["total_replicas"]) for a in answers]
        if len(set(told)) > 1:
            raise ParameterError(f"The servers have different modes or numbers of replicas: {told}")
        self.mode, self.total_replicas = told[0]
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
    ) -> ShardingPlan:
        """Defines the dense variables, alike in all workers, and returns where they went. The chief's initial
        values are those that all start with, unless the servers have values already. `updater` is what
        `make_updater` of the servers understands. Variables are spread over the servers, the large ones in
        pieces of at least `min_piece_bytes`; `together`: the first server holds all, for an updater that
        must see them at once.

        Raises DefinitionMismatch where the servers hold another model, InputError.
        """
        listed = [Variable(n, tuple(int(i) for i in d[0]), str(d[1])) for n, d in variables.items()]
        layout = sharding_plan.plan_sharding(listed, len(self.links), min_piece_bytes, together=together)
        meta = {"layout": sharding_plan.to_json(layout, min_piece_bytes), "updater": updater}
        answers = self.everywhere("define", meta).result()
        self._versions = [answer.meta["version"] for answer in answers]
        if self._buffers is None:
            self.remember("define", meta)
            self._buffers = WorkerBuffers(layout, self.shards, any(link.here for link in self.links))
            self._show_buffers()
        buffers = self._buffers
        if self.is_chief and not all(answer.meta["initialised"] for answer in answers):
            views = buffers.views(None)
            for name, definition in variables.items():
                if len(definition) > 2:
                    views[name][...] = as_values(name, definition[2], views[name])
            parts = [self._part(link, None) for link in self.links]
            self.each("initialise", [p[0] for p in parts], [p[1] for p in parts]).result()
        return layout

    def _show_buffers(self) -> None:
        buffers = self._buffers
        if buffers is None or not buffers.shared:
            return
        futures = []
        for link in self.links:
            if link.here:
                futures.append(self.request(link, "attach", self._shown(buffers)))
        gathered(futures, self.pump, list).result()

    @staticmethod
    def _shown(buffers: WorkerBuffers) -> dict[str, Any]:
        return {"segment": WorkerBuffers.SEGMENT, "descriptor": buffers.descriptor, "size": buffers.size}

    def reintroduce(self, link: ServerConnection, deadline: float) -> None:
        super().reintroduce(link, deadline)
        buffers = self._buffers
        if buffers is not None and link.here and buffers.shared:
            link.ask("attach", self._shown(buffers), deadline)
        if buffers is not None and not (link.here and buffers.shared):
            self._send_inline(link, buffers)

    @staticmethod
    def _send_inline(link: ServerConnection, buffers: WorkerBuffers) -> None:
        """What isn't answered goes to a server that doesn't share this host's memory."""
        for request in link.pending.values():
            request.meta.pop("ahead", None)
            if request.meta.pop("at", None) is None:
                continue
            del request.meta["segment"]
            if request.meta["op"] != "pull":
                parts = buffers.parts(link.server, request.meta.get("shard"))
                request.arrays = [*parts, *request.arrays]

    def _part(self, link: ServerConnection, shard: int | None) -> tuple[dict[str, Any], list[Array]]:
        """How a server finds its part of the values or of a shard's gradients: (meta, arrays)."""
        buffers = self._defined()
        if link.here and buffers.shared:
            return {"segment": WorkerBuffers.SEGMENT, "at": buffers.at(shard)}, []
        return {}, buffers.parts(link.server, shard)

    @property
    def layout(self) -> ShardingPlan:
        """Where the dense variables are. Raises InputError before `define`."""
        return self._defined().layout

    def _defined(self) -> WorkerBuffers:
        if self._buffers is None:
            raise InputError(
                "Variables must be defined (Client.define) before anything else is done with them"
            )
        return self._buffers

    # Dense

    @property
    def values(self) -> dict[str, Array]:
        """Each variable as it was last pulled, in its shape: views that the next pull overwrites."""
        return self._defined().views(None)

    def flat_values(self, group: str | None = None) -> Array:
        """All variables of one dtype (None: there is only one), back to back in the order of definition."""
        return self._defined().flat(self._group(group), None)

    def gradients(self, shard: int | None = None) -> dict[str, Array]:
        """Where to put a shard's gradients before `push`: views by variable. Not to be written to while the
        push is under way."""
        return self._defined().views(self.hosted(shard))

    def flat_gradients(self, shard: int | None = None, group: str | None = None) -> Array:
        """The same as one flat array, of the variables of one dtype."""
        return self._defined().flat(self._group(group), self.hosted(shard))

    def _group(self, group: str | None) -> str:
        groups = self.layout.groups
        if group is None and len(groups) != 1:
            raise InputError(f"Variables are of {', '.join(groups) or 'no dtype'}: say which group is meant")
        if group is not None and group not in groups:
            raise InputError(f"group must be one of {', '.join(groups)}. Received: {group!r}")
        return groups[0] if group is None else group

    def pull(self, shard: int | None = None, *, values: bool = True) -> Future[int]:
        """Brings `values` up to date; the result is the version that they are of (of the first server).

        For `shard` (None: this worker's only one) it waits where the mode says so: in bounded, while the
        shard is too far ahead; in sync, until its last push has become part of a step, or was dropped.
        Without `values` it only waits.
        """
        chosen = self.hosted(shard) if shard is not None or len(self.shards) == 1 else -1
        if self.pulls_behind_pushes or self._told:
            return self._pull_all(self.links, chosen, values)
        # What the leader decided must be known before the others are asked.
        self.keep_moving()
        whole: Future[int] = Future(self.pump)

        def go_on(first: Future[Any]) -> None:
            if first.error is not None:
                whole.fail(first.error)
            else:
                pass_on(self._pull_all(self.links[1:], chosen, values), whole)

        self._pull_all(self.links[:1], chosen, values).then(go_on)
        return whole

    @property
    def pulls_behind_pushes(self) -> bool:
        """Whether a pull may be asked for before the push in front of it is answered. Where a leader decides,
        its decision must be known first."""
        return self.mode != "sync" or len(self.links) == 1

    def told(self) -> dict[str, Any]:
        """In mode sync, the version that a server must have, and the decisions that lead there."""
        if self.pulls_behind_pushes:
            return {}
        return {"version": self._versions[0], "decisions": self._decisions}

    def _pull_all(self, links: Sequence[ServerConnection], shard: int, values: bool) -> Future[int]:
        self._told = False
        futures = []
        with self.lock:
            for link in links:
                meta: dict[str, Any] = {"shard": shard}
                meta |= self.told()
                if values:
                    meta |= {"dense": True, **self._part(link, None)[0]}
                futures.append(self.request(link, "pull", meta))

        def arrived(answers: list[Message]) -> int:
            for link, answer in zip(links, answers, strict=True):
                self._versions[link.server] = answer.meta["version"]
                if answer.arrays:
                    self._defined().fill(link.server, answer.arrays)
                if link.server == 0:
                    self._decisions = answer.meta["decisions"]
            return self._versions[0]

        return gathered(futures, self.pump, arrived)

    def push(
        self,
        sequence: int,
        rows: int,
        *,
        shard: int | None = None,
        step: int | None = None,
        gradients: Mapping[str, Any] | None = None,
        tables: Mapping[str, tuple[Array, Array]] | None = None,
        finite: bool = False,
        hold: bool = False,
        pulls: bool = False,
    ) -> Future[str]:
        """Pushes the gradients of a batch of `rows` rows; the result is "applied" or "dropped" (mode sync:
        too late for its step; none of its rows entered the model).

        `sequence` counts the shard's pushes from 0 (see `last_applied`). `step` is the version that the
        gradients were computed on (None: the last pull's). `gradients` are copied to the client's own buffer;
        None: they are there already. They stay there unchanged until the result is known. `tables` brings
        gradients for rows of tables: by name, int64[n] keys and [n, width]; in sync they are part of a step.
        A push with 0 rows has no gradients. `finite`: the caller has seen that all gradients in the buffers
        are. One to `hold` may be sent with the next request, for who pulls at once; with `pulls`, `values`
        may change from now on until that pull is answered.

        Fails with NotFinite, and then no server has applied any of it; SequenceError, InputError, ServerLost,
        ServerStalled.
        """
        chosen = self.hosted(shard)
        counts = as_counts(sequence=sequence, rows=rows, **({} if step is None else {"step": step}))
        if gradients is not None:
            self._copy_in(gradients, chosen)
        metas, arrays = [], []
        # Where nothing but tables is trained, nothing else is ever pulled.
        seen = self.row_versions if self._buffers is None and self.mode != "sync" else self._versions
        split = self.split(tables or {})
        for link in self.links:
            meta: dict[str, Any] = {"shard": chosen, **counts}
            meta.setdefault("step", seen[link.server])
            parts: list[Array] = []
            if rows and self._buffers is not None and self._buffers.layout.variables:
                where, parts = self._part(link, chosen)
                meta |= {"dense": True, "finite": finite, **where}
                if pulls and "at" in where:
                    meta["ahead"] = self._buffers.at(None)
            if tables:
                meta["tables"] = list(tables)
                parts = [*parts, *(array for pair in split[link.server] for array in pair)]
            metas.append(meta)
            arrays.append(parts)
        if not self.pulls_behind_pushes:
            return self._push_in_two(metas, arrays)
        suspects = {*self._not_finite(metas), *(self.not_finite(split) if rows else ())}
        if suspects:
            ask = [partial(self.request, *one) for one in zip(self.links, repeat("push"), metas, arrays)]
            return self._outcome(self.suspects_first(ask, suspects))
        return self._outcome(self.each("push", metas, arrays, hold=hold))

    def _not_finite(self, metas: Sequence[dict[str, Any]]) -> list[int]:
        """The servers, of several, whose parts of a dense gradient aren't finite; the others are told."""
        found, buffers = [], self._buffers
        for server, meta in enumerate(metas if len(self.links) > 1 else ()):
            if meta.get("finite") is False and buffers is not None:
                meta["finite"] = all(native.finite(part) for part in buffers.parts(server, meta["shard"]))
                if not meta["finite"]:
                    found.append(server)
        return found

    def _push_in_two(self, metas: list[dict[str, Any]], arrays: list[list[Array]]) -> Future[str]:
        """First to all servers that don't lead, then to the leader: see `insitu.parameters.modes`."""
        self.keep_moving()
        whole: Future[str] = Future(self.pump)
        for meta in metas:
            meta["step"] = metas[0]["step"]

        def held(others: Future[Any]) -> None:
            if others.error is not None:
                whole.fail(others.error)
                return
            leader = self.request(self.links[0], "push", metas[0], arrays[0])
            pass_on(self._outcome(gathered([leader], self.pump, list)), whole)

        futures = [
            self.request(link, "push", meta, parts)
            for link, meta, parts in zip(self.links[1:], metas[1:], arrays[1:], strict=True)
        ]
        gathered(futures, self.pump, list).then(held)
        return whole

    def _outcome(self, answers: Future[list[Message]]) -> Future[str]:
        whole: Future[str] = Future(self.pump)

        def arrived(done: Future[list[Message]]) -> None:
            if done.error is not None:
                whole.fail(done.error)
                return
            first = done.value[0].meta
            if self.mode == "sync":
                self._versions[0], self._decisions = first["version"], first["decisions"]
                self._told = True
            whole.resolve(first["outcome"])

        answers.then(arrived)
        return whole

    def _copy_in(self, gradients: Mapping[str, Any], shard: int) -> None:
        views = self.gradients(shard)
        if set(gradients) != set(views):
            missing, unknown = sorted(set(views) - set(gradients)), sorted(set(gradients) - set(views))
            raise InputError(
                f"A push brings a gradient for each variable. Missing: {missing}; not defined: {unknown}"
            )
        for name, gradient in gradients.items():
            views[name][...] = as_values(name, gradient, views[name])

    def finish(self, shard: int | None = None) -> Future[Any]:
        """Says that the shard pushes no more for now: nobody waits for it until it does again."""
        return self.everywhere("finish", {"shard": self.hosted(shard)})

    def finalize(self, training: int) -> None:
        """Says that training number `training` (from 0) has ended, once nobody pushes for it any more: the
        variables become what their updater leaves behind, such as averages. Done once."""
        self.pull(self.shards[0] if self.shards else None).result()
        self.everywhere("finalize", {"training": training, **self.told()}).result()

    def adjust(self, updater: Mapping[str, Any] | str, *, table: str = "") -> Future[Any]:
        """Goes on with other settings of the updater, such as another learning rate; the slots stay."""
        return self.everywhere("adjust", {"updater": updater, "table": table})

    # Account

    def last_applied(self, shard: int | None = None, *, table: str = "") -> int:
        """The last sequence of the shard's pushes (or of those to one table alone) that needs not be pushed
        again; -1: none. A worker that was restarted goes on with the next; what only some servers have of it
        isn't applied there twice."""
        meta = {"shard": self.hosted(shard), "table": table}
        answers = self.everywhere("last_applied", meta).result()
        found = [int(answer.meta["sequence"]) for answer in answers]
        return found[0] if self.mode == "sync" and not table else min(found)

    def expect_checkpoints(self) -> None:
        """Has servers make room now for the copies that checkpoints are written from; otherwise the first one
        takes longer."""
        if not self._expects:
            self._expects = True
            self.everywhere("expect_checkpoints", {}).result()
            self.remember("expect_checkpoints", {})

    def checkpoint(self, directory: str | os.PathLike[str]) -> Future[int]:
        """Has all servers write what they hold to `directory`, all at the same moment: see
        `insitu.parameters.consistent_cut`. Returns once that moment is fixed; the result, the checkpoint's number,
        is known once it is on disk everywhere, and training goes on meanwhile. For one worker at a time.

        Raises ParameterError where one is under way; the future fails with StorageFull, CheckpointError or
        ParameterError where it can't be written: then the one before stands.
        """
        try:
            answers = self.everywhere("freeze", {}).result()
        except ParameterError:
            self.everywhere("freeze", {"thaw": True})  # who could waits for nothing
            raise
        cut: dict[str, dict[int, int]] = {}
        for answer in answers:
            for stream, applied in answer.meta["applied"].items():
                own = cut.setdefault(stream, {})
                for shard, sequence in applied:
                    own[shard] = max(own.get(shard, -1), sequence)
        number = 1 + max(int(answer.meta["number"]) for answer in answers)
        first = answers[0].meta
        meta = {
            "directory": os.fspath(directory),
            "number": number,
            "cut": {stream: sorted(own.items()) for stream, own in cut.items()},
            "version": first["version"],
            "decisions": first["decisions"],
        }
        whole: Future[int] = Future(self.pump)
        self.everywhere("checkpoint", meta).then(
            lambda done: whole.resolve(number) if done.error is None else whole.fail(done.error)
        )
        return whole

    def progress(self) -> dict[int, int]:
        """The last sequence of each shard's pushes that all servers have applied; shards that never pushed
        are left out."""
        applied = [dict(told["applied_by_shard"]) for told in self.stats()]
        if self.mode == "sync":
            return applied[0]
        common = set.intersection(*(set(one) for one in applied))
        return {shard: min(one[shard] for one in applied) for shard in sorted(common)}

    def stats(self) -> list[dict[str, Any]]:
        """What each server tells of itself: pieces, bytes, version, and counts of what was pushed."""
        return [answer.meta for answer in self.everywhere("stats", {}).result()]

    def close(self) -> None:
        """Hangs up. What is under way fails; values and gradients stay valid as plain memory."""
        super().close()
        if self._buffers is not None:
            self._buffers.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
