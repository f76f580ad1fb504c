"""Serves the numbers of jobs for Prometheus, from the files of the jobs."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from insitu.base.errors import ClusterError, InputError

if TYPE_CHECKING:
    from insitu.base.measure.task_samples import Sample
    from insitu.base.paths import JobPaths

_OF_TASK = ("job", "task", "node")
_FAMILIES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "task_steps": ("counter", "Steps that the present process of a task has done.", _OF_TASK),
    "task_rows": ("counter", "Rows that the present process of a task has fed to the model.", _OF_TASK),
    "task_cpu_seconds": ("counter", "Processor time that this process has used.", _OF_TASK),
    "task_activity_seconds": ("counter", "Seconds of this process, by activity.", (*_OF_TASK, "activity")),
    "task_memory_bytes": ("gauge", "Physical memory of a task.", _OF_TASK),
    "task_alive": ("gauge", "1 while the process of a task runs.", _OF_TASK),
    "task_gpu_utilization": ("gauge", "Share of the time that a GPU is busy.", (*_OF_TASK, "gpu")),
    "task_gpu_memory_bytes": ("gauge", "Memory of a GPU in use.", (*_OF_TASK, "gpu")),
    "job_updates": ("gauge", "Updates that the model has had.", ("job",)),
    "job_metric": ("gauge", "The logs of the training, as Keras shows them.", ("job", "metric")),
}
"""By name, which `insitu_` goes before: the kind, a description, and the names of the labels."""


class MetricsServer:
    """A server that runs in a thread."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_port)

    def wait(self) -> None:
        """Wait until the user interrupts."""
        self._thread.join()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(find_jobs: Callable[[], Iterable[JobPaths]], host: str, port: int) -> MetricsServer:
    """Serve `/metrics` on an address. Raises InputError without the library, or a free port."""
    try:
        prometheus = importlib.import_module("prometheus_client")
    except ImportError:
        raise InputError(
            "--metrics-port needs the library prometheus-client. Received: an environment without it. "
            "Install it: pip install 'insitu[metrics]'"
        ) from None
    registry = prometheus.CollectorRegistry()
    registry.register(JobCollector(find_jobs))
    try:
        return MetricsServer(*prometheus.start_http_server(port, addr=host, registry=registry))
    except OSError as error:
        raise InputError(
            f"--metrics-port is a port that is free on {host}. Received: {port}: {error.strerror}. Choose "
            "another; 0 means any free one"
        ) from None


class JobCollector:
    """Reads the numbers of jobs whenever they are asked for. Labels are names of jobs, tasks and metrics."""

    def __init__(self, find_jobs: Callable[[], Iterable[JobPaths]]) -> None:
        self._find_jobs = find_jobs

    def describe(self) -> list[Any]:
        """Return nothing: what there is depends on the jobs."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the families of metrics."""
        families = _make_families(importlib.import_module("prometheus_client.core"))
        for job in self._find_jobs():
            # A job whose folder has gone meanwhile is left out.
            with contextlib.suppress(ClusterError, OSError):
                _add_job(families, job)
        yield from families.values()


def _make_families(core: Any) -> dict[str, Any]:
    """Return the families of metrics, by name, which hold nothing yet."""
    return {
        name: (core.CounterMetricFamily if kind == "counter" else core.GaugeMetricFamily)(
            f"insitu_{name}", text, labels=labels
        )
        for name, (kind, text, labels) in _FAMILIES.items()
    }


def _add_job(families: dict[str, Any], job: JobPaths) -> None:
    """Add what the tasks of a job have measured last. Raises ClusterError if its folder can't be read."""
    from insitu.base.measure.task_samples import read_last_samples
    from insitu.cluster import find_newest, read_status

    status, name = read_status(job), job.root.name
    known: list[Sample] = []
    for state in status.state.tasks:
        labels = [name, str(state.task), state.node or ""]
        families["task_alive"].add_metric(labels, float(state.alive and status.running))
        samples = read_last_samples(job.samples(state.task))
        if not samples:
            continue
        last = samples[-1]
        known += samples
        families["task_steps"].add_metric(labels, last.steps)
        families["task_rows"].add_metric(labels, last.rows)
        families["task_cpu_seconds"].add_metric(labels, last.cpu)
        families["task_memory_bytes"].add_metric(labels, last.memory)
        for activity, value in last.seconds.items():
            families["task_activity_seconds"].add_metric([*labels, activity], value)
        for gpu in last.gpus:
            number = str(gpu["index"])
            families["task_gpu_utilization"].add_metric([*labels, number], gpu["utilization"])
            families["task_gpu_memory_bytes"].add_metric([*labels, number], gpu["memory"])
    newest = find_newest(known)
    if newest is not None:
        families["job_updates"].add_metric([name], newest.updates or 0)
        for metric, value in newest.metrics.items():
            families["job_metric"].add_metric([name, metric], value)
