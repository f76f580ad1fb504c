"""A worker's access to the parameter servers: `connect`, and the `Client` that it returns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from insitu.errors import InputError, ParameterError
from insitu.exchange import resolve_secret
from insitu.parameters.dense_client import DenseClient
from insitu.parameters.futures import Future, gather
from insitu.parameters.rules import Array, plan_cut
from insitu.parameters.server_connection import ServerConnection

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

    Raises InputError, ServerLost where a server isn't reached in time, AuthenticationError, VersionMismatch.
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
    client = Client(connections, own_shards, rank == 0 if chief is None else chief, timeout, stall_timeout)
    try:
        client.open()
    except BaseException:
        client.close()
        raise
    return client


class Client(DenseClient):
    """One worker's access to all servers. Several threads may use it.

    Requests return a `Future`; several may be under way. `values` and `gradients` are the client's own
    buffers, in memory that servers of this host share: nothing is copied there.
    """

    _checkpoints_expected = False

    def open(self) -> None:
        """Connect to all servers; `connect` has done so."""
        deadline = time.monotonic() + self._timeout
        for connection in self.connections:
            connection.connect(deadline)
        answers = self.request_all("hello", {}).result(self._timeout)
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

    # Training

    def finish(self, shard: int | None = None, *, fit: int | None = None) -> Future[Any]:
        """Tell the servers that a shard pushes no more for now: nobody waits for it until it does again, or
        until all shards have finished. `fit`: number of the fit that it has ended, which may be repeated.
        """
        return self.request_all("finish", {"shard": self.resolve_shard(shard), "fit": fit})

    def finalize(self, training: int) -> None:
        """End training number `training` (from 0), once nobody pushes for it any more.

        The variables become what their updater leaves behind, such as averages. The first call for a number
        does so; later ones change nothing.
        """
        self.pull(self.shards[0] if self.shards else None).result()
        self.request_all("finalize", {"training": training, **self._make_version_meta()}).result()

    def set_updater(self, updater: Mapping[str, Any] | str, *, table: str = "") -> Future[Any]:
        """Go on with other settings of the updater, such as another learning rate; the slots stay."""
        return self.request_all("adjust", {"updater": updater, "table": table})

    def set_learning_rates(self, rates: Mapping[str, float]) -> Future[Any]:
        """Go on with other learning rates, by table; "": of the dense variables. The slots stay.

        An update that a server makes from then on uses them. `learning_rates` of each worker follows with its
        next pull. Fails with InputError for a rate that can't be, or an updater without one.
        """
        return self.request_all("adjust", {"learning_rates": dict(rates)})

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
        answer = self.request(self.connections[0], "gather", meta, [joined])

        def read(found: Sequence[Any]) -> tuple[Array, Sequence[int]]:
            return found[0].arrays[0], found[0].meta["shards"]

        return gather([answer], self.run_until_done, read)

    # Progress

    def last_applied(self, shard: int | None = None, *, table: str = "") -> int:
        """Return the last sequence of the shard's pushes that needs not be pushed again; -1: none.

        `table`: of its pushes to that table alone. A worker that was restarted goes on with the next
        sequence. Servers that have applied that one already don't apply it twice.
        """
        meta = {"shard": self.resolve_shard(shard), "table": table}
        answers = self.request_all("last_applied", meta).result()
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
        return [answer.meta for answer in self.request_all("stats", {}).result()]

    # Checkpoints

    def expect_checkpoints(self) -> None:
        """Have the servers allocate memory now for the copies that checkpoints are written from. Without it
        the first checkpoint takes longer."""
        if not self._checkpoints_expected:
            self._checkpoints_expected = True
            self.request_all("expect_checkpoints", {}).result()
            self.remember_definition("expect_checkpoints", {})

    def checkpoint(self, directory: str | os.PathLike[str]) -> Future[int]:
        """Have all servers write their state to `directory`, consistent over all of them.

        Returns once the cut is known (see `rules/consistent_cut.py`). The result, the checkpoint's
        number, is there once it is on disk everywhere; training goes on meanwhile. Only one worker may ask at
        a time.

        Raises ParameterError where a checkpoint is under way. The future fails with StorageFull,
        CheckpointError or ParameterError where it can't be written: then the one before stays valid.
        """
        try:
            answers = self.request_all("freeze", {}).result()
        except ParameterError:
            self.request_all("freeze", {"thaw": True})  # for those that did freeze
            raise
        cut = plan_cut([answer.meta for answer in answers])
        whole: Future[int] = Future(self.run_until_done)

        def resolve(done: Future[Any]) -> None:
            if done.error is None:
                whole.set_result(cut.number)
            else:
                whole.set_exception(done.error)

        meta = {"directory": os.fspath(directory), **cut.to_json()}
        self.request_all("checkpoint", meta).add_done_callback(resolve)
        return whole

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
