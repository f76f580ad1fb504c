"""The step on a mesh: one compiled program does gradient, mean, update and metrics on all devices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from insitu.base.errors import PeerLost, TrainingError
from insitu.exchange import Group
from insitu.train.backends.jax.replica import unpack_step
from insitu.train.backends.jax.spmd.distributed import skip_shutdown
from insitu.train.backends.jax.spmd.mesh_sharding import DATA_AXIS, MeshSharding
from insitu.train.backends.jax.spmd.variables import METRICS, OTHERS, TRAINABLE, get_mesh_variables
from insitu.train.collectives import squeeze_shards
from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit import check_same_data
from insitu.train.replica import Logs, ShardBatch, check_global, flatten_batch, pack_batch

if TYPE_CHECKING:
    from insitu.train.elastic import Membership
    from insitu.train.fit import StepExecutor


Leaves = list[Any]
TraceScope = Callable[[], contextlib.AbstractContextManager[Any]]


class MeshStep:
    """A `StepExecutor` on a mesh of JAX devices, of one process or of all tasks.

    The model's own `train_step` is compiled as it is, over the global batch, so that nothing has to be
    combined by hand. Variables keep their sharding over the mesh; others are copied to every device. XLA
    moves what has to be moved. Old values are donated to the program.

    Each number of rows is a program of its own, as for Keras on JAX.
    """

    def __init__(
        self,
        model: Any,
        example: Any,
        mesh_sharding: MeshSharding,
        membership: Membership,
        trace_scope: TraceScope = contextlib.nullcontext,
    ) -> None:
        """`trace_scope` is opened whenever the model is traced."""
        check_global(model, membership.num_shards)
        self._model = model
        self._structure = example
        self._mesh_sharding = mesh_sharding
        self._trace_scope = trace_scope
        self._rows = _RowCounts(mesh_sharding, membership)
        self._state = get_mesh_variables(model, mesh_sharding)
        self._compiled = bool(not model.run_eagerly and model.jit_compile)
        if mesh_sharding.spans_processes and not self._compiled:
            raise TrainingError(
                "One program over several tasks must be compiled. Received: "
                f"run_eagerly={model.run_eagerly}, jit_compile={model.jit_compile}. Leave them out of "
                "compile(), or use communication='ring'."
            )
        self._unfinished: Any = None
        #: Rows of all tasks that were trained on.
        self.rows_done = 0
        self._make_functions()

    def _make_functions(self) -> None:
        everywhere, shardings = self._mesh_sharding.replicated, self._state.shardings
        state = tuple(shardings)
        # In one process the caller gathers outputs anyway; of several each needs them whole.
        outputs = everywhere if self._mesh_sharding.spans_processes else None
        self._train = self._compile(self._trace_train, (everywhere, state), donate=(0,))
        tested = (shardings[OTHERS], shardings[METRICS])
        self._test = self._compile(self._trace_test, (everywhere, tested), donate=(1, 2))
        self._predict = self._compile(self._trace_predict, (outputs, shardings[OTHERS]))

    def _compile(
        self, trace: Callable[..., Any], shardings: Any, donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        if not self._compiled:
            return trace
        plan = trace.__code__.co_argcount - 2  # the last argument, `self` left out
        compiled: Callable[..., Any] = jax.jit(
            trace, static_argnums=plan, out_shardings=shardings, donate_argnums=donate
        )
        return compiled

    # Step

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        report("exchange")
        plan = self._rows.plan(parts)
        if not plan.rows:
            raise TrainingError(
                "A step needs at least one row over all shards. Received: 0 rows. Leave out empty batches."
            )
        leaves = self._shard_batch(parts, plan)
        state = tuple(self._state.take(group) for group in range(4))
        report("step")
        self.rows_done += plan.rows
        with self._rows.report_lost_peers():
            self._await_previous_step()
            logs, state = self._train(state, leaves, plan)
            self._unfinished = logs
        for group, values in enumerate(state):
            self._state.put(group, values)
        return self._to_local(logs)

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        plan = self._rows.plan(parts)
        if not plan.rows:
            return {}
        leaves, take = self._shard_batch(parts, plan), self._state.take
        with self._rows.report_lost_peers():
            self._await_previous_step()
            logs, (others, metrics) = self._test(take(TRAINABLE), take(OTHERS), take(METRICS), leaves, plan)
            self._unfinished = logs
        self._state.put(OTHERS, others)
        self._state.put(METRICS, metrics)
        return self._to_local(logs)

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        del example  # only a task without rows needs it, and here none is
        plan = self._rows.plan(parts)
        leaves, take = self._shard_batch(parts, plan), self._state.take
        with self._rows.report_lost_peers():
            outputs, others = self._predict(take(TRAINABLE), take(OTHERS), leaves, plan)
            predicted = keras.tree.map_structure(np.asarray, outputs)
        # Seed generators draw other numbers for the next batch.
        self._state.put(OTHERS, others)
        return predicted

    def example_output(self, data: Any) -> Any:
        """Return zeros of the shapes and dtypes of the output for `data`."""
        plan = RowPlan(1, ((0, 1),), 1)
        leaves = [jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in _arrays(data)]
        shapes = jax.eval_shape(
            lambda trainable, others, rows: self._trace_predict(trainable, others, rows, plan)[0],
            self._state.take(TRAINABLE),
            self._state.take(OTHERS),
            leaves,
        )
        return keras.tree.map_structure(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    # Helpers

    def _shard_batch(self, parts: Sequence[ShardBatch], plan: RowPlan) -> Leaves:
        given = [_arrays(part.data) for part in parts if part.rows]
        if given:
            leaves = (
                given[0]
                if len(given) == 1
                else [np.concatenate(pieces) for pieces in zip(*given, strict=True)]
            )
        else:
            leaves = [leaf[:0] for leaf in _arrays(self._structure)]
        return [self._mesh_sharding.shard_rows(leaf, plan.length, plan.total) for leaf in leaves]

    def _await_previous_step(self) -> None:
        """Wait for the step before, so that a lost peer is noticed at most one step later. In one process no
        peer can be lost, and steps may run ahead."""
        if self._mesh_sharding.spans_processes:
            jax.block_until_ready(self._unfinished)

    def _to_local(self, logs: Any) -> Logs:
        """Return the logs of this process. Scalars stay on the device until they are read, as in Keras on
        JAX."""
        return {name: self._mesh_sharding.view(value) for name, value in logs.items()}

    # Traced functions

    def _batch(self, leaves: Leaves, plan: RowPlan) -> Any:
        if not plan.whole:
            leaves = [self._drop_padding(leaf, plan) for leaf in leaves]
        return pack_batch(self._structure, leaves)

    def _drop_padding(self, leaf: Any, plan: RowPlan) -> Any:
        pieces = [leaf[start:stop] for start, stop in plan.pieces]
        rows = pieces[0] if len(pieces) == 1 else jax.numpy.concatenate(pieces)
        # Shard the rows again. The number of rows may not divide: XLA's partitioner pads on its own.
        return (
            jax.lax.with_sharding_constraint(rows, self._mesh_sharding.batch_sharding)
            if self._compiled
            else rows
        )

    def _trace_train(self, state: Any, leaves: Leaves, plan: RowPlan) -> Any:
        with self._trace_scope():
            return unpack_step(self._model.train_step(state, self._batch(leaves, plan)), 4)

    def _trace_test(
        self, trainable: Leaves, others: Leaves, metrics: Leaves, leaves: Leaves, plan: RowPlan
    ) -> Any:
        with self._trace_scope():
            state = (trainable, others, metrics)
            logs, (_, others, metrics) = unpack_step(
                self._model.test_step(state, self._batch(leaves, plan)), 3
            )
        return logs, (others, metrics)

    def _trace_predict(self, trainable: Leaves, others: Leaves, leaves: Leaves, plan: RowPlan) -> Any:
        with self._trace_scope():
            outputs, others = self._model.predict_step((trainable, others), self._batch(leaves, plan))
        return outputs, others


class _RowCounts:
    """The number of rows of each shard in a step, agreed on by all tasks before any enters the program."""

    def __init__(self, mesh_sharding: MeshSharding, membership: Membership) -> None:
        self._mesh_sharding = mesh_sharding
        self._alone = len(membership.context.workers) <= 1
        if self._alone == mesh_sharding.spans_processes:
            raise TrainingError(
                "A mesh must cover the devices of all tasks of the job. Received: "
                f"{max(1, len(membership.context.workers))} tasks, and devices of {jax.process_count()} "
                "processes. Make the strategy with communication='xla', right after the imports."
            )
        self._shards = membership.context.shards
        if self._alone:
            self._hosts: tuple[tuple[int, ...], ...] = (tuple(range(len(self._shards))),)
            return
        self._group: Group = membership.group()
        own = np.full(membership.num_shards, -1, np.int64)
        own[list(self._shards)] = membership.context.index
        all_hosts = self._group.all_gather(squeeze_shards(np.tile(own, (len(self._shards), 1))))
        host_of = all_hosts.max(axis=0).tolist()
        self._hosts = tuple(
            tuple(shard for shard, host in enumerate(host_of) if host == task)
            for task in range(len(membership.context.workers))
        )

    def plan(self, parts: Sequence[ShardBatch]) -> RowPlan:
        """Agree on the rows of a step. Raises PeerLost."""
        if self._alone:
            counts = [part.rows for part in parts]
        else:
            own = np.array([[part.rows, part.fingerprint] for part in parts], np.int64)
            with self.report_lost_peers():
                gathered = self._group.all_gather(squeeze_shards(own))
            counts = gathered[:, 0].tolist()
            check_same_data(gathered[:, 1].tolist(), "this step")
        return plan_rows(counts, self._hosts, self._mesh_sharding.local_rows)

    def report_lost_peers(self) -> contextlib.AbstractContextManager[None]:
        """See `report_lost_peers`."""
        return report_lost_peers(None if self._alone else self._group)


def _arrays(data: Any) -> Leaves:
    """Return the leaves of a batch in dtypes that JAX has."""
    leaves = [np.asarray(leaf) for leaf in flatten_batch(data)]
    return [leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False) for leaf in leaves]


# Plan the places of a step's rows in the global arrays of a mesh. Pure.
#
# Each process contributes as many rows to a global array, so short parts are padded with rows of zeros. The
# program cuts them off again before it computes anything, so that no row but the batch's ever counts


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows of a global batch in the global arrays. Equal plans are the same program."""

    length: int
    """Rows that each process contributes: a multiple of its devices on the data axis."""
    pieces: tuple[tuple[int, int], ...]
    """Half-open intervals of the global array that hold rows, in shard order, neighbours joined."""
    total: int
    """All rows of the global array."""

    @property
    def rows(self) -> int:
        """The rows of the batch."""
        return sum(stop - start for start, stop in self.pieces)

    @property
    def whole(self) -> bool:
        """No row of the global array is filled up, and all are in order."""
        return self.pieces == ((0, self.total),)


