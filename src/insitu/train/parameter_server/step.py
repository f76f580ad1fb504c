"""The step of training with parameter servers: push the gradients of this task's shards, pull the servers'
values.

No other worker takes part. If the servers wait for other workers' gradients (sync) or for the slowest worker
(bounded), they answer later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.errors import TrainingError
from insitu.exchange import address_of
from insitu.parameters import copy_and_check
from insitu.train.backends import active_backend
from insitu.train.custom_loop import ExchangeAggregation, LoopReplica, TrainOrObserveStep
from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit import check_same_data
from insitu.train.parameter_server.layers import embeddings_of
from insitu.train.parameter_server.lookup import TableLookup, find_key_inputs
from insitu.train.parameter_server.model_spec import ClipNorms, check_norms_of_rows
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.parameter_server.session import DEFAULT_SHARD_ROWS, ParameterServerSession, ShardPush
from insitu.train.replica import (
    Logs,
    NeedsTotals,
    Replica,
    ShardBatch,
    holds_table_rows,
    inner_optimizer,
    replace_optimizer,
    to_numpy,
    view,
)

_TOTALS = (
    "Parameter servers in mode 'sync' take the mean over rows of the workers' gradients. Received: a loss "
    "that divides by something else: the entries that a mask or ignore_class lets through, or the weights of "
    "all rows. Use MultiWorkerMirroredStrategy, or another mode, in which each push is an update of its own."
)


class ServerStep:
    """Trains, tests and predicts with one replica whose variables live on the servers of `session`.

    `norms` are kept by the worker, and the loss' `scale` is undone, before a gradient is sent.
    """

    def __init__(
        self,
        replica: Replica,
        session: ParameterServerSession,
        shards: int,
        lookup: TableLookup,
        *,
        norms: ClipNorms,
        scale: LossScale,
        shares_records: bool = False,
        clips: bool = False,
        shared_tests: SharedTests | None = None,
        check: DataCheck | None = None,
    ) -> None:
        """`shares_records`: losses and metrics are those of the rows of all workers that entered the updates,
        else of this worker's own. `clips`: what isn't finite isn't refused. `shared_tests`
        combines the tests of all workers. `check` compares what the workers
        were given."""
        self._replica = replica
        self._session = session
        self._lookup = lookup
        self._norms = norms
        self._scale = scale
        self._shares_records = shares_records
        self._clips = clips
        self._shared_tests = shared_tests
        self._check = check
        self._records = np.zeros((shards, replica.train_record_size))
        self._test_records = np.zeros((shards, replica.test_record_size))
        self._gradients = [span for v, span in replica.float_spans() if v.trainable]
        stop = self._gradients[-1].stop if self._gradients else 0
        self._state = slice(stop, replica.floats_size)
        # Nothing is done to a gradient between its being copied and pushed.
        self._plain = not norms and not scale.changes
        self._copied = _FiniteCheckingCopy()
        replica.copy_out = self._copied
        self._watch = WeightsWatch(replica, session.rate_variable)
        self._logs: Logs = {}
        self._test_logs: Logs = {}

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        report("pull rows")
        batches = [self._lookup.pull(part.data) if part.rows else None for part in parts]
        report("gradient")
        pushes = []
        self._scale.begin()
        for index, (part, batch) in enumerate(zip(parts, batches, strict=True)):
            floats = self._session.gradient_buffer(index)
            self._records[index] = 0
            self._copied.reset()
            rows = part.rows
            if batch is None:
                floats[:] = 0
            elif not self._compute(part.shard, batch, floats, self._records[index]):
                rows = 0
            finite = self._plain and self._copied.finite(floats.size)
            record = self._records[index] if self._shares_records else None
            pushes.append(
                ShardPush(part.shard, rows, floats, batch if rows else None, part.rows > rows, finite, record)
            )
        self._scale.end()
        self._check_weights()
        report("push and pull")
        if self._check is not None:
            self._check.note(position, parts)
        values = self._session.exchange(pushes, rate=self._watch.learning_rate)
        if self._check is not None:
            self._check.compare()
        report("update")
        records = self._session.take_records() if self._shares_records else self._records
        if records.size and records[:, 0].any():
            self._logs = self._replica.load(values, records)
        else:
            self._replica.assign(values)
        self._watch.note()
        return self._logs

    @property
    def weights_changed(self) -> bool:
        """True if this task's weights aren't those that it last pulled."""
        return bool(self._watch.find_changed(self._session.values))

    def _check_weights(self) -> None:
        changed = self._watch.find_changed_in_step(self._session.values)
        if changed:
            raise TrainingError(
                "During a fit or a custom loop the servers hold the weights, and what a worker sets would be "
                f"lost. Received: another value of {changed[0].path}, set between two steps. Set weights "
                "between two fits (the chief's count), or use MultiWorkerMirroredStrategy."
            )

    def start_fit(self, fit: int, waiting: Callable[[], None]) -> None:
        """Start a fit for all workers; see `ParameterServerSession.start_fit`."""
        self._session.start_fit(fit, self._replica, changed=self.weights_changed, waiting=waiting)
        self._watch.note()

    def _compute(self, shard: int, batch: Any, floats: NDArray[Any], record: NDArray[np.float64]) -> bool:
        """Compute the gradient of one shard. Returns False for one that must not be pushed."""
        try:
            with self._lookup.rows_loaded(batch):
                self._replica.gradient(shard, batch.data, floats, record)
        except NeedsTotals:
            raise TrainingError(_TOTALS) from None
        if not self._scale.unscale(floats[: self._state.start]):
            return False
        if self._norms:
            self._norms.clip([floats[span.start : span.stop] for span in self._gradients])
        if self._clips:  # as a gradient of 0, the state stays as it is
            state = floats[self._state]
            np.copyto(state, self._session.values[self._state], where=~np.isfinite(state))
        return True

    def refresh(self) -> None:
        """Pull the servers' values into the replica."""
        self._replica.assign(self._session.pull())
        self._watch.note()

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        """Return the metrics over the rows that this task was given, without other tasks' rows unless tests
        are shared."""
        shared = self._shared_tests
        if shared is None or not shared.applies(parts):
            for part in parts:
                for record in self._evaluate(part):
                    self._test_logs = self._replica.merge(record)
            return self._test_logs
        empty = np.zeros((0, self._replica.test_record_size))
        own = {part.shard: np.concatenate([empty, *self._evaluate(part)]) for part in parts}
        records = shared.share(position, own)
        if len(records):
            self._test_logs = self._replica.merge(records)
        return self._test_logs

    def _evaluate(self, part: ShardBatch) -> Iterator[NDArray[np.float64]]:
        """Yield the records of a shard's rows, each of shape (1, size)."""
        for piece in self._lookup.pieces(part.data) if part.rows else ():
            batch = self._lookup.pull(piece, create=False)
            record = np.zeros((1, self._replica.test_record_size))
            with self._lookup.rows_loaded(batch):
                self._replica.evaluate(part.shard, batch.data, record[0])
            yield record

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        """Return outputs for the rows that this task was given."""
        outputs = [self._outputs(part.data) for part in parts if part.rows]
        empty = keras.tree.map_structure(lambda leaf: np.asarray(leaf)[:0], example)
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), empty, *outputs)

    def _outputs(self, data: Any) -> Any:
        pieces = []
        for piece in self._lookup.pieces(data):
            batch = self._lookup.pull(piece, create=False)
            with self._lookup.rows_loaded(batch):
                pieces.append(self._replica.predict(batch.data))
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *pieces)

    def example_output(self, data: Any) -> Any:
        return self._outputs(data)


