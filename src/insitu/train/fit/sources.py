"""Makes a feed of whatever a user gives to `fit`, `evaluate` or `predict`."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import xxhash
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_data_adapter, array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.grain_dataset_adapter import GrainDatasetAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from insitu.base.errors import InputError
from insitu.grid import Dataset
from insitu.train.fit.adapter import refuse_beside_dataset, refuse_texts, take_whole
from insitu.train.fit.arrays import (
    ArraySource,
    DrawnOrder,
    Shuffle,
    count_array_rows,
    count_fit_of,
    default_batch_size,
    to_rows,
)
from insitu.train.fit.data_fingerprint import fingerprint_arrays, fingerprint_batch
from insitu.train.fit.feed import DatasetFeed, Feed, StreamFeed, weigh_classes
from insitu.train.fit.streams import (
    OrderedBatches,
    PyDatasetSource,
    RepeatedSource,
    Source,
    StreamSource,
    TensorFlowSource,
    TorchSource,
)


@dataclass(frozen=True, slots=True)
class Repeated:
    """Data for `fit` that is read again when it ends, so that an epoch continues over its end."""

    #: The argument `x` of `fit`.
    x: Any


def make_train_feed(model: Any, arguments: dict[str, Any], options: Mapping[str, Any]) -> Feed:
    """Return a feed of the data in the `arguments` of `fit`, which are taken out; part of it goes to
    validation. `options` are those of `make_feed` for this task's shards."""
    split = arguments.pop("validation_split", 0.0)
    data = tuple(arguments.pop(name) for name in ("x", "y", "sample_weight"))
    if split and arguments["validation_data"] is None:
        data, arguments["validation_data"] = array_slicing.train_validation_split(
            data, validation_split=split
        )
    data = (take_whole(data[0]), *data[1:])
    check_labels(model, data[0].x if isinstance(data[0], Repeated) else data[0], "fit")
    return make_feed(
        *data,
        batch_size=arguments.pop("batch_size"),
        steps=arguments["steps_per_epoch"],
        shuffle=arguments.pop("shuffle"),
        class_weight=arguments.pop("class_weight"),
        fit=count_fit_of(model),
        **options,
    )


def make_feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: Shuffle = False,
    class_weight: dict[int, float] | None = None,
    shards: Sequence[int],
    num_shards: int,
    replicas_per_shard: int = 1,
    seed: int = 0,
    fit: int = 0,
    launched_shards: Sequence[int] | None = None,
    several_processes: bool = False,
    may_be_endless: bool = False,
) -> Feed:
    """Return a feed over the rows of `x`.

    `batch_size` is that of the global batch; without it, `steps` divides arrays. `seed` and `fit`, the number
    of the fit, draw the order of arrays. `launched_shards` are those that the script's datasets were made
    for, if the task has others by now. With `several_processes`, steps show whether all were given the same.
    `may_be_endless` if the caller ends an iteration without a number of steps.

    Raises InputError for data that can't be cut into the same global batches in each process.
    """
    x = take_whole(x)
    is_repeated = isinstance(x, Repeated)
    if is_repeated:
        x = x.x.repeat() if isinstance(x.x, Dataset) and not x.x.is_refreshed else x.x
    if isinstance(x, Dataset):
        refuse_beside_dataset(y=y, sample_weight=sample_weight, batch_size=batch_size)
        if x.passes is None and steps is None and not may_be_endless:
            raise InputError(
                f"repeat() without a count has no end. Received: {x!r} without a number of steps. Pass "
                "steps_per_epoch to fit, steps to evaluate and predict, or a count to repeat."
            )
        refuse_texts(x)
        dataset = x.map(lambda *xy: weigh_classes(xy, class_weight)) if class_weight else x
        return DatasetFeed(dataset, shards, num_shards, launched_shards, replicas_per_shard)
    if len(shards) < num_shards and is_never_sharded(x):
        raise InputError(
            "Each process takes its part of each global batch, so it must be given all rows. Received: a "
            "tf.data.Dataset with AutoShardPolicy.OFF, which says that its rows are this process' own. Leave "
            "the policy out and give each process the same data; or use an insitu.Dataset, or a custom loop "
            "over strategy.distribute_datasets_from_function."
        )
    order = DrawnOrder(seed, fit)
    if array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        arrays = _make_array_source(x, y, sample_weight, batch_size, steps, shuffle, class_weight, order)
        number = fingerprint_arrays(arrays.leaves, arrays.order_numbers) if several_processes else 0
        fingerprint = (lambda batch: number) if several_processes else None
        source = RepeatedSource(arrays) if is_repeated else arrays
        return StreamFeed(source, shards, num_shards, arrays.batch_size, fingerprint)
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(
                f"Data of type {type(x).__name__} yields whole batches with labels and weights: leave {name} "
                f"out. Received: {name} of type {type(value).__name__}."
            )
    stream = _make_stream_source(x, class_weight, bool(shuffle), order, several_processes)
    stream = RepeatedSource(stream) if is_repeated else stream
    return StreamFeed(stream, shards, num_shards, None, fingerprint_batch if several_processes else None)


