"""The life of a `ps` task: it serves from the strategy's constructor until the job lets it go."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import insitu.parameters
from insitu.context import Context
from insitu.errors import ParameterError
from insitu.grid.files import publish_file
from insitu.parameters import Client, ParameterServer, Rules
from insitu.train.servers.updater import model_updater

_LOG = logging.getLogger("insitu")
TELL_EVERY = 1.0
"""Seconds between two looks at whether there is something new to tell of."""


@dataclass(frozen=True, slots=True)
class Service:
    """How servers serve; the same in each task of a job."""

    rules: Rules
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


def serve_until_stopped(context: Context, service: Service) -> NoReturn:
    """Serves as this `ps` task and ends the process well once it is asked to: SIGTERM, or SIGINT."""
    own = context.servers[context.index]
    job = context.job
    server = service.server(
        own,
        context,
        index=context.index,
        addresses=context.servers,
        backups=context.server_backups,
        checkpoint=job.server_checkpoints if job is not None else None,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    stopped = threading.Event()
    teller = threading.Thread(target=_tell, args=(context, stopped), name="account", daemon=True)
    tells = context.job is not None and context.index == 0
    if tells:
        teller.start()
    try:
        server.serve()
    finally:
        stopped.set()
    if tells:
        teller.join()
    sys.exit(0)


def _tell(context: Context, stopped: threading.Event) -> None:
    """Writes what all servers hold and have done into the job's folder, while this one serves."""
    if context.job is None:
        return
    told = b""
    while not stopped.wait(TELL_EVERY):
        try:
            with _connected(context) as client:
                while not stopped.wait(TELL_EVERY):
                    account = json.dumps({"servers": client.stats()}).encode()
                    if account != told:
                        publish_file(context.job.server_account, account)
                        told = account
        except (ParameterError, OSError) as error:
            # One of them is gone, or not there yet: whoever trains says so, if it matters.
            _LOG.debug("The account of the servers can't be told: %s", error)


def _connected(context: Context) -> Client:
    return insitu.parameters.connect(
        context.servers, secret=context.secret(), transport="tcp", stall_timeout=context.stall_timeout
    )
