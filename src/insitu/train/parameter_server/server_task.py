"""The life of a `ps` task: it serves from the strategy's constructor until the job lets it go."""

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
from insitu.grid.files import publish_file
from insitu.parameters import ConsistencyPolicy, ParameterServer
from insitu.parameters.gradients import check_nan_policy
from insitu.train.parameter_server.updater import model_updater

_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class Service:
    """How servers serve; the same in each task of a job."""

    rules: ConsistencyPolicy
    nan: str

    def server(self, address: str, context: Context, **places: Any) -> ParameterServer:
        """A server that listens on `address`, not serving yet."""
        rules = self.rules
        return ParameterServer(
            address,
            secret=context.secret(),
            mode=rules.mode,
            total_replicas=rules.total_replicas,
            replicas_to_aggregate=rules.replicas_to_aggregate,
            max_staleness=rules.max_staleness,
            nan=self.nan,
            make_updater=model_updater,
            stall_timeout=context.stall_timeout,
            **places,
        )


def begin_service(context: Context, rules: ConsistencyPolicy, nan: str, need: str) -> Service:
    """The service of a strategy whose constructor serves in a `ps` task, and then never returns.

    Raises TrainingError that begins with `need` in a job without such tasks, InputError for `nan`.
    """
    check_nan_policy(nan)
    service = Service(rules, nan)
    if context.role == "ps":
        serve_until_stopped(context, service)
    if (context.job_id or context.workers) and not context.servers:
        raise TrainingError(
            f"{need} Received: a job without any. Start it with --ps auto, for one on each node, or "
            "--ps 1 or more."
        )
    return service


def serve_until_stopped(context: Context, service: Service) -> NoReturn:
    """Serves as this `ps` task and ends the process well once it is asked to: SIGTERM, or SIGINT."""
    job = context.job
    with _Teller(None if job is None else job.server_account(context.task)) as teller:
        server = service.server(
            context.servers[context.index],
            context,
            index=context.index,
            addresses=context.servers,
            backups=context.server_backups,
            checkpoint=job.server_checkpoints if job is not None else None,
            report=teller.tell,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.stop())
        server.serve()
    sys.exit(0)


class _Teller:
    """Writes what a server tells of itself into the job's folder, in a thread: disks are slow at times."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._accounts: queue.SimpleQueue[list[dict[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="account", daemon=True)

    def __enter__(self) -> _Teller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._accounts.put(None)
        self._thread.join()

    def tell(self, account: list[dict[str, Any]]) -> None:
        self._accounts.put(account)

    def _write(self) -> None:
        written = b""
        while (account := self._accounts.get()) is not None:
            data = json.dumps({"servers": account}).encode()
            if self._path is None or data == written:
                continue
            try:
                publish_file(self._path, data)
                written = data
            except (InsituError, OSError) as error:
                # Whoever trains needs no account; the next one may be written again.
                _LOG.warning("The account of this server can't be written: %s", error)