def is_never_sharded(x: Any) -> bool:
    """Return whether `x` is a `tf.data.Dataset` with `AutoShardPolicy.OFF`."""
    if not data_adapters.is_tf_dataset(x):
        return False
    policy: str = x.options().experimental_distribute.auto_shard_policy.name
    return policy == "OFF"


def _make_array_source(
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    steps: int | None,
    shuffle: Shuffle,
    class_weight: dict[int, float] | None,
    order: DrawnOrder,
) -> ArraySource:
    shuffle = shuffle if shuffle == "batch" else bool(shuffle)
    rows = count_array_rows((x, y, sample_weight))
    # Keras' own checks, and the weights that it makes out of those of classes.
    packed = ArrayDataAdapter(x, y, sample_weight, class_weight=class_weight)._inputs
    data = to_rows(packed if isinstance(packed, tuple) else (packed,))
    return ArraySource(data, batch_size or default_batch_size(rows, steps), shuffle, order)


def _make_stream_source(
    x: Any, class_weight: dict[int, float] | None, shuffle: bool, order: DrawnOrder, must_agree: bool
) -> Source:
    """Return the source of data that comes in batches, which processes may have to agree on."""
    backend = keras.backend.backend()
    if isinstance(x, keras.utils.PyDataset):
        ordered = OrderedBatches(x, order.generator) if shuffle and x.num_batches is not None else x
        batches = PyDatasetAdapter(ordered, class_weight)
        return PyDatasetSource(batches, ordered, batches.get_numpy_iterator)
    if data_adapters.is_tf_dataset(x):
        return _make_tensorflow_source(x, class_weight, order, must_agree)
    if not (data_adapters.is_torch_dataloader(x) or data_adapters.is_grain_dataset(x)) and not isinstance(
        x, types.GeneratorType
    ):
        raise InputError(
            "A strategy trains on an insitu.Dataset, arrays, a tf.data.Dataset, a keras.utils.PyDataset, a "
            f"torch DataLoader, a grain dataset or a generator. Received: {type(x).__name__}"
        )
    if class_weight is not None:
        raise InputError(
            f"class_weight needs arrays, a tf.data.Dataset, a PyDataset or an insitu.Dataset. Received: "
            f"class_weight with a {type(x).__name__}. Yield (x, y, weight of each row)."
        )
    if data_adapters.is_torch_dataloader(x):
        loader, eager = TorchDataLoaderAdapter(x), backend == "torch"
        return TorchSource(loader, x, x.__iter__ if eager else loader.get_numpy_iterator, eager=eager)
    if data_adapters.is_grain_dataset(x):
        grain = GrainDatasetAdapter(x)
        return StreamSource(grain, grain.get_numpy_iterator)
    generator = GeneratorDataAdapter(x)
    return StreamSource(generator, generator.get_numpy_iterator)


def _make_tensorflow_source(
    x: Any, class_weight: dict[int, float] | None, order: DrawnOrder, must_agree: bool
) -> Source:
    pipeline = find_random_pipeline(x, order, must_agree=must_agree)
    adapter = TFDatasetAdapter(x, class_weight)
    eager = keras.backend.backend() == "tensorflow"  # as Keras begins an iteration

    def start(iteration: int) -> Iterator[Any]:
        read = adapter if pipeline is None else TFDatasetAdapter(pipeline.at(iteration), class_weight)
        return iter(read.get_tf_dataset() if eager else read.get_numpy_iterator())

    return TensorFlowSource(
        adapter, start, eager=eager, is_read_whole=pipeline is not None and pipeline.is_read_whole
    )


# Refuses training without labels if the model's loss needs them, before Keras fails on `None`


_USUAL_NAMES = ("y", "labels", "target", "targets", "class")


def check_labels(model: Any, data: Any, method: str) -> None:
    """Raise InputError if `model.fit` or `model.evaluate` of `data` must fail for want of labels.

    Looks only at an `insitu.Dataset`, and only if failure is certain: a model with a step or a loss of
    its own may do without labels, and so may one that learns by `add_loss` alone.
    """
    if not isinstance(data, Dataset) or not _needs_labels(
        model, "train_step" if method == "fit" else "test_step"
    ):
        return
    if keras.utils.unpack_x_y_sample_weight(data.element_spec)[1] is not None:
        return
    if data.label is not None:
        advice = "Let the functions given to .map return (features, label)"
    else:
        names = [column.name for column in data.cache.columns]
        likely = next((name for name in _USUAL_NAMES if name in names), names[-1])
        advice = (
            f"The cache has the columns {', '.join(names)}: say which one holds the labels, such as "
            f"insitu.dataset({data.cache.name!r}, label={likely!r})"
        )
    raise InputError(
        f"{method} needs labels for the loss that the model was compiled with. Received: {data!r} without "
        f"labels. {advice}"
    )


