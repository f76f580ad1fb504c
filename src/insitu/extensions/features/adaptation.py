"""`insitu.adapt`: Keras' `adapt` over the partitions of a cache, each read where it is.

In a job each task reads the partitions of its shards, and leaves their statistics in the job's folder, from
which all tasks take those of the others. So a task that is started again finds what was done.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.layers.preprocessing.discretization import compress_summary

from insitu.base.context import context as read_context
from insitu.base.disk.durable import replace_file
from insitu.base.errors import InputError, InsituError
from insitu.extensions.features.statistics import (
    QUANTILE_POINTS,
    Arrays,
    Counts,
    HasNaN,
    MeanAndVariance,
    Quantiles,
    Statistic,
)
from insitu.grid import Dataset, dataset

_POLL_SECONDS = 0.05
_TAKE_OVER_SECONDS = 60.0
"""Seconds without news of the others' partitions, after which a task reads one of them itself."""
_PROGRESS_SECONDS = 5.0
_calls = itertools.count()
"""Numbers the calls of this process: the tasks of a job make the same ones."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a layer is adapted."""

    #: Computes what the layer needs.
    statistic: Any
    #: Gives the layer the statistics of all rows.
    finish: Callable[[Arrays], None]


def adapt(layers: Any, data: Dataset | str) -> None:
    """Adapt preprocessing layers to all rows of a cache, in one pass over each partition where it is.

    Layers are keras.layers.Normalization, Discretization, StringLookup and IntegerLookup. In a job each task
    reads the partitions of its shards, so call it in all of them; all layers become the same. Statistics are
    merged in the order of partitions: the numbers are the same bits on any number of nodes.

    Args:
        layers: a layer, or a dict of layers by feature.
        data: an insitu.dataset, of one feature or of a dict of features, as after its maps; or the name of a
            cache, with a dict of layers.

    Means and variances are those of Keras' adapt, in double precision. Vocabularies are the same. Boundaries
    are Keras' own within its `epsilon`, and closer to the true quantiles: each is wrong by 1/16384 of the
    rows at most.

    Raises InputError for what can't be adapted so, and for NaN.
    """
    by_name, is_single = ({"": layers}, True) if not isinstance(layers, Mapping) else (dict(layers), False)
    if isinstance(data, str):
        if is_single:
            raise InputError(
                f"A cache has columns. Received: the name {data!r} for one layer. Pass a dict of layers by "
                "column, or an insitu.dataset with one feature"
            )
        data = dataset(data, features=list(by_name), label=None)
        is_single = len(by_name) == 1  # the features are one array then
    if not isinstance(data, Dataset):
        raise InputError(
            f"insitu.adapt reads an insitu.dataset, or the name of a cache. Received: {type(data).__name__}. "
            "For arrays there is layer.adapt"
        )
    pick = _make_pick(data, by_name, is_single)
    spec = keras.utils.unpack_x_y_sample_weight(data.element_spec)[0]
    plans = {
        name: _plan(layer, spec[name] if isinstance(spec, Mapping) else spec)
        for name, layer in by_name.items()
    }
    parts = _Partitions(data, {name: plan.statistic for name, plan in plans.items()}, pick)
    found = parts.compute()
    for name, plan in plans.items():
        plan.finish(plan.statistic.merge([part[name] for part in found]))


def _make_pick(data: Dataset, layers: Mapping[str, Any], is_single: bool) -> Callable[[Any, str], Any]:
    """Return a function that returns the values of a feature of a batch. Raises InputError."""
    features = keras.utils.unpack_x_y_sample_weight(data.element_spec)[0]
    if is_single:
        if isinstance(features, Mapping):
            raise InputError(
                f"One layer adapts to one feature. Received: {', '.join(features)}. Pass a dict of layers by "
                "feature, or features= to insitu.dataset"
            )
        return lambda batch, name: keras.utils.unpack_x_y_sample_weight(batch)[0]
    known = list(features) if isinstance(features, Mapping) else []
    unknown = next((name for name in layers if name not in known), None)
    if unknown is not None or not layers:
        raise InputError(
            f"Layers are given by feature: {', '.join(known) or 'the data has one, without a name'}. "
            f"Received: {unknown!r}"
        )
    return lambda batch, name: keras.utils.unpack_x_y_sample_weight(batch)[0][name]


