"""Let Keras' losses divide by what counts in the global batch, or go over its rows.

The gradient of a step is the mean over shards by rows. So a loss of a shard must be the mean over its rows,
as most are. Some of Keras' divide by something else: a masked loss by the entries that count, another by the
sum of the weights. The divisors are counted first, on all shards, and added up: these are the *totals* of a
step. With them a shard's loss becomes its part of the whole batch's, times rows of all over rows of its own.

A step's totals are [rows, total of the first loss, ...], in the order in which the step calls its losses.

A loss that is marked with rows="global" gets the rows of all shards, which are gathered before as well. So
each shard computes the same loss. Rows of others are constants. The gradient of its own rows is scaled by
rows of all over rows of its own: then the mean over shards by rows is the gradient of the loss. A weight that
the loss reads, such as a temperature, has the whole gradient in each shard, which is the mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import keras
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss

from insitu.base.errors import TrainingError
from insitu.train.replica.batch_losses import OF_PAIRS, call_over_batch, intercept_global
from insitu.train.replica.metric_results import unique_metrics

ops = keras.ops
_MEANS = ("mean", "sum_over_batch_size")


class LossCounts(NamedTuple):
    """Contribution of a step's losses on a part of a batch to that of the whole batch."""

    totals: Any
    """Addition to the totals, without rows."""
    rows: Sequence[Any]
    """The tensors that losses over the global batch get, rows first, in the order of their calls."""


class BatchTotals(NamedTuple):
    """Facts about the whole batch for the losses of a step on a part of it."""

    totals: Any
    """The totals."""
    rows: Sequence[Any] = ()
    """`LossCounts.rows` of all parts, joined."""
    start: Any = 0
    """The number of rows before those of the part."""


class NeedsTotals(BaseException):
    """A loss needs totals, and has none. No Exception, so that no code of a step's takes it for an error."""


class Kind(Enum):
    """The losses that are no means over rows."""

    MASKED = auto()
    """A sum, divided by the number of entries that a mask lets through."""
    WEIGHTED = auto()
    """A sum, divided by the sum of weights."""
    SUM = auto()
    """A sum."""
    SCALAR = auto()
    """One number for the batch, times something made of the weights of all rows."""


def find_kind(
    values: Any, sample_weight: Any, mask: Any, reduction: str | None, *, compiled: bool
) -> Kind | None:
    """Return what is done to the `values` of a loss; None for a mean over rows. `compiled` marks a loss given
    to compile(): what a step does with a sum of its own isn't known."""
    weighs = _has_rows(sample_weight) or mask is not None
    if reduction in (None, "none") or (reduction == "sum" and not compiled):
        return None
    if len(values.shape) == 0:
        return Kind.SCALAR if weighs else None
    if reduction == "sum" or (reduction not in _MEANS and sample_weight is not None and not weighs):
        return Kind.SUM
    if reduction in _MEANS:
        return Kind.MASKED if mask is not None else None
    return Kind.WEIGHTED if weighs else None


def _has_rows(weight: Any) -> bool:
    return weight is not None and len(ops.shape(weight)) > 0