class _FiniteCheckingCopy:
    """Copies parts of a gradient, and checks in the same pass that they are finite."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._size, self._finite = 0, True

    def __call__(self, to: NDArray[Any], source: NDArray[Any]) -> None:
        self._size += source.size
        self._finite &= copy_and_check(to, source)

    def finite(self, size: int) -> bool:
        """Return True if all of `size` elements were copied since the last `reset`, and are finite."""
        return self._finite and self._size == size


# Notices weights that a script or a callback has changed on a worker, while the servers have others


_SMALL_BYTES = 4096
"""To compare so little takes less time than to ask for its place."""


class WeightsWatch:
    """Compares the variables of a replica with the values that were last pulled.

    Comparing is cheap if nothing has changed: a value that is in the buffer of the pull, or is the very
    object that was there behind the last step, isn't read. On TensorFlow a step's gradient brings the values.
    """

    def __init__(self, replica: Replica, rate: Any = None) -> None:
        """`rate` is the variable of a learning rate that is read as well, or None."""
        self._replica = replica
        #: The learning rate in the step whose weights were compared last; None if it wasn't read.
        self.learning_rate: float | None = None
        self._spans = [(v, span) for v, span in replica.float_spans() if not holds_table_rows(v)]
        self._tokens: list[Any] = []
        rates = [] if rate is None else [rate]
        self._by_gradient = replica.watch_weights([*(v for v, _ in self._spans), *rates])

    def note(self) -> None:
        """Remember the variables, which have just been loaded."""
        self._tokens = [active_backend().identify_value(v) for v, _ in self._spans]

    def find_changed_in_step(self, values: NDArray[Any]) -> Sequence[Any]:
        """Return what `find_changed` returns, between the gradient of a step and its update."""
        taken = self._replica.take_watched() if self._by_gradient else ()
        self.learning_rate = None
        if not taken:
            return self.find_changed(values)
        if len(taken) > len(self._spans):
            self.learning_rate = float(taken[-1])
        return [
            variable
            for (variable, span), own in zip(self._spans, taken, strict=False)
            if _are_other(own, values[span.start : span.stop])
        ]

    def find_changed(self, values: NDArray[Any]) -> Sequence[Any]:
        """Return the variables whose values differ from `values`, which are laid out as its floats."""
        candidates = self._spans
        if self._tokens:
            identify = active_backend().identify_value
            candidates = [
                pair
                for pair, token in zip(self._spans, self._tokens, strict=True)
                if token is None or not _is_same(identify(pair[0]), token)
            ]
        return [v for v, span in candidates if _differs(v, values[span.start : span.stop])]


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(now, tuple) and bool(now == before))


def _differs(variable: Any, expected: NDArray[Any]) -> bool:
    return _are_other(view(variable), expected)


def _are_other(own: NDArray[Any], expected: NDArray[Any]) -> bool:
    own = own.reshape(-1)
    if own.dtype == expected.dtype and own.nbytes <= _SMALL_BYTES:
        return own.tobytes() != expected.tobytes()
    if own.dtype == expected.dtype and address_of(own) == address_of(expected):
        return False
    # Pulled values have been copied, so the bits are the same, also those of NaN.
    bits = np.dtype(f"u{own.itemsize}") if own.itemsize <= 8 else own.dtype
    return not np.array_equal(own.view(bits), expected.astype(own.dtype, copy=False).view(bits))


# Compare, over the servers, the data that the workers of a synchronous fit were given.
#
# Each worker takes its part of each global batch, so all must be given the same. Workers on servers don't
# meet. But if servers wait for gradients, what others wrote before they pushed theirs is there when a
# step ends


CHECK_INTERVAL = 100
"""Steps of an epoch from one comparison to the next. Each compares all batches since the one before."""
_LARGEST = 1 << 52
"""Above all fingerprints: what a float64 holds."""


class DataCheck:
    """Compares fingerprints of batches in the first step of an epoch, in each `CHECK_INTERVAL`-th, and at the
    end of a fit. Gradients that come late may be of workers that haven't come to that step: they aren't
    waited for."""

    def __init__(self, marks: ServerMarks, shards: Sequence[int]) -> None:
        """`shards` are those of this task."""
        self._marks = marks
        self._shards = shards
        #: The number of the fit. Written by `begin`.
        self._fit = 0
        #: The fingerprint of all batches since the last comparison; None if some were trained before this
        #: task was restarted. Written by all methods.
        self._seen: int | None = None
        #: Written and yet to be compared: (name of the place, fingerprint, what an error calls it).
        self._written: tuple[str, int, object] | None = None
        #: The place behind the last step. Written by `note`.
        self._last: tuple[int, int] = (0, 0)

    def begin(self, fit: int, *, resumed: bool) -> None:
        """Begin a fit, or continue in its middle if it was `resumed`."""
        self._fit, self._seen, self._written = fit, None if resumed else 0, None

    def note(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> None:
        """Note the batch of a step before its gradients are pushed."""
        fingerprint = parts[0].fingerprint if parts else 0
        if not fingerprint:  # nothing that must be the same
            return
        checks = position.step % CHECK_INTERVAL == 0
        if self._seen is not None:
            self._seen = (self._seen * 31 + fingerprint) % _LARGEST
            if checks:
                self._write(f"{position.epoch} {position.step}", self._seen, position)
        if checks:
            self._seen = 0
        self._last = position.epoch, position.step

    def record_end(self) -> None:
        """Note the batches since the last comparison, before the end of a fit is waited for."""
        if self._seen:
            self._write(f"{self._last} end", self._seen, f"the end of fit {self._fit}")
        self._seen = None

    def compare(self) -> None:
        """Compare what was noted, once the servers have the gradients. Raises InputError if workers were
        given different data, in each that finds it."""
        if self._written is None:
            return
        (place, own, where), self._written = self._written, None
        fingerprints = self._marks.read_data(self._fit, place)
        check_same_data([number or own for number in fingerprints], where)

    def _write(self, place: str, seen: int, where: object) -> None:
        fingerprint = seen or 1  # 0 means that there is none
        self._written = place, fingerprint, where
        self._marks.set_data(self._fit, place, self._shards, fingerprint)


# Combine the tests of all workers over an `insitu.dataset`, of which each has its own shards (mode sync)


_LOG = logging.getLogger("insitu")
_NEVER = 1 << 62
"""The number of a push that no worker comes to."""


class SharedTests:
    """Gives each worker the records of all shards in each step of a test.

    In a fit, workers come to the same tests between the same pushes. So a test is named by the number of the
    push that follows, the depth of the call, and its number among those. A restarted worker continues behind
    its pushes, maybe past a test. Between fits it comes to all tests again.
    """

    def __init__(self, session: ParameterServerSession) -> None:
        self._session = session
        #: The fit under way, or that which ended last. Written by `begin_fit` and `end_fit`.
        self._fit = ""
        self._is_in_fit = False
        #: Tests since the last push, by depth of the call. Written by `_begin`.
        self._counts: dict[int, int] = {}
        #: The place of this count: the fit and the number of the next push.
        self._counted_at: tuple[str, int] = ("", 0)
        self._tells_of_missing = True

    def begin_fit(self, fit: int) -> None:
        self._fit, self._is_in_fit = f"in fit {fit}", True

    def end_fit(self, fit: int) -> None:
        self._fit, self._is_in_fit = f"after fit {fit}", False

    def applies(self, parts: Sequence[ShardBatch]) -> bool:
        """Return whether the data are cut into the shards of the job, and this worker has some of them."""
        shards = self._session.num_shards
        return bool(parts) and len(parts) < parts[0].dataset_shards == shards

    def share(
        self, position: LoopPosition, records: Mapping[int, NDArray[np.float64]]
    ) -> NDArray[np.float64]:
        """Return the records of all shards, in their order, for those of this worker's by shard, each of
        shape (rows, size). Raises ServerStalled."""
        sequence = self._session.sequence if self._is_in_fit else _NEVER
        if position.test == 0:
            self._begin(sequence, position.depth)
        number = self._counts.get(position.depth, 0)
        place = f"{self._fit} {sequence} {position.depth} {number} {position.test}"
        found, shards = self._session.gather(place, sequence, records)
        if len(shards) < self._session.num_shards and self._tells_of_missing:
            self._tells_of_missing = False
            missing = sorted(set(range(self._session.num_shards)) - set(shards))
            _LOG.warning(
                "An evaluation leaves out rows of shards %s: their worker was restarted in it. Evaluate once "
                "more for the scores of all rows.",
                missing,
            )
        return found

    def _begin(self, sequence: int, depth: int) -> None:
        here = self._fit, sequence
        if here != self._counted_at:
            self._counted_at, self._counts = here, {}
        self._counts[depth] = self._counts.get(depth, 0) + 1


# Scale a worker's losses, so that small gradients of half precision don't vanish.
#
# A LossScaleOptimizer doubles its scale now and then, and halves it if a gradient isn't finite. On
# parameter servers each worker does so for its own gradients: it divides them by its scale before it pushes
# them, and pushes none that overflowed


class LossScale:
    """The loss scale of one optimizer, constant during a step: that of a LossScaleOptimizer, or an
    optimizer's own `loss_scale_factor`, which never changes."""

    def __init__(self, optimizer: Any) -> None:
        inner = inner_optimizer(optimizer)
        self._optimizer = optimizer if inner is not optimizer else None
        self._scale = float(getattr(inner, "loss_scale_factor", None) or 1.0)
        self._overflowed = False

    @property
    def changes(self) -> bool:
        """True if gradients are divided at all."""
        return self._optimizer is not None or self._scale != 1.0

    def begin(self) -> None:
        """Begin a step: read the scale."""
        if self._optimizer is not None:
            self._scale = float(to_numpy(self._optimizer.dynamic_scale))
            self._overflowed = False

    def unscale(self, gradient: NDArray[Any]) -> bool:
        """Divide one shard's gradient, in place. Returns False for one that isn't finite and must not be
        pushed."""
        if self._optimizer is not None and not np.isfinite(gradient).all():
            self._overflowed = True
            return False
        if self._scale != 1.0:
            gradient /= gradient.dtype.type(self._scale)
        return True

    def end(self) -> None:
        """End the step: grow or shrink the scale as its optimizer would."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        steps = int(to_numpy(optimizer.step_counter)) + 1
        if self._overflowed:
            optimizer.dynamic_scale.assign(self._scale * 0.5)
            steps = 0
        elif steps == optimizer.dynamic_growth_steps:
            optimizer.dynamic_scale.assign(self._scale * 2.0)
            steps = 0
        optimizer.step_counter.assign(steps)


# Run custom loops on parameter servers: `strategy.run` pushes and pulls as a step of `fit` does


class ServerAggregation:
    """See `LoopAggregation`. Servers that don't wait update by each replica's gradient, a mean over its own
    rows, and no call waits for other workers. With `members`, gradients are summed over them as over the
    exchange: a mode that waits for all gradients may as well count rows with all workers.

    A worker that was restarted runs its script again from the start: what the servers have of its steps is
    computed once more, since the script may want to know what came of it, but not pushed.
    """

    def __init__(self, members: Membership | None) -> None:
        self._summed = None if members is None else ExchangeAggregation(members)
        self.replicas = 1 if self._summed is None else self._summed.replicas

    def count_step_rows(self, rows: Sequence[int]) -> tuple[list[int], int]:
        return (list(rows), 1) if self._summed is None else self._summed.count_step_rows(rows)

    def synchronize(self, variables: Sequence[Any]) -> None:
        """Do nothing: trained variables get their values from the servers, and the rest is each worker's
        own."""


class ServerLoopStep(TrainOrObserveStep):
    """See `LoopStep`. `step` is None if nothing is trained: then only metrics move, each worker's own."""

    def __init__(self, replica: LoopReplica, step: ServerStep | None, shards: int) -> None:
        super().__init__(replica, step)
        self._records = np.zeros((shards, replica.train_record_size))

    def _observe(self, parts: Sequence[ShardBatch]) -> None:
        nothing = np.empty(self._replica.floats_size, self._replica.floats_dtype)
        self._records[:] = 0
        for index, part in enumerate(parts):
            if part.rows:
                self._replica.gradient(part.shard, part.data, nothing, self._records[index])
        if self._records[:, 0].any():
            self._replica.apply(nothing, self._records)


