"""`insitu.adapt`: Keras' `adapt` over the partitions of a cache, each read where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.layers.preprocessing.discretization import compress_summary

from insitu.base.errors import InputError
from insitu.extensions.features.statistics import QUANTILE_POINTS, HasNaN, MeanAndVariance, Quantiles
from insitu.grid import Arrays, Counts, Dataset, PartitionStatistics, dataset


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

    Example:
        >>> layer = keras.layers.Normalization()
        >>> insitu.adapt(layer, insitu.dataset("digits/train", label=None, features="image").batch(32))
        >>> tuple(layer.mean.shape)
        (1, 64)
    """
    is_by_name = isinstance(layers, Mapping)
    shown = "dataset"  # in a call that can be pasted
    if isinstance(data, str):
        if not is_by_name:
            raise InputError(
                f"A cache has columns. Received: the name {data!r} for one layer. Pass a dict of layers by "
                "column, or an insitu.dataset with one feature"
            )
        shown = f"insitu.dataset({data!r}, features={list(layers)!r}, label=None)"
        data = dataset(data, features=list(layers), label=None)
    if not isinstance(data, Dataset):
        raise InputError(
            f"insitu.adapt reads an insitu.dataset, or the name of a cache. Received: {type(data).__name__}. "
            "For arrays there is layer.adapt"
        )
    by_name = dict(layers) if is_by_name else {data.feature_name or "": layers}
    pick = _make_pick(data, by_name, is_by_name)
    plans = {name: _plan(layer, pick(data.element_spec, name)) for name, layer in by_name.items()}
    statistics = {name: plan.statistic for name, plan in plans.items()}

    def advise(error: InputError, name: str) -> str:
        return _advise_to_fill(data, shown, name) if isinstance(error, HasNaN) else ""

    found = PartitionStatistics(data, statistics, pick, "insitu.adapt", advise).compute()
    for name, plan in plans.items():
        plan.finish(plan.statistic.merge([part[name] for part in found]))


def _make_pick(data: Dataset, layers: Mapping[str, Any], is_by_name: bool) -> Callable[[Any, str], Any]:
    """Return a function that returns the values of a feature of a batch, or their spec. Raises InputError."""
    features = keras.utils.unpack_x_y_sample_weight(data.element_spec)[0]
    if isinstance(features, Mapping) and not is_by_name:
        raise InputError(
            f"One layer adapts to one feature. Received: {', '.join(features)}. Pass a dict of layers by "
            "feature, or features= to insitu.dataset"
        )
    if not isinstance(features, Mapping) and (not is_by_name or list(layers) == [data.feature_name]):
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


def _advise_to_fill(data: Dataset, opened: str, name: str) -> str:
    """Return the call of `map` that gives numbers to what is missing in a feature. `opened` is the dataset in
    Python."""
    parts = ["x", "y", "w"][: len(data.element_spec) if isinstance(data.element_spec, tuple) else 1]
    features = keras.utils.unpack_x_y_sample_weight(data.element_spec)[0]
    is_named = isinstance(features, Mapping)
    filled = f"{{**x, {name!r}: numpy.nan_to_num(x[{name!r}])}}" if is_named else "numpy.nan_to_num(x)"
    made = filled if len(parts) == 1 else f"({', '.join([filled, *parts[1:]])})"
    return f"Pass a dataset that fills them, such as {opened}.map(lambda {', '.join(parts)}: {made})"
