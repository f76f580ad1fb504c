"""The program of a `ps` task: it serves from the strategy's constructor until the job ends."""

from __future__ import annotations

import json
import logging
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.disk.signatures import derive_key
from insitu.base.errors import InsituError, TrainingError
from insitu.base.measure.time_account import ACCOUNT, UPDATE, WAIT
from insitu.grid import publish_file
from insitu.parameters import (
    ConsistencyPolicy,
    FinalizingUpdater,
    InitialisingUpdater,
    ParameterServer,
    Updater,
    check_nan_policy,
    make_updater,
    set_learning_rate,
)
from insitu.train.elastic import SideSampler
from insitu.train.parameter_server.keras_optimizer import KerasUpdater, make_optimizer
from insitu.train.parameter_server.model_spec import STATE_PREFIX, strip_worker_settings, to_float
from insitu.train.parameter_server.optimizer_settings import SeveralUpdaters

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


# The updater of a model on a server, made from the worker's description of the model


Arrays = Mapping[str, NDArray[Any]]


def make_model_updater(config: Mapping[str, Any] | str) -> Updater:
    """Return the updater for an `updater_config`, or for one of the servers' own. Raises TrainingError for an
    unknown optimizer."""
    if isinstance(config, str) or "state" not in config:
        return make_updater(config)
    inner: Updater
    if "several" in config:
        members = [make_model_updater({**member, "has_state": False}) for member in config["several"]]
        inner = SeveralUpdaters(members, config["of"])
    elif "built_in" in config:
        inner = make_updater(_with_schedule(config))
    else:
        optimizer_config = strip_worker_settings(
            json.loads(config["optimizer"]), norms=not config["without_norms"]
        )
        inner = KerasUpdater(json.dumps(optimizer_config), jit=bool(config["jit"]))
    return ModelUpdater(inner, averages=config["state"] == "average") if config["has_state"] else inner


def _with_schedule(config: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(config["built_in"])
    if "optimizer" in config:
        schedule = make_optimizer(config["optimizer"])._learning_rate
        settings["learning_rate"] = lambda step: to_float(schedule(step))
    return settings


def _without_state(values: Arrays) -> dict[str, NDArray[Any]]:
    return {name: value for name, value in values.items() if not name.startswith(STATE_PREFIX)}


class ModelUpdater:
    """Leaves variables to an optimizer's updater, and updates the state that the forward pass moves itself.

    For state a worker pushes the new value: the mean over shards, if they wait for each other. Otherwise
    the state moves towards it, the less the more updates the worker hasn't seen. So it becomes the mean of
    the values of workers that began with the same state, as if they had done one step together. It never
    leaves the range of what workers pushed, however many they are.
    """

    elementwise = False
    staleness: int | None
    """Updates since the values that the worker began with. Written before each update, unless it is None:
    then workers wait for each other."""

    def __init__(self, inner: Updater, *, averages: bool) -> None:
        self._inner = inner
        self.staleness = 0 if averages else None

    @property
    def learning_rate(self) -> Any:
        """The optimizer's own, or what was set in its place."""
        inner: Any = self._inner
        return inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        set_learning_rate(self._inner, rate)

    def slots(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, NDArray[Any]]:
        if name.startswith(STATE_PREFIX):
            return {}
        return self._inner.slots(name, shape, dtype)

    def row_slots(self) -> dict[str, float]:
        return {}

    def update(self, values: Arrays, gradients: Arrays, slots: Mapping[str, Arrays], step: int) -> None:
        ours = [name for name in values if name.startswith(STATE_PREFIX)]
        for name in ours:
            if self.staleness:
                values[name] += (gradients[name] - values[name]) / values[name].dtype.type(self.staleness + 1)
            else:
                np.copyto(values[name], gradients[name])
        rest = _without_state(values)
        if rest:
            self._inner.update(rest, gradients, slots, step)

    def initialise(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        if isinstance(self._inner, InitialisingUpdater):
            self._inner.initialise(_without_state(values), slots)

    def finalize(self, values: Arrays, slots: Mapping[str, Arrays]) -> None:
        if isinstance(self._inner, FinalizingUpdater):
            self._inner.finalize(_without_state(values), slots)

    def update_rows(self, values: NDArray[Any], gradients: NDArray[Any], slots: Arrays, step: int) -> None:
        raise NotImplementedError("Rows of tables have updaters of their own.")
