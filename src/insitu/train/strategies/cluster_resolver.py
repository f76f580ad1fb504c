"""Tell a script which tasks there are, and which it is, as `tf.distribute.cluster_resolver` does.

A job's tasks are in TF_CONFIG, which `insitu start` sets, or a user by hand.

Example:
    >>> workers = insitu.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> resolver = insitu.cluster_resolver.SimpleClusterResolver(workers)
    >>> resolver.master("worker", 1)
    'b:2222'
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from insitu.base.context import TF_CONFIG_ENV, Context
from insitu.base.errors import InputError, TrainingError
from insitu.base.missing_names import missing_name
from insitu.train.devices import list_devices

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
]


def __getattr__(name: str) -> Any:
    raise missing_name("insitu.cluster_resolver", name)


@dataclass(frozen=True, slots=True)
class _NamedTPU:
    #: Its name or address; empty for that of this machine.
    tpu: str


def TPUClusterResolver(tpu: str | None = None, **options: Any) -> Any:
    """Return what TPUStrategy takes. On TensorFlow that is its own resolver, with its own options, so that
    `tf.config.experimental_connect_to_cluster` and `tf.tpu.experimental.initialize_tpu_system` take it, too.
    Raises InputError for options elsewhere."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu, **options)
    if options:
        raise InputError(
            f"The TPU of {keras.backend.backend()} is that of its own machine. Received: "
            f"{', '.join(options)}. Leave them out"
        )
    return _NamedTPU(tpu or "")


