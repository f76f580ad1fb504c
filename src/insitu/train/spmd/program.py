"""The step of a mesh: one compiled program does gradient, mean, update and metrics on all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np

from insitu.errors import TrainingError
from insitu.exchange import Group
from insitu.train.collectives import by_shard
from insitu.train.elastic import Membership
from insitu.train.replica import Logs, Part
from insitu.train.replica.jax import unpack_step
from insitu.train.spmd.layout import MeshLayout
from insitu.train.spmd.lost_peers import naming_lost_peers
from insitu.train.spmd.rows import RowPlan, plan_rows
from insitu.train.spmd.variables import METRICS, OTHERS, TRAINABLE, variables_over

Leaves = list[Any]
Tracing = Callable[[], contextlib.AbstractContextManager[Any]]


class MeshStep:
    """A `StepExecutor` on a mesh of JAX devices, of one process or of all tasks.

    The model's own `train_step` is compiled as it is, over the global batch: whatever it does, it does to all
    rows, so that nothing has to be combined by hand. Variables keep their layout over the mesh, or else are
    copied to every device; XLA moves what has to be moved. Old values are given away to the program.

    Each number of rows is a program of its own, as for Keras on JAX.
    """

    def __init__(
        self,
        model: Any,
        example: Any,
        layout: MeshLayout,
        membership: Membership,
        tracing: Tracing = contextlib.nullcontext,
    ) -> None:
        """`tracing` is open while the model is traced."""
        self._model = model
        self._structure = example
        self._layout = layout
        self._tracing = tracing
        self._rows = _RowCounts(layout, membership)
        self._state = variables_over(model, layout)
        self._compiled = bool(not model.run_eagerly and model.jit_compile)
        if layout.spans_processes and not self._compiled:
            raise TrainingError(
                "One program over several tasks has to be compiled. Received: a model with run_eagerly=True "
                "or jit_compile=False. Leave them out, or use communication='ring'."
            )
        self._unfinished: Any = None
        self._make_functions()

    def _make_functions(self) -> None:
        everywhere, shardings = self._layout.replicated, self._state.shardings
        state = tuple(shardings)
        # With one process the caller gathers outputs anyway; with several each must have them whole.
        outputs = everywhere if self._layout.spans_processes else None
        self._train = self._compile(self._trace_train, (everywhere, state), donate=(0,))
        tested = (shardings[OTHERS], shardings[METRICS])
        self._test = self._compile(self._trace_test, (everywhere, tested), donate=(1, 2))
        self._predict = self._compile(self._trace_predict, outputs)

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

    def train(self, parts: Sequence[Part], at: Callable[[str], None]) -> Logs:
        at("exchange")
        plan = self._rows.plan(parts)
        if not plan.rows:
            raise TrainingError("A step must have at least one row over all shards. Received: none.")
        leaves = self._spread(parts, plan)
        state = tuple(self._state.take(group) for group in range(4))
        at("step")
        with self._rows.lost_peers_named():
            self._finish()
            logs, state = self._train(state, leaves, plan)
            self._unfinished = logs
        for group, values in enumerate(state):
            self._state.put(group, values)
        return self._own(logs)

    def test(self, parts: Sequence[Part]) -> Logs:
        plan = self._rows.plan(parts)
        if not plan.rows:
            return {}
        leaves, take = self._spread(parts, plan), self._state.take
        with self._rows.lost_peers_named():
            self._finish()
            logs, (others, metrics) = self._test(take(TRAINABLE), take(OTHERS), take(METRICS), leaves, plan)
            self._unfinished = logs
        self._state.put(OTHERS, others)
        self._state.put(METRICS, metrics)
        return self._own(logs)

    def predict(self, parts: Sequence[Part], example: Any) -> Any:
        del example  # only a task without rows needs it, and here none is
        plan = self._rows.plan(parts)
        leaves, take = self._spread(parts, plan), self._state.take
        with self._rows.lost_peers_named():
            outputs = self._predict(take(TRAINABLE), take(OTHERS), leaves, plan)
            return keras.tree.map_structure(np.asarray, outputs)

    def example_output(self, data: Any) -> Any:
        """Zeros of the shapes and dtypes of the output for `data`."""
        plan = RowPlan(1, ((0, 1),), 1)
        leaves = [jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in _arrays(data)]
        shapes = jax.eval_shape(
            lambda trainable, others, rows: self._trace_predict(trainable, others, rows, plan),
            self._state.take(TRAINABLE),
            self._state.take(OTHERS),
            leaves,
        )
        return keras.tree.map_structure(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)

    # Parts of it

    def _spread(self, parts: Sequence[Part], plan: RowPlan) -> Leaves:
        given = [_arrays(part.data) for part in parts if part.rows]
        if given:
            leaves = (
                given[0]
                if len(given) == 1
                else [np.concatenate(pieces) for pieces in zip(*given, strict=True)]
            )
        else:
            leaves = [leaf[:0] for leaf in _arrays(self._structure)]
        return [self._layout.spread(leaf, plan.length, plan.total) for leaf in leaves]

    def _finish(self) -> None:
        """Waits for the step before, so that a lost peer is noticed not later than one step after. On one
        process nobody can be lost, and steps may run ahead."""
        if self._layout.spans_processes:
            jax.block_until_ready(self._unfinished)

    def _own(self, logs: Any) -> Logs:
        """Scalars stay on the device until somebody reads them, as Keras has it on JAX."""
        return {name: self._layout.view(value) for name, value in logs.items()}

    # What is traced

    def _batch(self, leaves: Leaves, plan: RowPlan) -> Any:
        if not plan.whole:
            leaves = [self._cut(leaf, plan) for leaf in leaves]
        return keras.tree.pack_sequence_as(self._structure, leaves)

    def _cut(self, leaf: Any, plan: RowPlan) -> Any:
        pieces = [leaf[start:stop] for start, stop in plan.pieces]
        rows = pieces[0] if len(pieces) == 1 else jax.numpy.concatenate(pieces)
        # Spread again, though unevenly: the partitioner keeps account of the filling in its own.
        return jax.lax.with_sharding_constraint(rows, self._layout.by_rows) if self._compiled else rows

    def _trace_train(self, state: Any, leaves: Leaves, plan: RowPlan) -> Any:
        with self._tracing():
            return unpack_step(self._model.train_step(state, self._batch(leaves, plan)), 4)

    def _trace_test(
        self, trainable: Leaves, others: Leaves, metrics: Leaves, leaves: Leaves, plan: RowPlan
    ) -> Any:
        with self._tracing():
            state = (trainable, others, metrics)
            logs, (_, others, metrics) = unpack_step(
                self._model.test_step(state, self._batch(leaves, plan)), 3
            )
        return logs, (others, metrics)

    def _trace_predict(self, trainable: Leaves, others: Leaves, leaves: Leaves, plan: RowPlan) -> Any:
        with self._tracing():
            outputs, _ = self._model.predict_step((trainable, others), self._batch(leaves, plan))
        return outputs


class _RowCounts:
    """How many rows each shard has in a step, agreed on by all tasks before any enters the program."""

    def __init__(self, layout: MeshLayout, membership: Membership) -> None:
        self._layout = layout
        self._alone = len(membership.context.workers) <= 1
        if self._alone == layout.spans_processes:
            raise TrainingError(
                "A job of several tasks needs a mesh over the devices of all, and a single process one over "
                f"its own. Received: {max(1, len(membership.context.workers))} tasks and devices of "
                f"{jax.process_count()}."
            )
        self._shards = membership.context.shards
        if self._alone:
            self._hosts: tuple[tuple[int, ...], ...] = (tuple(range(len(self._shards))),)
            return
        self._group: Group = membership.group()
        mine = np.full(membership.num_shards, -1, np.int64)
        mine[list(self._shards)] = membership.context.index
        everyones = self._group.all_gather(by_shard(np.tile(mine, (len(self._shards), 1))))
        host_of = everyones.max(axis=0).tolist()
        self._hosts = tuple(
            tuple(shard for shard, host in enumerate(host_of) if host == task)
            for task in range(len(membership.context.workers))
        )

    def plan(self, parts: Sequence[Part]) -> RowPlan:
        """Raises PeerLost."""
        own = np.array([[part.rows] for part in parts], np.int64)
        with self.lost_peers_named():
            counts = own if self._alone else self._group.all_gather(by_shard(own))
        return plan_rows(counts.reshape(-1).tolist(), self._hosts, self._layout.local_rows)

    def lost_peers_named(self) -> contextlib.AbstractContextManager[None]:
        """See `naming_lost_peers`."""
        return naming_lost_peers(None if self._alone else self._group)


def _arrays(data: Any) -> Leaves:
    """The leaves of a batch in dtypes that JAX has."""
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(data)]
    return [leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False) for leaf in leaves]
