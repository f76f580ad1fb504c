"""Train synchronously with many workers, each with a copy of the model."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.base.net.unauthenticated import find_open
from insitu.train.backends import active_backend, active_name, load_backend
from insitu.train.custom_loop import LoopStep, StepModel
from insitu.train.elastic import CHECK_EVERY
from insitu.train.fit import StepExecutor
from insitu.train.replica import broadcast_state, read_state
from insitu.train.strategies.cluster_resolver import TFConfigClusterResolver, check_cluster
from insitu.train.strategies.communication import (
    CommunicationOptions,
    choose_communication,
    publish_choice,
    tell,
)
from insitu.train.strategies.synchronous import SynchronousStrategy

Communication = Literal["auto", "ring", "xla"]


class MultiWorkerMirroredStrategy(SynchronousStrategy):
    """One replica for each shard; a step's gradient is the mean over all rows of the global batch.

    With `"ring"`, the two-phase step: a compiled function gives the gradients, the exchange combines them in
    shard order, a compiled function applies them. With the same seed, number of shards and backend threads
    the weights are the same bits on one process and on many.

    With `"xla"`, on JAX, one program over the devices of all workers, with XLA's own collectives: gloo
    between CPUs, NCCL between GPUs. It computes what one device would for the global batch (BatchNorm over
    all of its rows, one Dropout mask), so it agrees with one device to rounding; `"ring"` treats each shard
    as a batch of its own. Make the strategy before JAX computes anything. A lost worker restarts all.

    In a plain process, outside a job, it trains on all partitions.

    Args:
        cluster_resolver: as scripts for `tf.distribute` pass it: a resolver that describes this job's
            workers, or the cluster of TF_CONFIG. The tasks are those in any case.
        communication_options: an `insitu.experimental.CommunicationOptions`: its implementation in place of
            `communication` (NCCL is `"xla"` on JAX with GPUs, elsewhere `"ring"`, which a line on stderr
            says), its `timeout_seconds` in place of the job's stall timeout.
        communication: `"auto"` takes `"xla"` on JAX with accelerators and several workers, unless they are on
            several hosts and `--allow-unauthenticated` wasn't given. Otherwise it takes `"ring"`, which is
            faster between CPUs. It prints its choice on stderr.
        compression: `"bfloat16"` halves gradients' bytes on the wire between hosts, with error feedback
            (`insitu.exchange.compression`); within one host nothing is compressed. Weights stay the same in
            each task, but are no longer the bits of one process, nor of a run without a failure. For
            `"ring"`.
        check_every: steps of `fit` after which it is checked, by hashes, that all replicas are equal;
            training stops with `insitu.errors.Diverged` if they aren't. With `"ring"` only.
        context: who this process is; read from the environment by default.

    Raises:
        TrainingError: for an unknown communication or compression, one that the backend doesn't have, or a
            task that isn't a worker.

    Example:
        >>> strategy = insitu.MultiWorkerMirroredStrategy()
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communication: Any = "auto",
        compression: Literal["bfloat16"] | None = None,
        check_every: int = CHECK_EVERY,
        context: Context | None = None,
    ) -> None:
        if not isinstance(check_every, int) or check_every < 1:
            raise TrainingError(f"check_every is a number of steps above 0. Received: {check_every!r}")
        backend, context = active_name(), context or read_context()
        if isinstance(cluster_resolver, str):  # communication was the first argument before
            cluster_resolver, communication = None, cluster_resolver
        if isinstance(cluster_resolver, enum.Enum):  # as TensorFlow's old strategy takes it by place
            cluster_resolver, communication = None, cluster_resolver
        check_cluster(cluster_resolver, context)
        context = context.for_strategy()
        if isinstance(communication, enum.Enum):  # as scripts for TensorFlow's old strategy pass it
            chosen: Any = communication
            communication_options, communication = CommunicationOptions(implementation=chosen), "auto"
        if communication_options is not None:
            communication, context = _follow_options(communication_options, communication, context)
        if communication not in get_args(Communication):
            raise TrainingError(f"communication is 'auto', 'ring' or 'xla'. Received: {communication!r}")
        if communication == "xla" and active_backend().meshes is None:
            raise TrainingError(
                "communication='xla' needs the JAX backend of Keras. Received: the "
                f"{backend!r} backend. Use 'ring', or set KERAS_BACKEND=jax before keras is imported."
            )
        if compression not in (None, "bfloat16") or (compression and communication == "xla"):
            raise TrainingError(
                "compression is None or 'bfloat16', the latter with the communication 'ring'. Received: "
                f"{compression!r} with {communication!r}"
            )
        if compression and communication == "auto":
            communication = "ring"
        super().__init__(compression=compression or "none", context=context)
        self._membership.check_every = check_every
        several = len(self._membership.context.workers) > 1
        if communication == "auto":
            communication, why = _choose(backend, self._membership.context.workers)
            if several and self._membership.context.is_chief:
                sys.stderr.write(f"[insitu] communication: {communication} ({why})\n")
        self.communication: str = communication
        """The chosen one: `ring` or `xla`."""
        publish_choice(self._membership.context, type(self).__name__, communication)
        if communication == "xla" and several:
            active_backend().meshes.connect(self._membership)

    @property
    def cluster_resolver(self) -> TFConfigClusterResolver:
        """The workers, and which of them this is, as TF_CONFIG says."""
        return TFConfigClusterResolver()

    @property
    def _runs_one_program(self) -> bool:
        return self.communication == "xla"

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        if not self._runs_one_program:
            return super().make_step(model, example, first=first)
        if first:
            broadcast_state(read_state(model), self._membership.group(), model)
        meshes = active_backend().meshes
        step: StepExecutor = meshes.make_mesh_step(model, example, meshes.all_devices(), self._membership)
        return step

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        context = self.membership.context
        if self.communication != "xla" or len(context.shards) != 1:
            return super().make_loop_step(model, example)
        meshes = active_backend().meshes
        over = meshes.plan_replica_axis(np.array(meshes.all_devices()), max(1, len(context.workers)))
        step: LoopStep = meshes.MeshLoopStep(model, example, over, self.membership)
        return step


def _follow_options(options: Any, communication: str, context: Context) -> tuple[Any, Context]:
    """Return the communication and the context that CommunicationOptions ask for."""
    if communication != "auto":
        raise TrainingError(
            "communication_options and communication choose the same. Received: both. Leave one out."
        )
    backend, asked = active_name(), getattr(options, "implementation", options)
    chosen, note = choose_communication(asked, backend, _sees_accelerators())
    tell(note, is_chief=context.is_chief)
    timeout = getattr(options, "timeout_seconds", None)
    return chosen, replace(context, stall_timeout=timeout) if timeout else context


def _sees_accelerators() -> bool:
    meshes = active_backend().meshes
    return meshes is not None and bool(meshes.visible_accelerators())


def _choose(backend: str, workers: Sequence[str]) -> tuple[Communication, str]:
    """Return (communication, reason) for tasks at these addresses."""
    if len(workers) <= 1:
        return "ring", "one process"
    meshes = load_backend(backend).meshes
    if meshes is None:
        return "ring", f"the {backend} backend"
    if not meshes.visible_accelerators():
        return "ring", "between CPUs it is the faster one"
    if meshes.backend_started():
        return "ring", "JAX has started already; for xla make the strategy right after the imports"
    if find_open(workers):
        return "ring", "xla has no authentication between hosts; --allow-unauthenticated takes it"
    return "xla", "JAX with accelerators"