def plan_rows(counts: Sequence[int], hosts: Sequence[Sequence[int]], devices: int) -> RowPlan:
    """Return the plan for shards with `counts` rows each. `hosts[p]` are the shards of process p, whose rows
    follow each other in that order; `devices` is the number of one process' devices on the data axis."""
    longest = max(sum(counts[shard] for shard in shards) for shards in hosts)
    length = -(-longest // devices) * devices
    intervals = {}
    for process, shards in enumerate(hosts):
        start = process * length
        for shard in shards:
            intervals[shard] = (start, start + counts[shard])
            start += counts[shard]
    pieces: list[tuple[int, int]] = []
    for shard in sorted(intervals):
        start, stop = intervals[shard]
        if start == stop:
            continue
        if pieces and pieces[-1][1] == start:
            pieces[-1] = (pieces[-1][0], stop)
        else:
            pieces.append((start, stop))
    return RowPlan(length, tuple(pieces), length * len(hosts))


# Name the lost task if a collective of XLA only says that it failed


_COLLECTIVE_FAILED = re.compile(
    "UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION"
)
"""How XLA's account of a collective that could not be done begins."""


@contextlib.contextmanager
def report_lost_peers(group: Group | None) -> Iterator[None]:
    """Raise PeerLost, with the name of the lost task, if a collective of XLA fails inside. `group`, that
    of all tasks, knows the name; None for a single task."""
    try:
        yield
    except PeerLost:
        skip_shutdown()
        raise
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if group is None or not _COLLECTIVE_FAILED.match(str(error)):
            raise
        skip_shutdown()
        group.barrier()
        raise


# Make the step of a model that is one program over a mesh of JAX devices


def make_mesh_step(model: Any, example: Any, devices: Sequence[Any], membership: Membership) -> StepExecutor:
    """Return the step of `model`, built and compiled, as one program over `devices`.

    `devices` are `jax.Device`s: all of this process or, after `jax.distributed` has been set up, of all
    tasks, each with the same number. Each device has a copy of the variables, the rows of the global batch
    are sharded, and XLA inserts the collectives.

    The results are those of one device for the same global batch, but for rounding (about 1e-5 relative):
    BatchNorm sees the global batch, Dropout draws the same mask, a loss is the mean over the global batch.
    The number of rows is free; each row counts once, with the same weight.

    Raises TrainingError if the job has several tasks and the devices are of one.
    """
    return MeshStep(model, example, MeshSharding.from_devices(np.array(devices), (DATA_AXIS,)), membership)


# Switch `keras.distribution` off for a while


@contextlib.contextmanager
def without_distribution() -> Iterator[None]:
    """While open, no `keras.distribution` is set: Keras would shard batches too. Also a decorator."""
    outer = keras.distribution.distribution()
    keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        keras.distribution.set_distribution(outer)