def _plan(layer: Any, spec: Any) -> _Plan:
    """Return how a layer is adapted to values of a spec. Raises InputError."""
    if isinstance(layer, keras.layers.Normalization):
        return _plan_normalization(layer, spec)
    if isinstance(layer, keras.layers.Discretization):
        return _plan_discretization(layer)
    if isinstance(layer, keras.layers.StringLookup):
        return _plan_lookup(layer, of_texts=True)
    if isinstance(layer, keras.layers.IntegerLookup):
        return _plan_lookup(layer, of_texts=False)
    raise InputError(
        "insitu.adapt takes keras.layers.Normalization, Discretization, StringLookup and IntegerLookup. "
        f"Received: {type(layer).__name__}. Call its own adapt"
    )


def _plan_normalization(layer: Any, spec: Any) -> _Plan:
    if layer.input_mean is not None:
        raise InputError(
            f"A layer is adapted, or has its mean and variance. Received: {layer.name!r} with both. Leave "
            "out mean= and variance="
        )
    shape = (None, *spec.shape[1:])
    if len(shape) == 1 and layer.axis:
        raise InputError(
            f"Rows of a Normalization have the axes that it keeps. Received: axis={layer.axis} for rows that "
            "are single numbers. Pass axis=None, or map values[:, None]"
        )
    if not layer.built:
        layer.build(shape)
    elif tuple(layer._build_input_shape[1:]) != shape[1:]:
        built = tuple(layer._build_input_shape[1:])
        raise InputError(
            f"A layer adapts to rows of the shape {built} that it was built for. Received: {shape[1:]}"
        )

    def finish(found: Arrays) -> None:
        if not int(found["count"]):
            raise InputError("Means are of rows. Received: a cache without rows")
        layer.adapt_mean.assign(found["mean"])
        layer.adapt_variance.assign(found["squares"] / int(found["count"]))
        layer.finalize_state()

    return _Plan(MeanAndVariance(tuple(layer._reduce_axis)), finish)


def _plan_discretization(layer: Any) -> _Plan:
    if layer.num_bins is None:
        raise InputError(
            f"A Discretization is adapted, or has its bin_boundaries. Received: {layer.name!r} with "
            "boundaries. Make it with num_bins"
        )

    def finish(found: Arrays) -> None:
        if not len(found["values"]):
            raise InputError("Quantiles are of rows. Received: a cache without rows")
        layer.summary = np.stack([found["values"].astype(np.float64), found["weights"].astype(np.float64)])
        layer.finalize_state()
        # What is saved with the layer is as large as Keras has it.
        layer.summary = compress_summary(layer.summary, layer.epsilon).astype(np.float32)

    return _Plan(Quantiles(max(QUANTILE_POINTS, int(10 / layer.epsilon))), finish)


def _plan_lookup(layer: Any, *, of_texts: bool) -> _Plan:
    if layer.output_mode == "tf_idf" or layer._has_input_vocabulary:
        given = "output_mode='tf_idf'" if layer.output_mode == "tf_idf" else "a vocabulary"
        raise InputError(
            f"insitu.adapt finds the vocabulary of a layer without one. Received: {layer.name!r} with "
            f"{given}. Call its own adapt, or leave the vocabulary"
        )
    statistic = Counts(of_texts)

    def finish(found: Arrays) -> None:
        special = (layer.mask_token, layer.oov_token)
        values = [value for value in statistic.by_frequency(found) if value not in special]
        if layer.max_tokens:
            values = values[: layer.max_tokens - layer._token_start_index()]
        if not values:
            raise InputError(f"A vocabulary has values. Received: data that has none for {layer.name!r}")
        layer.set_vocabulary(values)

    return _Plan(statistic, finish)


def _advise_to_fill(data: Dataset, name: str) -> str:
    """Return the call of `map` that gives numbers to what is missing in a feature."""
    parts = ["x", "y", "w"][: len(data.element_spec) if isinstance(data.element_spec, tuple) else 1]
    features = keras.utils.unpack_x_y_sample_weight(data.element_spec)[0]
    is_named = isinstance(features, Mapping)
    filled = f"{{**x, {name!r}: numpy.nan_to_num(x[{name!r}])}}" if is_named else "numpy.nan_to_num(x)"
    made = filled if len(parts) == 1 else f"({', '.join([filled, *parts[1:]])})"
    return f"Pass a dataset that fills them, such as dataset.map(lambda {', '.join(parts)}: {made})"


