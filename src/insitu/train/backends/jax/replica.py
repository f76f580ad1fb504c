"""A replica on the JAX backend: pure compiled functions, between them plain arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras.src.trainers.trainer import Trainer
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.replica import (
    UPDATE_ADVICE,
    BaseReplica,
    BatchTotals,
    CombinationPlan,
    Logs,
    LossCounts,
    Operation,
    RecordLayout,
    StepBatch,
    capture_gradients,
    count_losses,
    flatten_to_numpy,
    pack_batch,
    seed_offset,
    watch_step,
)

Arrays = list[Any]
Functional = tuple[Arrays, Arrays, Arrays, Arrays]
"""A model's state as Keras' JAX trainer has it: values of the trainable, the non-trainable, the optimizer's
and the metrics' variables."""


class JaxReplica(BaseReplica):
    """See `Replica`.

    Between steps the state is in the Keras variables, where callbacks, checkpoints and users find it. Each
    batch size is compiled separately: the code for a size is the same in every process, so bits agree across
    processes.
    """

    def __init__(self, model: Any, data: Any, plan: CombinationPlan | None = None) -> None:
        refuse_distribution()
        super().__init__(model, data, plan)
        # Collected once: Keras searches all layers each time.
        self._variables = variables_of(model)
        indices = {id(v): index for index, v in enumerate(self._variables[0])}
        self._trainable_indices = [indices[id(v)] for v in self._state.trainable]
        self._seeds = {id(v) for v in self._state.seeds}
        self._sums = {id(v) for v in self._state.sums}
        combined = (*self._state.combined, *self._state.metric_combined)
        self._changes = {id(v) for v, operation in combined if operation is Operation.SUM_OF_CHANGES}
        self._train_packer = _RecordPacker(self._train_record)
        self._test_packer = _RecordPacker(self._test_record)
        self._gradient = self._compile(self._trace_gradient)
        self._counts = {
            True: self._compile(self._trace_train_counts),
            False: self._compile(self._trace_test_counts),
        }
        # The old state is donated, as in Keras' own step, so that XLA updates it in place.
        self._apply = self._compile(self._trace_apply, donate_argnums=0)
        self._load = self._compile(self._trace_load)
        self._evaluate = self._compile(self._trace_evaluate)
        self._merge = self._compile(self._trace_merge)
        self._predict = self._compile(self._trace_predict)

    def _compile(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return compile_for(self._model, function, **options)

    def _values(self) -> Any:
        return values_of(self._variables)

    # The interface of `Replica`

    def gradient(self, shard: int, data: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        self.finish_gradient(self.start_gradient(shard, data), floats, record)

    def start_gradient(self, shard: int, data: Any) -> Any:
        """Begin a gradient for `finish_gradient`. Several may be under way, on several devices."""
        self._plan.check_train()
        leaves = flatten_to_numpy(data)
        with self._noting_needs(training=True):
            outputs = self._gradient(
                self._values(), np.uint32(seed_offset(shard)), leaves, *self._totals(shard, training=True)
            )
        return outputs, len(leaves[0])

    def finish_gradient(self, started: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> None:
        """Finish a gradient that `start_gradient` began."""
        (packed, extra, buckets), rows = started
        for bucket, tensor in zip(self._all_buckets, buckets, strict=True):
            self.copy_out(floats[bucket.start : bucket.stop], _view(tensor))
        self._fill(record, self._train_packer, packed, extra, rows)

    def apply(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
        buckets = [floats[p.start : p.stop] for p in self._all_buckets]
        state = copy_aliased(self._values())
        logs, state = self._apply(state, self._train_packer.split(combined), buckets)
        # XLA reads `floats` in place: the caller may overwrite them after the return.
        jax.block_until_ready(state)
        assign_groups(self._variables, state)
        return self._to_logs(logs, combined, training=True)

    def load(self, floats: NDArray[Any], records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=True)
        buckets = [floats[p.start : p.stop] for p in self._all_buckets]
        logs, state = self._load(self._values(), self._train_packer.split(combined), buckets)
        jax.block_until_ready(state)
        assign_groups((self._variables[0], *self._variables[1::2]), state)
        return self._to_logs(logs, combined, training=True)

    def evaluate(self, shard: int, data: Any, record: NDArray[np.float64]) -> None:
        self._plan.check_test()
        leaves = flatten_to_numpy(data)
        arguments = (
            self._values(),
            np.uint32(seed_offset(shard)),
            leaves,
            *self._totals(shard, training=False),
        )
        with self._noting_needs(training=False):
            packed, extra = self._evaluate(*arguments)
        self._fill(record, self._test_packer, packed, extra, len(leaves[0]))

    def merge(self, records: NDArray[np.float64]) -> Logs:
        combined = self._combine_records(records, training=False)
        logs, *state = self._merge(*self._values()[1::2], self._test_packer.split(combined))
        assign_groups(self._variables[1::2], state)
        return self._to_logs(logs, combined, training=False)

    def predict(self, data: Any) -> Any:
        outputs, seeds = self._predict(self._values(), flatten_to_numpy(data))
        assign_groups([self._state.seeds], [seeds])
        return keras.tree.map_structure(np.array, outputs)

    def _totals(self, shard: int, *, training: bool) -> tuple[BatchTotals, ...]:
        """Return the further arguments of a step: its totals, if it needs them."""
        batch = self.losses[not training].batch_of(shard)
        if batch is None:
            return ()
        return (BatchTotals(batch.totals.astype(np.float32), batch.rows, np.int32(batch.start)),)

    def _count(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        leaves = flatten_to_numpy(data)
        counts = self._counts[training](self._values(), np.uint32(seed_offset(shard)), leaves)
        return LossCounts(np.array(_view(counts.totals), np.float64), [_view(each) for each in counts.rows])

    @staticmethod
    def _fill(
        record: NDArray[np.float64], packer: _RecordPacker, packed: Any, extra: Sequence[Any], rows: int
    ) -> None:
        record[:] = 0
        record[0] = rows
        for dtype, vector in packed.items():
            record[packer.indices[dtype]] = _view(vector)
        record[packer.extra_start :][: len(extra)] = [float(value) for value in extra]

    # Traced functions

    def _trace_train_counts(self, state: Functional, offset: Any, leaves: Arrays) -> Any:
        """Return what the losses of a step add to their totals. XLA computes nothing else."""
        trainable, others, optimizer, metrics = state
        with (
            count_losses(self._model) as counts,
            capture_gradients(self._model.optimizer, trains=bool(self._state.trainable)),
        ):
            begin = (trainable, self._shift_seeds(others, offset), optimizer, metrics)
            self._model.train_step(begin, self._pack(leaves))
        return _stacked(counts)

    def _trace_test_counts(self, state: Functional, offset: Any, leaves: Arrays) -> Any:
        trainable, others, _, metrics = state
        with count_losses(self._model) as counts:
            begin = (trainable, self._shift_seeds(others, offset), metrics)
            self._model.test_step(begin, self._pack(leaves))
        return _stacked(counts)

    def _trace_gradient(self, state: Functional, offset: Any, leaves: Arrays, totals: Any = None) -> Any:
        after, extra, gradients, means = self._trace_parts(state, offset, leaves, totals)
        return self._train_packer.pack(after), extra, self._join(gradients, means)

    def _trace_parts(self, state: Functional, offset: Any, leaves: Arrays, totals: Any = None) -> Any:
        """Return (values of other variables after the step by variable, logs that are no metrics, a gradient
        for each trainable variable, the state to be averaged)."""
        trainable, others, optimizer, metrics = state
        begin = (trainable, self._shift_seeds(others, offset), optimizer, self._without_sums(metrics))
        with (
            watch_step(self._model) as watch,
            self._dividing(totals, len(leaves[0]), training=True),
            self._captured_gradients() as captured,
        ):
            logs, end = unpack_step(self._model.train_step(begin, self._pack(leaves)), 4)
        self._refuse_assigned(end[0], (*captured.updated, *trainable))
        after = self._changed(state, self._by_variable(self._shift_seeds(end[1], -offset), end[3]))
        extra = self._record_logs(logs, watch, training=True)
        gradients = [
            jnp.zeros(tuple(v.shape), self.floats_dtype) if g is None else g
            for v, g in zip(
                self._state.trainable,
                self._order_gradients(captured),
                strict=True,
            )
        ]
        return after, extra, gradients, [after[id(v)] for v in self._state.mean]

    def _refuse_assigned(self, values: Sequence[Any], given: Sequence[Any]) -> None:
        """Raise TrainingError if a step returns weights that it has changed after their update."""
        unchanged = {id(value) for value in given}
        # The step of a custom loop has been checked when it was traced.
        if isinstance(self._model, Trainer) and any(id(value) not in unchanged for value in values):
            raise TrainingError(
                "A train_step returns the trainable variables as stateless_apply() does: with several "
                "replicas the update comes after the step. Received: other values in the state. "
                f"{UPDATE_ADVICE}"
            )

    def _changed(self, before: Functional, after: dict[int, Any]) -> dict[int, Any]:
        """Return `after` with the changes of variables whose changes are summed."""
        if not self._changes:
            return after
        start = self._by_variable(before[1], before[3])
        return {key: value - start[key] if key in self._changes else value for key, value in after.items()}

    def _trace_apply(self, state: Functional, packed: Mapping[str, Any], buckets: Arrays) -> Any:
        trainable, others, optimizer, metrics = state
        gradients, others, metrics = self._take_in(others, metrics, packed, buckets)
        trainable, optimizer = self._update(trainable, optimizer, gradients)
        return self._logs_of(metrics, training=True), (trainable, others, optimizer, metrics)

    def _trace_load(self, state: Functional, packed: Mapping[str, Any], buckets: Arrays) -> Any:
        _, others, _, metrics = state
        values, others, metrics = self._take_in(others, metrics, packed, buckets)
        values = [v.astype(variable.dtype) for v, variable in zip(values, self._state.trainable, strict=True)]
        return self._logs_of(metrics, training=True), (self._as_keras_has_them(values), others, metrics)

    def _take_in(
        self, others: Arrays, metrics: Arrays, packed: Mapping[str, Any], buckets: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Return (the content of `buckets` for the trainable variables, `others` and `metrics` after the
        step)."""
        floats, means = self._split(buckets)
        return floats, *self._with_state(others, metrics, packed, means)

    def _with_state(
        self, others: Arrays, metrics: Arrays, packed: Mapping[str, Any], means: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Return (`others`, `metrics`) after the step."""
        new = {id(v): m.astype(v.dtype) for v, m in zip(self._state.mean, means, strict=True)}
        others = [new.get(id(v), value) for v, value in zip(self._variables[1], others, strict=True)]
        others = self._write(self._variables[1], others, self._train_packer, packed)
        metrics = self._write(self._variables[3], metrics, self._train_packer, packed)
        return others, metrics

    def _update(self, trainable: Arrays, optimizer: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
        """Return (trainable, optimizer) after the update. Optimizers keep the variables in an order of their
        own."""
        indices = {id(v): index for index, v in enumerate(self._state.trainable)}
        order = [indices[id(v)] for v in self._model.optimizer._trainable_variables]
        trainable = [trainable[index] for index in self._trainable_indices]
        updated, optimizer = self._model.optimizer.stateless_apply(
            optimizer,
            [None if i in self._without_gradient else gradients[i].astype(trainable[i].dtype) for i in order],
            [trainable[i] for i in order],
        )
        for index, value in zip(order, updated, strict=True):
            trainable[index] = value
        return self._as_keras_has_them(trainable), optimizer

    def _as_keras_has_them(self, trainable: Arrays) -> Arrays:
        """Reorder values from the order of the state to that of `model.trainable_variables`."""
        values = list(trainable)
        for index, value in zip(self._trainable_indices, trainable, strict=True):
            values[index] = value
        return values

    def _trace_evaluate(
        self, state: Functional, offset: Any, leaves: Arrays, totals: Any = None
    ) -> tuple[Mapping[str, Any], Arrays]:
        trainable, others, _, metrics = state
        begin = (trainable, self._shift_seeds(others, offset), self._without_sums(metrics))
        with (
            watch_step(self._model) as watch,
            self._dividing(totals, len(leaves[0]), training=False),
        ):
            logs, (_, others, metrics) = unpack_step(self._model.test_step(begin, self._pack(leaves)), 3)
        after = self._changed(state, self._by_variable(self._shift_seeds(others, -offset), metrics))
        return self._test_packer.pack(after), self._record_logs(logs, watch, training=False)

    def _trace_merge(self, others: Arrays, metrics: Arrays, packed: Mapping[str, Any]) -> Any:
        others = self._write(self._variables[1], others, self._test_packer, packed)
        metrics = self._write(self._variables[3], metrics, self._test_packer, packed)
        return self._logs_of(metrics, training=False), others, metrics

    def _trace_predict(self, state: Functional, leaves: Arrays) -> Any:
        outputs, others = self._model.predict_step(state[:2], self._pack(leaves))
        moved = {id(v): value for v, value in zip(self._variables[1], others, strict=True)}
        return outputs, [moved[id(v)] for v in self._state.seeds]

    # Helpers

    def _learn_logs(self, *, training: bool) -> None:
        function = self._trace_gradient if training else self._trace_evaluate
        leaves, totals = flatten_to_numpy(self._structure), self._totals(0, training=training)
        jax.eval_shape(function, self._values(), np.uint32(0), leaves, *totals)

    def _shift_seeds(self, others: Sequence[Any], offset: Any) -> Arrays:
        return [
            value + jnp.stack([offset, jnp.zeros_like(offset)]).astype(value.dtype)
            if id(variable) in self._seeds
            else value
            for variable, value in zip(self._variables[1], others, strict=True)
        ]

    def _without_sums(self, metrics: Sequence[Any]) -> Arrays:
        return [
            jnp.zeros_like(value) if id(variable) in self._sums else value
            for variable, value in zip(self._variables[3], metrics, strict=True)
        ]

    def _by_variable(self, others: Sequence[Any], metrics: Sequence[Any]) -> dict[int, Any]:
        variables = (*self._variables[1], *self._variables[3])
        return {id(v): value for v, value in zip(variables, (*others, *metrics), strict=True)}

    @staticmethod
    def _write(
        variables: Sequence[Any], values: Sequence[Any], packer: _RecordPacker, packed: Mapping[str, Any]
    ) -> Arrays:
        """Return `values` of `variables` updated by a record: sums are added, others replaced."""
        added, replaced = packer.unpack(packed)
        return [
            value + added[id(v)] if id(v) in added else replaced.get(id(v), value)
            for v, value in zip(variables, values, strict=True)
        ]

    def _logs_of(self, metrics: Arrays, *, training: bool) -> Any:
        with keras.StatelessScope(state_mapping=zip(self._variables[3], metrics, strict=True)):
            return self._metric_logs(training=training)


class _RecordPacker:
    """Packs a record into one vector for each dtype, since by default JAX has no float64.

    `indices[dtype]` are the elements of the record that the vector of that dtype holds.
    """

    def __init__(self, layout: RecordLayout) -> None:
        self.extra_start = layout.extra_start
        self._added = {id(v) for v, _ in layout.sums}
        self._added |= {id(v) for v, _, operation in layout.others if operation is Operation.SUM_OF_CHANGES}
        self._members: dict[str, list[tuple[Any, Any]]] = {}
        for variable, span in layout.entries():
            self._members.setdefault(str(variable.value.dtype), []).append((variable, span))
        self.indices = {
            dtype: np.concatenate([np.arange(span.start, span.stop) for _, span in members])
            for dtype, members in self._members.items()
        }

    def pack(self, values: Mapping[int, Any]) -> dict[str, Any]:
        """Return vectors of the values by variable. Traced."""
        return {
            dtype: jnp.concatenate([jnp.ravel(values[id(v)]).astype(dtype) for v, _ in members])
            for dtype, members in self._members.items()
        }

    def split(self, record: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
        """Return vectors of a record."""
        return {dtype: record[indices].astype(jnp.dtype(dtype)) for dtype, indices in self.indices.items()}

    def unpack(self, packed: Mapping[str, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Return (what is added to variables, what replaces their values), by variable. Traced."""
        added: dict[int, Any] = {}
        replaced: dict[int, Any] = {}
        for dtype, members in self._members.items():
            start = 0
            for variable, span in members:
                stop = start + span.stop - span.start
                values = added if id(variable) in self._added else replaced
                values[id(variable)] = packed[dtype][start:stop].reshape(span.shape)
                start = stop
        return added, replaced


# Keras' JAX trainer needs this to run such steps


def as_trainer_function(run: Callable[[Iterable[Any]], Logs]) -> Callable[..., Any]:
    """See `Backend`. The state goes in and out.

    The returned state is empty, so that the trainer never overwrites the variables, which hold the current
    values.
    """

    def function(state: Sequence[Any], iterator: Iterator[Any]) -> tuple[Logs, tuple[Arrays, ...]]:
        return run(iterator), tuple([] for _ in state)

    return function


def keras_methods(trainer_of: Callable[[Any], Any]) -> dict[str, Callable[[Any], Any]]:
    """See `Backend`. Keep the values in the variables while a trainer does the steps: Keras' loop would take
    them out."""

    def dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            trainer = trainer_of(model)
            if trainer is None:
                return original(model, *args, **kwargs)
            if trainer.does_steps:
                return original(model, *args, **{**kwargs, "purge_model_variables": False})
            # Weights that became their averages share memory with them: Keras' step would donate it twice.
            return copy_aliased(original(model, *args, **kwargs))

        return method

    return {"_get_jax_state": dispatch}


# On accelerators the trainer moves its inputs to the device. For JAX a step is a container without arrays, so
# that it stays on the host.
jax.tree_util.register_pytree_node(StepBatch, lambda step: ((), step), lambda step, _: step)


def compile_for(model: Any, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `function` compiled by `jax.jit` with `options`, or as it is if `model` isn't compiled."""
    if model.run_eagerly or not model.jit_compile:
        return function
    compiled: Callable[..., Any] = jax.jit(function, **options)
    return compiled


def copy_aliased(given: Functional, *others: Sequence[Any]) -> Functional:
    """Return `given`, values of variables that a function may overwrite, with a copy of each that occurs
    twice or among `others`.

    A variable that was assigned another's value (weights their average, at the end of a fit) holds the same
    array: XLA takes none twice, and overwriting it would take it from the other.
    """
    every = [*others, *given]
    if len({id(value) for values in every for value in values}) == sum(map(len, every)):
        return given
    seen = {id(value) for values in others for value in values}
    for values in given:
        for index, value in enumerate(values):
            if id(value) in seen:
                values[index] = jnp.array(value, copy=True)
            seen.add(id(value))
    return given


def refuse_distribution() -> None:
    """Raise TrainingError if a keras.distribution is set, which would shard the model too."""
    if keras.distribution.distribution() is not None:
        raise TrainingError(
            "A strategy and a keras.distribution can't shard the same model. Received: "
            f"{keras.distribution.distribution()!r}. Leave "
            "keras.distribution.set_distribution() out."
        )


def unpack_step(result: Any, parts: int) -> tuple[Any, Any]:
    """Return (logs, state) of a user's step, whose state has `parts` lists. Raises TrainingError."""
    if isinstance(result, tuple) and len(result) == 2:
        logs, state = result
        if isinstance(state, (tuple, list)) and len(state) == parts:
            return logs, state
    groups = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    names = [name for name in groups if parts == len(groups) or name != "optimizer_variables"]
    raise TrainingError(
        f"On JAX a step returns (logs, state) with state ({', '.join(names)}). Received: "
        f"{type(result).__name__}."
    )


def variables_of(model: Any) -> tuple[list[Any], ...]:
    """Return the variables of a model's state."""
    optimizer = getattr(model, "optimizer", None)
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        list(optimizer.variables) if optimizer is not None else [],
        list(model.metrics_variables),
    )


def values_of(groups: Sequence[Sequence[Any]]) -> Any:
    """Return the values of groups of variables."""
    return tuple([variable.value for variable in group] for group in groups)


def assign_groups(groups: Sequence[Sequence[Any]], state: Sequence[Sequence[Any]]) -> None:
    """Set groups of variables to their values."""
    for variables, values in zip(groups, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable._direct_assign(value)


def _stacked(counts: LossCounts) -> LossCounts:
    return counts._replace(totals=jnp.stack(counts.totals) if counts.totals else jnp.zeros((0,)))


def _view(tensor: Any) -> NDArray[Any]:
    """Return the array's own memory if it is on the host, without a copy."""
    view: NDArray[Any] = np.asarray(tensor)
    return view


# A replica without peers: each step is one call


class FusedJax:
    """See `FusedReplica`. Between steps the state is in the Keras variables, as everywhere in insitu."""

    def __init__(self, model: Any, data: Any) -> None:
        refuse_distribution()
        self._model = model
        self._structure = data
        # Collected once: Keras searches all layers each time.
        self._trained = trainable, others, _, metrics = variables_of(model)
        self._tested = (trainable, others, metrics)
        self._predicting = (trainable, others)
        # The old state is donated, as in Keras' own step, so that XLA updates it in place.
        self._train = compile_for(model, self._trace_train, donate_argnums=0)
        self._test = compile_for(model, self._trace_test, donate_argnums=0)
        self._predict = compile_for(model, self._trace_predict)

    def train(self, data: Any) -> Logs:
        logs, state = self._train(copy_aliased(_values(self._trained)), flatten_to_numpy(data))
        _set_values(self._trained, state)
        return dict(logs)

    def test(self, data: Any) -> Logs:
        # Weights stay where they are; the rest of the state may move.
        weights = _values(self._tested[:1])
        moved = copy_aliased(_values(self._tested[1:]), *weights)
        logs, state = self._test(moved, weights, flatten_to_numpy(data))
        _set_values(self._tested[1:], state)
        return dict(logs)

    def predict(self, data: Any) -> Any:
        outputs, others = self._predict(_values(self._predicting), flatten_to_numpy(data))
        _set_values(self._predicting[1:], [others])
        return keras.tree.map_structure(np.array, outputs)

    # Traced functions

    def _pack(self, leaves: Sequence[Any]) -> Any:
        return pack_batch(self._structure, leaves)

    def _trace_train(self, state: Any, leaves: Any) -> Any:
        return unpack_step(self._model.train_step(state, self._pack(leaves)), 4)

    def _trace_test(self, moved: Any, weights: Any, leaves: Any) -> Any:
        logs, state = unpack_step(self._model.test_step((*weights, *moved), self._pack(leaves)), 3)
        return logs, state[1:]

    def _trace_predict(self, state: Any, leaves: Any) -> Any:
        return self._model.predict_step(state, self._pack(leaves))


def _values(groups: Any) -> Any:
    return tuple([v._value for v in group] for group in groups)


def _set_values(groups: Any, state: Any) -> None:
    for group, values in zip(groups, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable._value = value


# The update of pieces of variables, on parameter servers


def compile_update(optimizers: Sequence[Any], clip: Callable[[Any], Any], *, jit: bool) -> Callable[..., Any]:
    """See `Backend`."""

    def function(values: Any, slots: Any, gradients: Any, step: Any, rate: Any) -> Any:
        gradients = clip(gradients)
        new_values, new_slots = [], []
        for made, value, own, gradient in zip(optimizers, values, slots, gradients, strict=True):
            slot_of = {id(v): x for v, x in zip(made.slots.values(), own, strict=True)}
            state = [
                step if v is made.counter else rate.astype(v.dtype) if v is made.rate else slot_of[id(v)]
                for v in made.optimizer.variables
            ]
            updated, state = made.optimizer.stateless_apply(state, [gradient], [value])
            after = {id(v): x for v, x in zip(made.optimizer.variables, state, strict=True)}
            new_values.append(updated[0])
            new_slots.append([after[id(v)] for v in made.slots.values()])
        return new_values, new_slots

    compiled = jax.jit(function) if jit else function

    def update(values: Any, slots: Any, gradients: Any, step: int, rate: float) -> Any:
        return jax.block_until_ready(
            compiled(values, slots, gradients, np.asarray(step, np.int32), np.asarray(rate, np.float32))
        )

    return update