def _needs_labels(model: Any, step: str) -> bool:
    """Return whether `step` and the loss are Keras' own, and so compute the loss from labels."""
    for name in (step, "compute_loss"):
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name):
            return False
    losses = keras.tree.flatten(getattr(getattr(model, "_compile_loss", None), "_user_loss", None))
    return any(_is_of_keras(loss) for loss in losses)


def _is_of_keras(loss: Any) -> bool:
    """Return whether Keras calls `loss` with labels and predictions of equal shape.

    It does so for names, functions and its own classes. Other classes may ignore the labels.
    """
    if isinstance(loss, keras.losses.Loss):
        return isinstance(loss, LossFunctionWrapper)
    return isinstance(loss, str) or callable(loss)


# Has the random operations of a `tf.data.Dataset` draw the same numbers in each process, and others in each
# epoch.
#
# TensorFlow gives such an operation two seeds when a function of `map` is traced. Without any it draws
# other numbers in each process; with some it draws the same ones in each iteration, and calls that run side
# by side take them in any order. So each iteration gets a copy of the pipeline: its seeds follow from those
# of the job and the number of the iteration, and TensorFlow rewrites it so that draws have an order.
# Whatever doesn't draw stays parallel. The copy shares the generators of the pipeline's shuffles, but not
# its variables. Functions that draw by variables, which continue from iteration to iteration, are rewritten
# without a copy


_WRITES = ("Assign", "Rng", "Stateful", "ResourceScatter")
"""How operations begin that change what outlives an iteration: a generator's state, a variable."""
_IGNORE = 1
"""Policy of `DatasetToGraphV2`: let resources of this process be referred to."""


@dataclass(frozen=True, slots=True)
class _Findings:
    """Actions of the functions of a pipeline."""

    #: Whether operations draw by seeds of their own.
    draws: bool = False
    #: Whether all of these have seeds.
    is_seeded: bool = True
    #: Whether functions change variables, as random layers of Keras and generators do.
    keeps_state: bool = False
    #: Whether calls of functions run side by side.
    is_parallel: bool = False


class RandomPipeline:
    """Gives a pipeline for each iteration of a dataset whose functions draw random numbers."""

    def __init__(self, dataset: Any, order: DrawnOrder, findings: _Findings) -> None:
        self._dataset = dataset
        self._order = order
        self.is_read_whole = findings.keeps_state and not _is_endless(dataset)
        """Whether an iteration must be read to its end for the next one to draw what it would."""
        self._graph = None if findings.keeps_state else _read_graph(dataset)

    def at(self, iteration: int) -> Any:
        """Return the dataset to read in this iteration."""
        import tensorflow as tf
        from tensorflow.python.data.ops.dataset_ops import _VariantDataset

        variant = self._dataset._variant_tensor
        if self._graph is not None:
            _Seeds(self._graph, (*self._order.numbers, iteration), (*self._order.numbers, 0)).assign()
            variant = tf.raw_ops.DatasetFromGraph(graph_def=self._graph.SerializeToString())
        variant = tf.raw_ops.OptimizeDatasetV2(
            input_dataset=variant,
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            **self._dataset._flat_structure,
        )
        return _VariantDataset(variant, self._dataset.element_spec)


def find_random_pipeline(dataset: Any, order: DrawnOrder, *, must_agree: bool) -> RandomPipeline | None:
    """Return the pipelines of `dataset`; None if it can be read as it is.

    It can if nothing is drawn, and if the script has seeded draws that have an order: then TensorFlow
    repeats them in each epoch. Raises InputError if no copy can be made though processes `must_agree`.
    """
    found = _examine(dataset)
    is_left = found.is_seeded and not has_seeded()
    if not found.keeps_state and (not found.draws or (is_left and not found.is_parallel)):
        return None
    if found.draws and found.keeps_state:
        raise InputError(
            "Functions of a tf.data.Dataset draw all random numbers by operations such as tf.random.uniform, "
            "or all by generators and layers that keep a state. Received: functions with both. Leave one out"
        )
    try:
        pipeline = RandomPipeline(dataset, order, found)
        pipeline.at(0)
    except Exception as error:
        if not must_agree:
            return None
        raise InputError(
            "Each process must be given the same data. Random operations in functions of a tf.data.Dataset "
            "draw the same numbers in each process where TensorFlow can write the dataset as a graph of less "
            f"than 2 GiB. Received: a dataset that it can't ({type(error).__name__}: {str(error)[:200]}). "
            "Draw in layers of the model, such as keras.layers.RandomFlip, import the rows with insitu, or "
            "draw by tf.random.stateless_* with a seed that comes with each row."
        ) from error
    return pipeline