class _Partitions:
    """Computes the statistics of all partitions of a dataset, those of this task's shards first."""

    def __init__(
        self, data: Dataset, statistics: Mapping[str, Statistic], pick: Callable[[Any, str], Any]
    ) -> None:
        self._data = data
        self._statistics = statistics
        self._pick = pick
        shards = data.shard_map.shards
        #: The shard of each partition.
        self._shard_of = {index: shard for shard, held in enumerate(shards) for index in held}
        context = read_context()
        self._job = context.job
        self._is_chief = context.is_chief
        own = data.shards if self._job is not None else range(len(shards))
        self._own = sorted(index for shard in own for index in shards[shard])
        #: Where the tasks of a job leave statistics; None outside a job. Written by `compute`.
        self._folder: Path | None = None
        #: Held while a user's function maps rows. They are read and counted in threads.
        self._mapping = threading.Lock()
        #: When the last line of progress was printed, by the monotonic clock.
        self._printed = time.monotonic()

    def compute(self) -> list[dict[str, Arrays]]:
        """Return the statistics by layer of each partition, in their order. Raises InputError."""
        number = next(_calls)
        if self._job is not None:
            cache = self._data.cache
            said = repr(
                (cache.name, cache.version, sorted((n, repr(s)) for n, s in self._statistics.items()))
            )
            digest = hashlib.sha256(said.encode()).hexdigest()[:16]
            self._folder = self._job.statistics / f"{number:05d}-{digest}"
            self._folder.mkdir(parents=True, exist_ok=True)
        found: dict[int, dict[str, Arrays]] = {}
        with ThreadPoolExecutor(max(1, min(len(self._own), os.cpu_count() or 1))) as pool:
            for index, part in zip(self._own, pool.map(self._find_or_read, self._own), strict=True):
                found[index] = part
                self._report(len(found))
        self._collect(found)
        return [found[index] for index in sorted(found)]

    def _collect(self, found: dict[int, dict[str, Arrays]]) -> None:
        """Wait for the partitions that other tasks read. One that nobody leaves is read here."""
        since = time.monotonic()
        while missing := [index for index in sorted(self._shard_of) if index not in found]:
            news = [(index, part) for index in missing if (part := self._load(index)) is not None]
            found.update(news)
            if news:
                since = time.monotonic()
                self._report(len(found))
            elif time.monotonic() - since > _TAKE_OVER_SECONDS:
                found[missing[0]] = self._read_of_others(missing[0])
            else:
                time.sleep(_POLL_SECONDS)

    def _read_of_others(self, index: int) -> dict[str, Arrays]:
        """Read a partition of another task's shards. Raises InputError if this task can't."""
        try:
            return self._read(index)
        except InputError:
            raise
        except InsituError as error:
            raise InputError(
                "In a job insitu.adapt needs hosts that share the job's folder, or reach all partitions. "
                f"Received: partition {index} of {self._data.cache.name}, of which no task has left "
                f"statistics, and {type(error).__name__}: {error}. Give the layers their mean, boundaries or "
                "vocabulary"
            ) from error

    def _find_or_read(self, index: int) -> dict[str, Arrays]:
        return self._load(index) or self._read(index)

    def _read(self, index: int) -> dict[str, Arrays]:
        """Return the statistics of one partition, and leave them for the others."""
        blocks = list(self._data.partition_batches(self._shard_of[index], index, self._mapping))
        part = {}
        for name, statistic in self._statistics.items():
            try:
                part[name] = statistic.of_partition([self._pick(block, name) for block in blocks])
            except InputError as error:
                of = f"the feature {name!r} in " if name else ""
                advice = f". {_advise_to_fill(self._data, name)}" if isinstance(error, HasNaN) else ""
                place = f"This is {of}partition {index} of {self._data.cache.name}"
                raise InputError(f"{error}. {place}{advice}") from error
        if self._folder is not None:
            buffer = io.BytesIO()
            named: dict[str, Any] = {
                f"{name}/{key}": v for name, arrays in part.items() for key, v in arrays.items()
            }
            np.savez(buffer, **named)
            replace_file(self._folder / f"{index:05d}.npz", buffer.getvalue())
        return part

    def _load(self, index: int) -> dict[str, Arrays] | None:
        """Return what a task has left of a partition, or None."""
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{index:05d}.npz", allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        except FileNotFoundError:
            return None
        part: dict[str, Arrays] = {name: {} for name in self._statistics}
        for name, values in arrays.items():
            layer, _, key = name.rpartition("/")
            part[layer][key] = values
        return part

    def _report(self, done: int) -> None:
        now = time.monotonic()
        if self._is_chief and (now - self._printed >= _PROGRESS_SECONDS):
            self._printed = now
            sys.stderr.write(f"[insitu] adapt: {done} of {len(self._shard_of)} partitions\n")
            sys.stderr.flush()
