"""A parameter server: holds variables and tables, and applies what workers push."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.exchange import resolve_secret
from insitu.parameters.event_loop import EventLoop
from insitu.parameters.mirroring import MirrorManager, StateFactory
from insitu.parameters.rules import ConsistencyPolicy, Mode
from insitu.parameters.server_state import MakeUpdater
from insitu.parameters.updaters import make_updater

_TICK_INTERVAL = 0.25
"""Seconds between two searches for requests and handshakes that have waited too long."""
REPORT_INTERVAL = 1.0
"""Seconds between two reports of a server's statistics."""


class ParameterServer:
    """Holds variables and tables, and applies what workers push. See `insitu.parameters` for an example.

    Args:
        address: `host:port` to listen on (port 0: any), bound at once. The attribute of this name has the
            real port.
        index: this server's place among `addresses`.
        addresses: those of all servers, in order (None: it is the only one).
        secret: of 16 bytes or more, proved by both sides of each connection, never sent (None: one that only
            this process knows).
        mode: when pushes become updates; see `insitu.parameters.rules.modes`, also for the next three.
        total_replicas: shards that push.
        replicas_to_aggregate: pushes that make a step in mode sync (None: `total_replicas`).
        max_staleness: most pushes that a shard may be ahead of the slowest in mode bounded.
        nan: "refuse" gradients that aren't finite, or "clip" such elements to 0.
        make_updater: makes the updater of the config that workers send.
        backups: with 1, the next server mirrors what this one holds, and this one mirrors the previous one.
        checkpoint: folder that `Client.checkpoint` wrote to. The server starts with what the newest
            checkpoint there holds of it, unless a mirror has its state.
        checkpoint_key: signs what `Client.checkpoint` writes; `checkpoint` must have been signed with it
            (None: this user's key, `$INSITU_HOME/keys/USER`).
        stall_timeout: seconds after which a request that waits fails.
        report: called by the serving thread with `stats()`, each second and once the server has ended.

    Raises InputError for bad arguments, ParameterError if it can't listen.

    Either call `serve()`, which returns after `stop()`, or use it as a context manager: then it serves in a
    thread of its own.

    Example:
        >>> with insitu.ParameterServer(mode="async") as server:
        ...     with insitu.parameters.connect([server.address]) as client:
        ...         start = np.zeros(3, "float32")
        ...         plan = client.define({"w": ((3,), "float32", start)}, updater={"name": "sgd"})
        ...         newest = client.pull().result()
        ...         print(newest, client.values["w"])
        0 [0. 0. 0.]
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        index: int = 0,
        addresses: Sequence[str] | None = None,
        secret: bytes | None = None,
        mode: Mode = "async",
        total_replicas: int = 1,
        replicas_to_aggregate: int | None = None,
        max_staleness: int = 4,
        nan: str = "refuse",
        make_updater: MakeUpdater = make_updater,
        backups: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_key: bytes | None = None,
        stall_timeout: float = 600.0,
        report: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        count = 1 if addresses is None else len(addresses)
        if not 0 <= index < count:
            raise InputError(f"index must be in [0, {count}), the servers' addresses. Received: {index}")
        if backups not in (0, 1) or backups >= count:
            raise InputError(
                f"backups must be 0, or 1 with two servers or more. Received: {backups} with {count}"
            )
        secret = resolve_secret(secret)
        policy = ConsistencyPolicy(mode, total_replicas, replicas_to_aggregate, max_staleness)
        folder = None if checkpoint is None else Path(checkpoint)
        factory = StateFactory(policy, nan, make_updater, folder, checkpoint_key)
        factory.make(index)  # raises for bad settings before anything is opened
        self.index = index
        #: The secret that workers need.
        self.secret = secret
        self._report = report or (lambda stats: None)
        self._reported_at = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop = EventLoop(address, index, secret)
        #: The address that workers connect to, with its real port.
        self.address = self._loop.address
        try:
            self._mirrors = MirrorManager(
                index, addresses or [self.address], backups, secret, factory, stall_timeout, self._loop
            )
        except BaseException:
            self._loop.close()  # as when its checkpoint can't be read
            raise
        self._loop.set_handler(self._mirrors)

    def serve(self) -> None:
        """Serve until `stop` is called, by another thread or a signal handler."""
        try:
            ticked_at = time.monotonic()
            while not self._stopping:
                self._loop.poll(_TICK_INTERVAL)
                now = time.monotonic()
                if now - ticked_at >= _TICK_INTERVAL:
                    ticked_at = now
                    self._tick(now)
        finally:
            self.close()
            self._report(self.stats())

    def _tick(self, now: float) -> None:
        self._loop.expire_handshakes(now)
        self._loop.check_hosts()
        self._mirrors.tick(now)
        self._loop.flush()
        if now - self._reported_at >= REPORT_INTERVAL:
            self._reported_at = now
            self._report(self.stats())

    def stats(self) -> list[dict[str, Any]]:
        """Return what `Client.stats` returns, of this server and of any whose state it has taken over.

        Don't call it while another thread serves.
        """
        return [hosted.handler.collect_stats() for hosted in self._mirrors.list_primaries()]

    def start(self) -> ParameterServer:
        """Serve in a thread of its own from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self.serve, name=f"ps:{self.index}", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """End `serve`, and wait for the thread that `start` began. A signal handler may call it."""
        self._stopping = True
        self._loop.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self._thread = None

    def close(self) -> None:
        """Close the listener and all connections. `serve` does so at its end."""
        self._loop.close()

    def __enter__(self) -> ParameterServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.close()