class _Losses:
    """Replaces Keras' reduction of a loss. Here: raises NeedsTotals if totals would be needed."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        #: Whether a loss given to compile() is under way. Written by `_replaced`.
        self.compiled = False
        #: Whether a loss over the rows of the global batch is under way. Written by `over_batch`.
        self._has_all_rows = False

    def over_batch(self, arguments: Any, call: Callable[[Any], Any]) -> Any:
        """Return what `call`, a loss over the rows of the global batch, returns for these rows instead of
        those in `arguments`."""
        if self._has_all_rows:
            return call(arguments)
        self._has_all_rows = True
        try:
            return call_over_batch(arguments, self.take_rows, call)
        finally:
            self._has_all_rows = False

    def take_rows(self, own: list[Any]) -> list[Any]:
        """Return tensors with the rows of the global batch for those with the shard's own."""
        raise NeedsTotals

    def reduce(
        self,
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        """Do as Keras' reduce_weighted_values."""
        values = ops.convert_to_tensor(values, dtype=dtype)
        kind = find_kind(values, sample_weight, mask, reduction, compiled=self.compiled)
        if kind is None or self._has_all_rows:
            return self.original(values, sample_weight, mask, reduction, dtype)
        return self.reduce_kind(kind, values, sample_weight, mask, reduction, dtype)

    def reduce_kind(self, kind: Kind, *arguments: Any) -> Any:
        """Return the loss of a kind."""
        raise NeedsTotals

    def count(self, kind: Kind, values: Any, weight: Any, mask: Any, reduction: str, dtype: Any) -> list[Any]:
        """Return what the loss adds to its totals."""
        if kind is Kind.SUM:
            return []
        if kind is Kind.MASKED:
            return [_sum(mask)]
        if kind is Kind.WEIGHTED:
            return [self._sum_weights(weight, mask, dtype)]
        factor = ops.cast(self._factor(values, weight, mask, reduction, dtype), "float32")
        if reduction == "sum":
            return [factor]
        if reduction not in _MEANS:
            count = self._sum_weights(weight, mask, dtype)
        else:
            count = _sum(mask if mask is not None else ops.ones_like(weight))
        return [factor * count, count]

    def _factor(self, values: Any, weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
        """Return by what Keras multiplies a loss that is one number."""
        return self.original(ops.ones_like(values), weight, mask, reduction, dtype)

    @staticmethod
    def _sum_weights(weight: Any, mask: Any, dtype: Any) -> Any:
        tensors = [None if each is None else ops.convert_to_tensor(each, dtype) for each in (weight, mask)]
        weights = keras_loss.apply_mask(*tensors, dtype=dtype or "float32", reduction="sum")
        return ops.sum(ops.cast(weights, "float32"))


class _Counting(_Losses):
    """Collects what losses add to their totals."""

    def __init__(self, original: Callable[..., Any]) -> None:
        super().__init__(original)
        self.counts: list[Any] = []
        self.rows: list[Any] = []

    def take_rows(self, own: list[Any]) -> list[Any]:
        for each in map(ops.stop_gradient, own):  # so that on JAX they may leave what is differentiated
            # Not every backend hands half precision to NumPy.
            self.rows.append(ops.cast(each, "float32") if "16" in str(each.dtype) else each)
        return own

    def reduce_kind(self, kind: Kind, *arguments: Any) -> Any:
        self.counts += self.count(kind, *arguments)
        return self.original(*arguments)


class _Dividing(_Losses):
    """Divides by totals, of a batch of which this one, of `rows` rows, is a part."""

    def __init__(self, original: Callable[..., Any], batch: BatchTotals, rows: Any) -> None:
        super().__init__(original)
        self._totals = totals = ops.cast(batch.totals, "float32")
        self._batch = batch
        self._rows = rows
        #: Tensors of rows that losses have taken. Written by `take_rows`.
        self._taken = 0
        #: This part's share of the rows.
        self._share = ops.cast(rows, "float32") / totals[0]
        self._next = 1

    def take_rows(self, own: list[Any]) -> list[Any]:
        start, self._taken = self._taken, self._taken + len(own)
        if self._taken > len(self._batch.rows):
            raise TrainingError(_OTHER_CALLS)
        taken = self._batch.rows[start : self._taken]
        return [self._with_own(*pair) for pair in zip(taken, own, strict=True)]

    def _with_own(self, rows: Any, own: Any) -> Any:
        """Return `rows`, of which those of this part pass a gradient on to `own`."""
        if len(rows.shape) != len(own.shape) or any(
            None not in pair and pair[0] != pair[1]
            for pair in zip(rows.shape[1:], own.shape[1:], strict=True)
        ):
            raise TrainingError(OF_PAIRS)
        dtype = keras.backend.standardize_dtype(own.dtype)
        rows = ops.cast(rows, dtype)
        if "float" not in dtype:
            return rows
        moved = own - ops.stop_gradient(own)  # zeros
        moved = ops.where(ops.isfinite(moved), moved, ops.zeros_like(moved))
        padded = ops.concatenate([moved, ops.zeros_like(moved[:1])])
        places = ops.arange(ops.shape(rows)[0], dtype="int32") - ops.cast(self._batch.start, "int32")
        is_own = ops.logical_and(places >= 0, places < self._rows)
        places = ops.where(is_own, places, ops.cast(self._rows, "int32"))
        return rows + _times(ops.take(padded, places, axis=0), 1 / self._share)

    def _take(self) -> Any:
        if self._next >= self._totals.shape[0]:
            raise TrainingError(_OTHER_CALLS)
        self._next += 1
        return self._totals[self._next - 1]

    def reduce_kind(self, kind: Kind, *arguments: Any) -> Any:
        values, weight, mask, reduction, dtype = arguments
        if kind is Kind.SUM:
            return _times(self.original(*arguments), 1 / self._share)
        if kind is Kind.MASKED:
            # Keras divides by its own count, whatever else it divides by.
            own, total = _sum(mask), self._take()
            return _times(self.original(*arguments), ops.divide_no_nan(own, self._share * total))
        if kind is Kind.WEIGHTED:
            added = self.original(values, weight, mask, "sum", dtype)
            return _times(added, ops.divide_no_nan(ops.ones(()), self._share * self._take()))
        factor = self._take()
        if reduction != "sum":
            factor = ops.divide_no_nan(factor, self._take())
        return _times(values, factor)


_OTHER_CALLS = (
    "A step calls its losses in the same order each time. Received: more calls of losses with masks or "
    "weights, or over the global batch, than when they were counted. Leave out what depends on chance or on "
    "data."
)


def _sum(mask: Any) -> Any:
    return ops.sum(ops.cast(mask, "float32"))


def _times(loss: Any, factor: Any) -> Any:
    return loss * ops.cast(factor, loss.dtype)


@contextlib.contextmanager
def demand_totals(model: Any) -> Iterator[None]:
    """While open, a loss of `model` that needs totals raises NeedsTotals."""
    with _replaced(model, _Losses(keras_loss.reduce_weighted_values)):
        yield


@contextlib.contextmanager
def count_losses(model: Any) -> Iterator[LossCounts]:
    """While open, collect what losses of `model` add to the totals: float32 scalars. Its metrics aren't
    updated, so that what only they need isn't computed."""
    metrics = unique_metrics(model)
    losses = _Counting(keras_loss.reduce_weighted_values)
    for metric in metrics:
        object.__setattr__(metric, "update_state", _update_nothing)
    try:
        with _replaced(model, losses):
            yield LossCounts(losses.counts, losses.rows)
    finally:
        for metric in metrics:
            object.__delattr__(metric, "update_state")


def _update_nothing(*arguments: Any, **options: Any) -> None:
    del arguments, options


@contextlib.contextmanager
def divide_by_totals(model: Any, batch: BatchTotals, rows: Any) -> Iterator[None]:
    """While open, losses of `model` are the parts that `rows` rows have in those of the batch that `batch`
    describes."""
    with _replaced(model, _Dividing(keras_loss.reduce_weighted_values, batch, rows)):
        yield


@contextlib.contextmanager
def _replaced(model: Any, losses: _Losses) -> Iterator[None]:
    call = CompileLoss.call

    def call_compiled(*arguments: Any, **options: Any) -> Any:
        outer, losses.compiled = losses.compiled, True
        try:
            return call(*arguments, **options)
        finally:
            losses.compiled = outer

    CompileLoss.call = call_compiled
    keras_loss.reduce_weighted_values = losses.reduce
    try:
        with intercept_global(model, losses.over_batch):
            yield
    finally:
        CompileLoss.call = call
        keras_loss.reduce_weighted_values = losses.original
