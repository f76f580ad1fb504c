"""The part of a replica that all backends share: the layout of its numbers, and the logs of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.trainers.trainer import Trainer
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.train.replica.batch_losses import OF_PAIRS
from insitu.train.replica.flat import Span, compute_spans, group_into_buckets
from insitu.train.replica.gradient_capture import CapturedGradients, capture_gradients
from insitu.train.replica.leaves import count_rows, map_batch, pack_batch
from insitu.train.replica.loss_totals import (
    BatchTotals,
    LossCounts,
    NeedsTotals,
    demand_totals,
    divide_by_totals,
)
from insitu.train.replica.metric_results import LogPath, Source, flatten_logs, nest_logs, read_result
from insitu.train.replica.plan import CombinationPlan
from insitu.train.replica.protocol import Logs
from insitu.train.replica.record import EXTRA_LOGS, RecordLayout
from insitu.train.replica.state import SEED_STRIDE, read_state, regroup, to_numpy
from insitu.train.replica.step_watch import StepWatch


class BaseReplica:
    """The neutral part of a `Replica`: nothing here computes with a backend's tensors.

    `floats` hold a gradient for each trainable variable, then the state that is averaged. The spans and
    buckets of both are relative to the whole buffer.
    """

    def __init__(self, model: Any, data: Any, plan: CombinationPlan | None = None) -> None:
        self._model = model
        self._plan = plan or CombinationPlan()
        self.plan_number = self._plan.number
        self._state = regroup(read_state(model), self._plan.operations)
        self._structure = data
        self._train_record = RecordLayout(self._state, training=True)
        self._test_record = RecordLayout(self._state, training=False)
        self._layouts = {True: self._train_record, False: self._test_record}
        self.seeds_size = 2 * len(self._state.seeds)
        self.train_record_size = self._train_record.size
        self.test_record_size = self._test_record.size
        self._lay_out_floats()
        self.copy_out: Callable[[NDArray[Any], NDArray[Any]], object] = np.copyto
        """`copy_out(to, source)` copies a part of the gradient out of the backend's memory."""
        self._without_gradient: frozenset[int] = frozenset()
        # The steps of a custom loop have no logs, and sum their metrics as tf.distribute does.
        self._is_loop = not isinstance(model, Trainer)
        #: What steps return, of training and of tests; None until one was traced.
        self._logs = dict.fromkeys((True, False), NO_LOGS if self._is_loop else None)
        #: How losses divide in training and in tests. Replicas of one task share it.
        self.losses = (LossState(), LossState())
        if self._is_loop:
            # As with tf.distribute, a loss of a custom loop is the replica's own.
            self.keep_own_losses(training=True)

    def _lay_out_floats(self) -> None:
        trainable, mean = self._state.trainable, self._state.mean
        self._gradient_spans = compute_spans([tuple(v.shape) for v in trainable])
        gradients_stop = self._gradient_spans[-1].stop if trainable else 0
        self._mean_spans = compute_spans([tuple(v.shape) for v in mean], gradients_stop)
        self.floats_size = self._mean_spans[-1].stop if mean else gradients_stop
        self._gradient_buckets = group_into_buckets(self._gradient_spans)
        self._mean_buckets = group_into_buckets(self._mean_spans)
        self._all_buckets = (*self._gradient_buckets, *self._mean_buckets)
        wide = any(keras.backend.standardize_dtype(v.dtype) == "float64" for v in (*trainable, *mean))
        self.floats_dtype: np.dtype[Any] = np.dtype("float64" if wide else "float32")

    # Divisors of losses. See `Replica`

    def keep_own_losses(self, *, training: bool) -> None:
        """See `Replica`."""
        self.losses[not training].are_own = True

    def needs_totals(self, *, training: bool) -> bool:
        """See `Replica`."""
        return self.losses[not training].needs_totals

    def find_out(self, *, training: bool) -> None:
        """See `Replica`."""
        if self._logs[training] is None:
            with self._noting_needs(training=training):
                self._learn_logs(training=training)

    def set_totals(self, batch: BatchTotals, *, training: bool) -> None:
        """See `Replica`."""
        self.losses[not training].batch = batch

    def count_losses(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        """See `Replica`."""
        (self._plan.check_train if training else self._plan.check_test)()
        batch = self._structure if data is None else data
        counts = self._count(shard, batch, training=training)
        if counts.rows and not self.losses[not training].rows_are_checked:
            self._check_rows(batch, counts, training=training)
        return counts if data is not None else LossCounts(np.zeros_like(counts.totals), counts.rows)

    def _count(self, shard: int, data: Any, *, training: bool) -> LossCounts:
        raise NotImplementedError

    def _check_rows(self, data: Any, counts: LossCounts, *, training: bool) -> None:
        """Raise TrainingError unless losses over the global batch get values for rows, as a batch of another
        size shows."""
        rows = count_rows(data)
        other = map_batch(lambda leaf: leaf[:1] if rows > 1 else np.concatenate([leaf, leaf]), data)
        others = self._count(0, other, training=training).rows
        for one, another in zip(counts.rows, others, strict=True):
            if len(one) != rows or another.shape != (count_rows(other), *one.shape[1:]):
                raise TrainingError(OF_PAIRS)
        self.losses[not training].rows_are_checked = True

    @contextmanager
    def _noting_needs(self, *, training: bool) -> Iterator[None]:
        """While open, note that losses turn out to need totals, as NeedsTotals says."""
        try:
            yield
        except NeedsTotals:
            self.losses[not training].needs_totals = True
            self._forget_traces()
            raise

    def _forget_traces(self) -> None:
        """Make compiled functions again that were left while they were traced."""

    @contextmanager
    def _dividing(self, batch: Any, rows: Any, *, training: bool) -> Iterator[None]:
        """While open, the losses of a step of `rows` rows are parts of those of `batch`, if need be."""
        losses = self.losses[not training]
        if losses.are_own:
            yield
        elif losses.needs_totals:
            with divide_by_totals(self._model, batch, rows):
                yield
        else:
            with demand_totals(self._model):
                yield

    def _captured_gradients(self) -> AbstractContextManager[CapturedGradients]:
        """Return a scope that captures the gradients of a training step."""
        return capture_gradients(
            self._model.optimizer,
            trains=bool(self._state.trainable),
            loss_exponent=0 if self.losses[0].are_own else self._plan.loss_exponent,
        )

    # Random numbers of predictions. See `Replica`

    def watch_weights(self, variables: Sequence[Any]) -> bool:
        """See `Replica`."""
        return False

    def take_watched(self) -> Sequence[NDArray[Any]]:
        """See `Replica`."""
        return ()

    def run_with_seeds_of(self, shard: int, run: Callable[[], Any]) -> tuple[Any, NDArray[np.float64]]:
        """See `Replica`."""
        seeds = self._state.seeds
        if not seeds:
            return run(), np.empty(0)
        before = [to_numpy(variable) for variable in seeds]
        for variable, value in zip(seeds, before, strict=True):
            shifted = value.astype(np.int64) + np.array([seed_offset(shard), 0])
            variable.assign(shifted.astype(value.dtype))  # wraps round
        try:
            result = run()
            moved = [to_numpy(variable) for variable in seeds]
        finally:
            for variable, value in zip(seeds, before, strict=True):
                variable.assign(value)
        return result, np.array(
            [(b[0], m[1]) for b, m in zip(before, moved, strict=True)], np.float64
        ).ravel()

    def assign_seeds(self, values: NDArray[np.float64]) -> None:
        """See `Replica`."""
        for variable, value in zip(self._state.seeds, values.reshape(-1, 2), strict=True):
            variable.assign(value.astype(to_numpy(variable).dtype))

    def assign(self, floats: NDArray[Any]) -> None:
        """See `Replica`."""
        for variable, span in self.float_spans():
            variable.assign(floats[span.start : span.stop].reshape(span.shape).astype(variable.numpy().dtype))

    def float_spans(self) -> list[tuple[Any, Span]]:
        """See `Replica`."""
        state = self._state
        return list(
            zip((*state.trainable, *state.mean), (*self._gradient_spans, *self._mean_spans), strict=True)
        )

    def _pack(self, leaves: Sequence[Any]) -> Any:
        return pack_batch(self._structure, leaves)

    def _record_logs(self, logs: Any, watch: StepWatch, *, training: bool) -> list[Any]:
        """Record what a step returns, and which means count each batch once. Returns the logs that are no
        results of metrics."""
        if self._is_loop:
            return []
        logs = flatten_logs(logs)
        found = {path: watch.results.find(value) for path, value in logs.items()}
        extra = {path: logs[path] for path, source in found.items() if source is None}
        if len(extra) > EXTRA_LOGS or any(tuple(getattr(v, "shape", ())) != () for v in extra.values()):
            received = [f"{path[-1]} of shape {getattr(v, 'shape', ())}" for path, v in extra.items()]
            raise TrainingError(
                f"A train_step or test_step may return up to {EXTRA_LOGS} scalars beside results of the "
                f"model's metrics. Received: {', '.join(received)}"
            )
        noted = StepLogs(tuple(found), {path: s for path, s in found.items() if s is not None}, tuple(extra))
        self._logs[training] = noted
        self._layouts[training].average(watch.means.variables)
        return list(extra.values())

    def _metric_logs(self, *, training: bool) -> list[Any]:
        """Return those logs of a step that are results of metrics, as they are now."""
        logs = self._logs[training] or NO_LOGS
        return [read_result(source) for source in logs.results.values()]

    def _join(self, gradients: Sequence[Any], means: Sequence[Any]) -> list[Any]:
        """Return a flat tensor for each bucket. Traced."""
        ops, dtype = keras.ops, self.floats_dtype.name
        joined = []
        for buckets, tensors in ((self._gradient_buckets, gradients), (self._mean_buckets, means)):
            for bucket in buckets:
                flat = [ops.reshape(ops.cast(tensors[i], dtype), (-1,)) for i in bucket.members]
                joined.append(flat[0] if len(flat) == 1 else ops.concatenate(flat))
        return joined

    def _split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return what `_join` made flat tensors of. Traced."""
        count = len(self._gradient_buckets)
        pairs = list(zip(self._all_buckets, tensors, strict=True))
        return (
            _split(pairs[:count], self._gradient_spans),
            _split(pairs[count:], self._mean_spans),
        )

    def _order_gradients(self, captured: CapturedGradients) -> list[Any]:
        """Return the gradients in the order of the state's trainable variables, with None if there is
        none."""
        ordered = captured.sort_for(self._state.trainable)
        self._without_gradient = frozenset(i for i, gradient in enumerate(ordered) if gradient is None)
        return ordered

    def _combine_records(self, records: NDArray[np.float64], *, training: bool) -> NDArray[np.float64]:
        """Combine records of a step. A task without rows so far first finds out what steps do."""
        if self._logs[training] is None:
            self._learn_logs(training=training)
        return self._layouts[training].combine(records)

    def _learn_logs(self, *, training: bool) -> None:
        raise NotImplementedError

    def _to_logs(self, metrics: Sequence[Any], combined: NDArray[np.float64], *, training: bool) -> Logs:
        """Return the logs of a step, from results of metrics and its combined record."""
        extra = combined[self._layouts[training].extra_start :].tolist()
        return (self._logs[training] or NO_LOGS).merge([_to_log(value) for value in metrics], extra)


def _split(pairs: Sequence[tuple[Any, Any]], spans: Sequence[Span]) -> list[Any]:
    return [
        keras.ops.reshape(tensor[span.start - bucket.start : span.stop - bucket.start], span.shape)
        for bucket, tensor in pairs
        for span in (spans[index] for index in bucket.members)
    ]


@dataclass(slots=True)
class LossState:
    """How the losses of a kind of step divide. See `loss_totals`."""

    are_own: bool = False
    """Whether each replica's losses divide by what counts in its own rows."""
    needs_totals: bool = False
    """Whether some loss needs totals. Written when a step turns out to."""
    batch: BatchTotals | None = None
    """Facts for losses about the whole batch, in which `start` has a number for each shard. Written before
    each step that needs it."""
    rows_are_checked: bool = False
    """Whether it is known that losses over the global batch get values for rows."""

    def batch_of(self, shard: int) -> BatchTotals | None:
        """Return what losses of a shard know of the whole batch."""
        return None if self.batch is None else self.batch._replace(start=self.batch.start[shard])


@dataclass(frozen=True, slots=True)
class StepLogs:
    """Results of a step."""

    paths: tuple[LogPath, ...]
    """Names of all values, in their order."""
    results: Mapping[LogPath, Source]
    """Sources of those that are results of metrics."""
    extra: tuple[LogPath, ...]
    """Names of the others."""

    def merge(self, metrics: Sequence[Any], extra: Sequence[Any]) -> dict[str, Any]:
        """Return the logs with these results of metrics, and these values of others."""
        values = {
            **dict(zip(self.results, metrics, strict=True)),
            **dict(zip(self.extra, extra, strict=False)),
        }
        return nest_logs({path: values[path] for path in self.paths})


NO_LOGS = StepLogs((), {}, ())


def _to_log(value: Any) -> Any:
    """Return a number, or an array for a metric with several."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return np.array(keras.ops.convert_to_numpy(value))


def seed_offset(shard: int) -> int:
    """Return the number that is added to the seeds of `shard`, in [0, 2**32): backends keep seeds in 32
    bits."""
    return shard * SEED_STRIDE % (1 << 32)