class ClusterSpec:
    """The addresses of tasks by role, as `tf.train.ClusterSpec`, which replaces it if TensorFlow is
    loaded."""

    def __init__(self, cluster: Mapping[str, Sequence[str]]) -> None:
        self._cluster = {role: list(addresses) for role, addresses in cluster.items()}

    def __bool__(self) -> bool:
        return bool(self._cluster)

    def __eq__(self, other: object) -> bool:
        return hasattr(other, "as_dict") and other.as_dict() == self._cluster

    __hash__ = None  # type: ignore[assignment]

    @property
    def jobs(self) -> list[str]:
        """The roles."""
        return list(self._cluster)

    def as_dict(self) -> dict[str, list[str]]:
        """Return the addresses of each role's tasks."""
        return {role: list(addresses) for role, addresses in self._cluster.items()}

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of a role's tasks. Raises InputError for a role that isn't there."""
        if job_name not in self._cluster:
            raise InputError(f"A role is one of {', '.join(self._cluster) or 'none'}. Received: {job_name!r}")
        return list(self._cluster[job_name])

    def num_tasks(self, job_name: str) -> int:
        """Return the number of a role's tasks."""
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a role's tasks."""
        return list(range(self.num_tasks(job_name)))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task."""
        return self.job_tasks(job_name)[task_index]


def make_cluster_spec(cluster: Mapping[str, Sequence[str]]) -> Any:
    """Return TensorFlow's ClusterSpec if TensorFlow is loaded, which its functions take; else insitu's."""
    tensorflow = sys.modules.get("tensorflow")
    return ClusterSpec(cluster) if tensorflow is None else tensorflow.train.ClusterSpec(dict(cluster))


class ClusterResolver:
    """Knows the tasks of a job, and which one this process is."""

    #: The role of this task; None outside a job.
    task_type: str | None
    #: The number of this task among those of its role; None outside a job.
    task_id: int | None
    #: How addresses are spoken to.
    rpc_layer: str | None
    #: Place where the job runs, as the script has said it.
    environment: str | None

    def cluster_spec(self) -> Any:
        """Return the addresses of all tasks."""
        raise NotImplementedError

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this one; empty if there is only one."""
        role = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        cluster = self.cluster_spec()
        tasks = [address for addresses in cluster.as_dict().values() for address in addresses]
        if len(tasks) <= 1 or role is None or index is None:
            return ""
        layer = rpc_layer or self.rpc_layer
        address: str = cluster.task_address(role, index)
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        """Return the number of this process' accelerators by kind, such as `{"GPU": 2}`."""
        del task_type, task_id, config_proto
        kinds = [device.kind.upper() for device in list_devices() if device.kind != "cpu"]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG, each time that it is asked."""

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment = environment

    def _read(self, name: str) -> Any:
        return json.loads(os.environ.get(TF_CONFIG_ENV) or "{}").get(name)

    @property
    def task_type(self) -> str | None:
        given = (self._read("task") or {}).get("type") if self._task_type is None else self._task_type
        return None if given is None else str(given)

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._task_type = value

    @property
    def task_id(self) -> int | None:
        given = (self._read("task") or {}).get("index") if self._task_id is None else self._task_id
        return None if given is None else int(given)

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._task_id = value

    @property
    def rpc_layer(self) -> str | None:
        return self._read("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._rpc_layer = value

    @property
    def environment(self) -> str | None:  # type: ignore[override]
        return self._environment

    def cluster_spec(self) -> Any:
        """Return the addresses of all tasks; none outside a job."""
        return make_cluster_spec(self._read("cluster") or {})


class SimpleClusterResolver(ClusterResolver):
    """Says what it was given."""

    def __init__(
        self,
        cluster_spec: Any,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not hasattr(cluster_spec, "as_dict"):
            raise InputError(
                "cluster_spec is a ClusterSpec, such as tf.train.ClusterSpec({'worker': ['host:port']}). "
                f"Received: {cluster_spec!r}"
            )
        self._cluster_spec, self._master, self._accelerators = cluster_spec, master, num_accelerators
        self.task_type, self.task_id = task_type, task_id
        self.environment, self.rpc_layer = environment, rpc_layer

    def cluster_spec(self) -> Any:
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the task that is asked for, else the master that was given."""
        if task_type is None or task_id is None:
            return self._master
        return super().master(task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> dict[str, int]:
        if self._accelerators is not None:
            return self._accelerators
        return super().num_accelerators(task_type, task_id, config_proto)


def check_cluster(resolver: Any, context: Context) -> None:
    """Raise InputError for an argument that is no resolver, and TrainingError for one that describes other
    workers than there are."""
    if resolver is None:
        return
    described = _read_addresses(resolver, instead="communication='ring'")
    workers = len(described.get("chief", ())) + len(described.get("worker", ()))
    if workers != len(context.workers) and max(workers, len(context.workers)) > 1:
        raise TrainingError(
            f"A strategy runs on the tasks of its job. Received: a cluster_resolver that describes {workers} "
            f"workers, in a process of {max(1, len(context.workers))}. Leave it out and use `insitu start "
            "--workers`, or set TF_CONFIG in each process and pass TFConfigClusterResolver()."
        )


def check_server_cluster(resolver: Any, context: Context) -> None:
    """Raise InputError for an argument that is no resolver, and TrainingError for one that describes other
    workers or ps tasks than the job has.

    Outside a job a resolver may describe servers that the script has started itself, in its own process. They
    aren't needed: the process is the only worker, and its server a thread of it.
    """
    if resolver is None:
        return
    described = _read_addresses(resolver, instead="mode='sync'")
    if not (context.job_id or context.workers):
        return
    workers, servers = len(described.get("worker", ())), len(described.get("ps", ()))
    own = len(context.workers), len(context.servers)
    if (workers, servers) != own:
        raise TrainingError(
            f"A strategy runs on the job's tasks: {own[0]} workers and {own[1]} ps tasks. Received: a "
            f"cluster_resolver that describes {workers} workers and {servers} ps tasks. Leave it "
            "out, or pass TFConfigClusterResolver(), which reads the job's TF_CONFIG."
        )


def _read_addresses(resolver: Any, instead: str) -> dict[str, Sequence[str]]:
    """Return the addresses by role that `resolver` describes. Raises InputError for something else, which may
    have been meant as the argument `instead`."""
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise InputError(
            "cluster_resolver is an object with the method cluster_spec(), such as "
            f"TFConfigClusterResolver(). Received: {resolver!r}. Leave it out, or name the argument that you "
            f"mean, such as {instead}."
        )
    spec = resolver.cluster_spec()
    return dict(spec.as_dict() if hasattr(spec, "as_dict") else spec or {})
