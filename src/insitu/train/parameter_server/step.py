"""The step of training with parameter servers: push the gradients of this task's shards, pull the servers'
values.

No other worker takes part. Where the servers wait for other workers' gradients (sync) or for the slowest
worker (bounded), they answer later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.errors import TrainingError
from insitu.parameters import copy_and_check
from insitu.train.elastic import LoopPosition
from insitu.train.parameter_server.data_check import DataCheck
from insitu.train.parameter_server.lookup import TableLookup
from insitu.train.parameter_server.loss_scale import LossScale
from insitu.train.parameter_server.model_spec import ClipNorms
from insitu.train.parameter_server.session import ParameterServerSession, ShardPush
from insitu.train.parameter_server.shared_tests import SharedTests
from insitu.train.parameter_server.weights_watch import WeightsWatch
from insitu.train.replica import Logs, NeedsTotals, Replica, ShardBatch

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