def _examine(dataset: Any) -> _Findings:
    """Return what the functions of `dataset`, and of those that it is made of, do."""
    draws, seeded, writes, parallel = False, True, False, False
    for each in _walk(dataset):
        functions = each._functions()
        parallel |= bool(functions) and "Parallel" in type(each).__name__
        for function in functions:
            graph = function.function.graph.as_graph_def()
            for node in (*graph.node, *(n for f in graph.library.function for n in f.node_def)):
                writes |= node.op.startswith(_WRITES)
                parallel |= node.op.startswith("Parallel")
                if _is_draw(node):
                    draws = True
                    seeded &= bool(node.attr["seed"].i or node.attr["seed2"].i)
    return _Findings(draws, seeded, writes, parallel)


def _is_endless(dataset: Any) -> bool:
    return int(dataset.cardinality()) == -1  # tf.data.INFINITE_CARDINALITY


def _walk(dataset: Any) -> Iterator[Any]:
    yield dataset
    for each in dataset._inputs():
        yield from _walk(each)


def _is_draw(node: Any) -> bool:
    return "seed" in node.attr and "seed2" in node.attr


def _read_graph(dataset: Any) -> Any:
    import tensorflow as tf
    from tensorflow.core.framework import graph_pb2

    written = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, external_state_policy=_IGNORE, strip_device_assignment=False
    )
    return graph_pb2.GraphDef.FromString(written.numpy())


class _Seeds:
    """Gives each operation of a graph that draws its own seeds. Operations are counted from the graph's end:
    names of functions differ between processes."""

    def __init__(self, graph: Any, numbers: tuple[int, ...], kept: tuple[int, ...]) -> None:
        """`numbers` are of the iteration; `kept` are for what a cache keeps, which all iterations read."""
        self._graph = graph
        self._numbers = {False: repr(numbers).encode(), True: repr(kept).encode()}
        self._nodes = {node.name: node for node in graph.node}
        self._functions = {each.signature.name: each for each in graph.library.function}
        self._seen: set[str] = set()
        #: Operations that have got their seeds.
        self._count = 0

    def assign(self) -> None:
        for node in self._graph.node:
            if node.op == "_Retval":
                self._enter(node, is_kept=False)

    def _enter(self, node: Any, *, is_kept: bool) -> None:
        if node.name in self._seen:
            return
        self._seen.add(node.name)
        self._draw(node, is_kept)
        is_kept |= node.op.startswith(("Cache", "Snapshot", "SaveDataset"))
        for name in node.input:
            found = self._nodes.get(name.lstrip("^").split(":")[0])
            if found is not None:
                self._enter(found, is_kept=is_kept)

    def _draw(self, node: Any, is_kept: bool) -> None:
        if _is_draw(node):
            for name in ("seed", "seed2"):
                self._count += 1
                drawn = xxhash.xxh3_64_intdigest(self._numbers[is_kept], self._count)
                node.attr[name].i = (drawn >> 1) or 1
        for name in sorted(node.attr):
            value = node.attr[name]
            for called in (value.func, *value.list.func):
                function = self._functions.get(called.name)
                if function is not None and called.name not in self._seen:
                    self._seen.add(called.name)
                    for each in function.node_def:
                        self._draw(each, is_kept)


# Gives random generators of a process the job's seed, if the script has given them none


_state = {"seeded_here": False}
"""Whether `seed_unseeded` has set TensorFlow's global seed."""


def seed_unseeded(seed: int) -> None:
    """Set TensorFlow's global seed, unless the script has set it: shuffles of tf.data without a seed of their
    own then draw the same order in each process, and in one that replaces another.

    Other generators stay as they are. PyTorch's has the same seed in each process anyway. Whether a script
    has seeded NumPy's is unknown; `check_same_data` notices what follows.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return
    from tensorflow.python.eager import context

    if context.global_seed() is None:
        tensorflow.random.set_seed(seed)
        _state["seeded_here"] = True


def has_seeded() -> bool:
    """Return whether TensorFlow's global seed is one that was set here."""
    return _state["seeded_here"]


@contextlib.contextmanager
def draw_by_worker(seed: int, worker: int | None) -> Iterator[None]:
    """While open, shuffles without a seed draw another order in each worker, unless the script has set a
    global seed. `seed` is the job's; with None for `worker` nothing changes."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or worker is None or not _state["seeded_here"]:
        yield
        return
    tensorflow.random.set_seed(seed + 1 + worker)
    try:
        yield
    finally:
        tensorflow.random.set_seed(seed)
