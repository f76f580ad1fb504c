"""The program of a `ps` task: it serves from the strategy's constructor until the job ends."""

from __future__ import annotations

import json
import logging
import queue
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from insitu.context import Context
from insitu.errors import InsituError, TrainingError
from insitu.grid import publish_file
from insitu.parameters import ConsistencyPolicy, ParameterServer, check_nan_policy
from insitu.signatures import derive_key
from insitu.time_account import ACCOUNT, UPDATE, WAIT
from insitu.train.elastic import SideSampler
from insitu.train.parameter_server.updater import make_model_updater

_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of the servers, the same in each task of a job."""

    rules: ConsistencyPolicy
    """The mode, and its numbers."""
    nan: str
    """How non-finite gradients are treated: `"refuse"` or `"clip"`."""

    def server(self, address: str, context: Context, **places: Any) -> ParameterServer:
        """Return a server for `address` that doesn't serve yet."""
        rules, signing = self.rules, context.signing_secret()
        return ParameterServer(
            address,
            secret=context.secret(),
            checkpoint_key=None if signing is None else derive_key(signing, "server checkpoints"),
            mode=rules.mode,
            total_replicas=rules.total_replicas,
            replicas_to_aggregate=rules.replicas_to_aggregate,
            max_staleness=rules.max_staleness,
            nan=self.nan,
            make_updater=make_model_updater,
            stall_timeout=context.stall_timeout,
            **places,
        )


def serve_or_configure(context: Context, rules: ConsistencyPolicy, nan: str, need: str) -> ServerConfig:
    """Return the configuration of the servers. In a `ps` task, serve instead, and never return.

    Raises TrainingError that begins with `need` in a job without such tasks, and in a cluster without a job;
    InputError for `nan`.
    """
    check_nan_policy(nan)
    config = ServerConfig(rules, nan)
    if context.by_hand:
        raise TrainingError(
            f"{need} Received: a cluster by TF_CONFIG, without a job. Start the script by `insitu start "
            "--workers N --ps M - JOB_DIR SCRIPT`."
        )
    if context.role == "ps":
        serve_until_stopped(context, config)
    if (context.job_id or context.workers) and not context.servers:
        raise TrainingError(
            f"{need} Received: a job with 0 ps tasks. Start it with --ps auto, for one on each node, or "
            "with --ps 1 or more."
        )
    return config


def serve_until_stopped(context: Context, config: ServerConfig) -> NoReturn:
    """Serve as this `ps` task, and exit with code 0 after SIGTERM or SIGINT."""
    job = context.job
    path = None if job is None else job.server_account(context.task)
    with _StatusWriter(path, SideSampler(context)) as writer:
        server = config.server(
            context.servers[context.index],
            context,
            index=context.index,
            addresses=context.servers,
            backups=context.server_backups,
            checkpoint=job.server_checkpoints if job is not None else None,
            report=writer.publish,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        ACCOUNT.enter(WAIT)
        server.serve()
    sys.exit(0)


class _StatusWriter:
    """Writes a server's status into the job's folder, and what it spends its time on.

    A thread does so, because disks can be slow."""

    def __init__(self, path: Path | None, sampler: SideSampler) -> None:
        self._path = path
        self._sampler = sampler
        self._statuses: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="server-status", daemon=True)

    def __enter__(self) -> _StatusWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._statuses.put(None)
        self._thread.join()

    def publish(self, servers: list[dict[str, Any]]) -> None:
        self._statuses.put(servers)

    def _write(self) -> None:
        last_written = b""
        while (servers := self._statuses.get()) is not None:
            # A server is busy with requests, most of which bring gradients.
            self._sampler.write(UPDATE)
            data = json.dumps({"servers": servers}).encode()
            if self._path is None or data == last_written:
                continue
            try:
                publish_file(self._path, data)
                last_written = data
            except (InsituError, OSError) as error:
                # Training doesn't need the status; the next one may be written again.
                _LOG.warning("The status of this server can't be written: %s", error)
        self._sampler.write(UPDATE, now=True)