def optimizer_of(model: Any) -> Any:
    """Return the only optimizer of a loop's step. Raises TrainingError for several."""
    groups = model.optimizer.groups
    if len(groups) != 1:
        raise TrainingError(
            "A step on parameter servers trains by one optimizer, which the servers hold. Received: a "
            f"step with {len(groups)}. Use MultiWorkerMirroredStrategy for it."
        )
    return groups[0][0]


def check_coordination(mode: str, shards: int, has_trained: bool) -> None:
    """Raise TrainingError if a coordinator can't hand out steps: `shards` are those of this worker."""
    if mode != "async":
        received = f"mode={mode!r}, in which servers wait for workers that may have no step to run. Pass "
        advice = 'mode="async"'
    elif shards != 1:
        received = f"a worker with {shards} shards. Start the job with "
        advice = "as many workers as the cache has partitions at most, or without a cache"
    elif has_trained:
        received = "a strategy that has trained before. Make the ClusterCoordinator "
        advice = "right behind the strategy"
    else:
        return
    raise TrainingError(
        "A ClusterCoordinator hands out steps, each of which is one worker's own update. Received: "
        f"{received}{advice}."
    )


# Attach tables on servers to the Embeddings of a model


def attach_tables(
    model: Any,
    example: Any,
    part_rows: int | None,
    session: Callable[[], ParameterServerSession],
    optimizer: Any,
    *,
    bounded: bool = False,
) -> None:
    """Attach a table of `session()` to each Embedding of `model`, with room for the keys of one shard's batch
    like `example`, of `part_rows` rows if that is known. `optimizer` updates the tables' rows. The worker
    clips the norms of the rows' gradients if `bounded`; else they must have no bounds."""
    layers = embeddings_of(model)
    if not layers:
        return
    if not bounded:
        check_norms_of_rows(optimizer)
    leaves = find_key_inputs(model, layers, example)
    arrays = keras.tree.flatten(example)
    for layer, numbers in zip(layers, leaves, strict=True):
        if layer.rows is None or not getattr(layer.rows, "insitu_rows", False):
            keys = sum(int(arrays[n][0].size) for n in numbers) * (part_rows or DEFAULT_SHARD_ROWS)
            layer.attach(session().table(layer, optimizer), keys)
            # A loaded one knows the saved tables, or none, and servers don't take over its state.
            if model.optimizer is not None and inner_optimizer(model.optimizer).built:
                replace_optimizer(model)
