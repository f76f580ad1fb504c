"""Writes a model in any format, and loads an export as what predicts, with what it takes and returns."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import keras
import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError
from insitu.base.export_formats import (
    KERAS,
    ONNX,
    SAVED_MODEL,
    STABLEHLO,
    SUFFIXES,
    find_format,
    list_suffixes,
)
from insitu.base.plugins import EXPORTERS, load_plugin
from insitu.extensions.features import FeatureTransform, find_transform

Array = npt.NDArray[Any]
TEXT = "string"
ANY = "any"
"""The dtype of what a feature column looks up: texts or whole numbers."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a model takes or returns under one name."""

    #: Its name.
    name: str
    #: The dtype of its elements, by NumPy's name; "string" for texts, "any" for texts or whole numbers.
    dtype: str
    #: Its axes, rows first; None for a length that isn't fixed. None as a whole where it isn't known.
    shape: tuple[int | None, ...] | None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that was loaded to predict."""

    #: What it takes, in the order of its inputs.
    inputs: tuple[Value, ...]
    #: What it returns.
    outputs: tuple[Value, ...]
    #: Returns the outputs of the inputs, both in these orders.
    call: Callable[[Sequence[Array]], Sequence[Array]]

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name, of arrays by the names of all inputs, with one row for each of theirs.

        Raises InputError for texts that a feature column refuses.
        """
        found = self.call([inputs[value.name] for value in self.inputs])
        return {value.name: array for value, array in zip(self.outputs, found, strict=True)}


class Exporter(Protocol):
    """What a package registers as `insitu.exporters`. Its files end with a dot and the plug-in's name."""

    def write(self, model: Any, path: Path) -> None:
        """Write a Keras model that was called before. What this raises is an error of the export."""

    def load(self, path: Path) -> ServedModel:
        """Return what predicts by a file that `write` has made. What was trained is compared with it."""


def load_export(path: Path, *, trust: bool = False) -> ServedModel:
    """Return the model of a file or folder that `insitu export` gives, or Keras' `save` and `export`.

    A `.keras` file with `DenseFeatures` takes the features themselves. Raises InputError if it can't be
    loaded, and for a SavedModel that uses files, unless `trust` says that its maker is trusted.
    """
    format = find_format(path)
    if format is None or not path.exists():
        raise InputError(
            f"A model is a SavedModel's folder, or a file that ends with "
            f"{', '.join(suffix for suffix in list_suffixes().values() if suffix)}. Received: {path}"
        )
    try:
        if format == SAVED_MODEL and not trust:
            check_saved_model(path)
        return find_loader(format)(path)
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"A model of the format {format} is loaded by a library. Received: {path}, and {error}. Install "
            f"it, or export another format"
        ) from error
    except Exception as error:
        raise InputError(
            f"A model is loaded as it was exported. Received: {path}, and {type(error).__name__}: {error}"
        ) from error


def find_loader(format: str) -> Callable[[Path], ServedModel]:
    """Return what loads models of a format. Raises InputError for a plug-in that can't be loaded."""
    own = {KERAS: _load_keras, SAVED_MODEL: _load_saved_model, ONNX: load_onnx, STABLEHLO: load_stablehlo}
    return own[format] if format in own else cast("Exporter", load_plugin(EXPORTERS, format)).load


def _load_keras(path: Path) -> ServedModel:
    model = keras.models.load_model(path, compile=False)
    if not getattr(model, "inputs", None):
        raise InputError(
            f"A model is served by the names of its inputs. Received: {path}, which has none. Make a "
            "functional or Sequential model with keras.Input"
        )
    structure, returned = read_structure(model)
    tensors = _list_named(structure, [tensor.name for tensor in model.inputs])
    names = [model.layers[-1].name] if isinstance(model, keras.Sequential) else model.output_names
    outputs = _list_named(returned, names)
    dtypes = [keras.backend.standardize_dtype(tensor.dtype) for _, tensor in tensors]
    if TEXT in dtypes and keras.backend.backend() != "tensorflow":
        raise InputError(
            f"Texts are an input on TensorFlow alone. Received: {path}, with a text input, on the backend "
            f"{keras.backend.backend()}. Set KERAS_BACKEND=tensorflow"
        )

    def call(arrays: Sequence[Array]) -> list[Array]:
        cast = [_cast(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        found = model(keras.tree.pack_sequence_as(structure, cast), training=False)
        return [np.asarray(keras.ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(found)]

    values = tuple(_value(*each) for each in tensors)
    served = ServedModel(values, tuple(_value(*each) for each in outputs), call)
    transform = find_transform(model)
    return served if transform is None else _take_features(served, transform)


def _cast(array: Array, dtype: str) -> Any:
    """Return what a model takes of an input: texts as a tensor, which NumPy has no type for."""
    if dtype == TEXT:
        return keras.ops.convert_to_tensor(np.asarray(array, object), dtype)
    return np.asarray(array).astype(dtype)


def _take_features(model: ServedModel, transform: FeatureTransform) -> ServedModel:
    """Return the model on features as they come with the data, which feature columns look up before."""
    made = set(transform.names)
    rest = [value for value in model.inputs if value.name not in made]
    numeric = transform.numeric_keys
    raw = [Value(key, "float32" if key in numeric else ANY, None) for key in transform.raw_keys]

    def call(arrays: Sequence[Array]) -> Sequence[Array]:
        given = {value.name: array for value, array in zip((*raw, *rest), arrays, strict=True)}
        given |= _look_up(transform, {value.name: given[value.name] for value in raw})
        return model.call([given[value.name] for value in model.inputs])

    return ServedModel((*raw, *rest), model.outputs, call)


def _look_up(transform: FeatureTransform, features: dict[str, Array]) -> dict[str, Array]:
    """Return the transformed features of a request, whose lists of one length may stand for rows of different
    lengths. Raises InputError if the model's numbers depend on that."""
    found: dict[str, Array] = transform(features)
    numeric = transform.numeric_keys
    lists = {k: list(map(list, rows)) for k, rows in features.items() if rows.ndim == 2 and k not in numeric}
    try:
        other = transform({**features, **lists}) if lists else found
    except InputError:
        return found  # a value stands for a missing one, which lists don't have
    wrong = next((name for name, table in found.items() if not np.array_equal(table, other[name])), None)
    if wrong is not None:
        raise InputError(
            "A crossed column hashes features of one length in another order than such of different lengths. "
            f"Received: lists of one length in {', '.join(lists)}, which {wrong!r} may read as either. If "
            "the model was trained on rows of different lengths, send a row of another length beside them"
        )
    return found


def _list_named(structure: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, tensor) of each tensor, in Keras' order: the key in a dict, else its own name."""
    paths = keras.tree.flatten_with_path(structure)
    keyed = isinstance(structure, Mapping)
    return [
        ("/".join(map(str, path)) if keyed else name, tensor)
        for (path, tensor), name in zip(paths, names, strict=True)
    ]


def _value(name: str, tensor: Any) -> Value:
    return Value(name, keras.backend.standardize_dtype(tensor.dtype), tuple(tensor.shape))


def _load_saved_model(path: Path) -> ServedModel:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))
    if "serving_default" not in loaded.signatures:
        raise InputError(
            f"A SavedModel is served by its signature serving_default. Received: {path}, with "
            f"{', '.join(loaded.signatures) or 'none'}"
        )
    function = loaded.signatures["serving_default"]
    inputs = tuple(_tensor_value(n, s) for n, s in sorted(function.structured_input_signature[1].items()))
    outputs = tuple(_tensor_value(n, s) for n, s in sorted(function.structured_outputs.items()))

    def call(arrays: Sequence[Array]) -> list[Array]:
        given = {
            value.name: tf.constant(array.astype(object if value.dtype == TEXT else value.dtype))
            for value, array in zip(inputs, arrays, strict=True)
        }
        found = function(**given)
        return [np.asarray(found[value.name]) for value in outputs]

    call.__dict__["held"] = loaded  # a signature alone doesn't keep the variables
    return ServedModel(inputs, outputs, call)


def _tensor_value(name: str, spec: Any) -> Value:
    shape = None if spec.shape.rank is None else tuple(spec.shape.as_list())
    return Value(name, spec.dtype.name, shape)


def load_onnx(path: Path) -> ServedModel:
    """Load an ONNX model by ONNX Runtime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def describe(node: Any) -> Value:
        kind = re.sub(r"tensor\((.*)\)", r"\1", node.type)
        dtype = {"float": "float32", "double": "float64"}.get(kind, kind)
        return Value(node.name, dtype, tuple(n if isinstance(n, int) else None for n in node.shape))

    inputs = tuple(describe(node) for node in session.get_inputs())
    outputs = tuple(describe(node) for node in session.get_outputs())

    def call(arrays: Sequence[Array]) -> list[Array]:
        pairs = zip(inputs, arrays, strict=True)
        given = {v.name: array.astype(object if v.dtype == TEXT else v.dtype) for v, array in pairs}
        return [np.asarray(array) for array in session.run(None, given)]

    return ServedModel(inputs, outputs, call)


def load_stablehlo(path: Path) -> ServedModel:
    """Load what jax.export has serialized, and compile it for this machine."""
    import jax
    from jax import export

    exported = export.deserialize(bytearray(path.read_bytes()))
    (args, _), out = (
        jax.tree_util.tree_unflatten(tree, avals)
        for tree, avals in (
            (exported.in_tree, exported.in_avals),
            (exported.out_tree, exported.out_avals),
        )
    )
    predict = jax.jit(exported.call)
    inputs, outputs = _describe_tree(args[0], "input"), _describe_tree(out, "output")

    def call(arrays: Sequence[Array]) -> list[Array]:
        cast = [array.astype(value.dtype) for value, array in zip(inputs, arrays, strict=True)]
        found = predict(keras.tree.pack_sequence_as(args[0], cast))
        return [np.asarray(leaf) for leaf in keras.tree.flatten(found)]

    return ServedModel(inputs, outputs, call)


def _describe_tree(tree: Any, stem: str) -> tuple[Value, ...]:
    """Return what is in a tree of JAX' abstract arrays: by keys, or counted."""
    found = []
    for number, (path, aval) in enumerate(keras.tree.flatten_with_path(tree)):
        name = "/".join(map(str, path)) if isinstance(tree, Mapping) else f"{stem}_{number}"
        shape = tuple(size if isinstance(size, int) else None for size in aval.shape)
        found.append(Value(name, str(aval.dtype), shape))
    return tuple(found)


# Looks for what a SavedModel would do beside computing: its graph is a program, and TensorFlow runs it


_REFUSED = re.compile(
    r".*(File|PyFunc|Save|Restore|Checkpoint|TextLine|TFRecord|FixedLengthRecord|CSVDataset|CacheDataset|LMDB|Sql"
    r"|Snapshot|LoadDataset|LoadAndRemap|Reader|SummaryWriter|SummaryDbWriter|DataService|RemoteCall).*"
    r"|Write.*Summary|PrintV2|Debug(Identity|Na|Numeric).*|DumpTensor"
    r"|RecordInput|Skipgram|FixedUnigramCandidateSampler|GenerateVocabRemapping|(En|De)codeProto.*"
    r"|DatasetFromGraph|RegisterDataset.*|Rpc.*"
)
"""Operations that read, write or list files, call Python or other processes. PrintV2 prints to files, Proto
operations read descriptors, and DatasetFromGraph runs a graph that is hidden in a text."""


def check_saved_model(path: Path) -> None:
    """Raise InputError for a SavedModel that touches files, or calls Python, when it is loaded or asked.

    What only saving it again would run doesn't count.
    """
    from tensorflow.python.saved_model.loader_impl import parse_saved_model

    graphs = parse_saved_model(str(path)).meta_graphs
    found = sorted({name for graph in graphs for name in _list_operations(graph, alone=len(graphs) == 1)})
    refused = [name for name in found if _REFUSED.fullmatch(name)]
    if refused:
        raise InputError(
            f"A SavedModel is code, and runs as you: one that uses files is refused. Received: {path}, which "
            f"has {', '.join(refused[:5])}. If you trust who made it, give --trust"
        )


def _list_operations(graph: Any, *, alone: bool) -> set[str]:
    """Return the operations of a graph that can run.

    TensorFlow 2 runs functions that are named, and what these call; of an older SavedModel it runs anything.
    """
    functions = {each.signature.name: each.node_def for each in graph.graph_def.library.function}
    found: set[str] = set()
    waiting: list[Iterable[Any]]
    if alone and graph.HasField("object_graph_def"):
        named = set(graph.object_graph_def.concrete_functions)
        waiting = [functions.pop(name) for name in named if name in functions]
    else:
        waiting = [graph.graph_def.node, *functions.values()]
        functions = {}
    while waiting:
        for node in waiting.pop():
            found.add(node.op)
            for name in (node.op, *_list_called(node)):
                if name in functions:
                    waiting.append(functions.pop(name))
    return found


def _list_called(node: Any) -> list[str]:
    names = []
    for value in node.attr.values():
        names += [value.func.name, *(each.name for each in value.list.func)]
    return names


# Writes a model in one format. What a backend or the libraries here can't write is refused before


_LIBRARIES = {
    (ONNX, "tensorflow"): ("tf2onnx", "onnxruntime"),
    (ONNX, "jax"): ("jax2onnx", "onnxruntime"),
    (ONNX, "torch"): ("onnx", "onnxscript", "onnxruntime"),
    (SAVED_MODEL, "tensorflow"): ("tensorflow",),
    (SAVED_MODEL, "jax"): ("tensorflow",),
    (STABLEHLO, "jax"): ("flatbuffers",),
}
"""Modules that write a format on a backend, and load what was written. All others can't be written."""
_REASONS = {
    STABLEHLO: "jax.export writes it. Train on JAX, or export ONNX",
    SAVED_MODEL: "Keras writes it on TensorFlow and JAX. Export ONNX",
    ONNX: "Keras writes it on TensorFlow, JAX and PyTorch",
}


def check_format(format: str) -> str:
    """Return the name of a format that can be written here. Raises InputError."""
    if format not in (suffixes := list_suffixes()):
        raise InputError(f"An export's format is one of {', '.join(suffixes)}. Received: {format!r}")
    if format not in SUFFIXES:
        load_plugin(EXPORTERS, format)
    if format == KERAS or format not in SUFFIXES:
        return format
    backend = keras.backend.backend()
    needed = _LIBRARIES.get((format, backend))
    if needed is None:
        raise InputError(
            f"A format is written where the backend can. Received: {format!r} on {backend}; "
            f"{_REASONS[format]}"
        )
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extra = {ONNX: f"onnx-{backend}", STABLEHLO: "stablehlo", SAVED_MODEL: "tensorflow"}[format]
        raise InputError(
            f"Exports in the format {format} need libraries that come with `pip install 'insitu[{extra}]'`. "
            f"Received: no {', '.join(missing)}"
        )
    return format


def read_structure(model: Any) -> tuple[Any, Any]:
    """Return (inputs, outputs) of a functional or Sequential model, in their structure. Raises ValueError."""
    if not getattr(model, "inputs", None):
        raise ValueError("a model without known inputs; make a functional or Sequential one")
    if isinstance(model, keras.Sequential):  # one that was loaded has no `input`
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def write_model(model: Any, path: Path, format: str) -> None:
    """Write a model that was called before. Raises what Keras and the libraries raise."""
    if format == KERAS:
        model.save(path)
    elif format == STABLEHLO:
        _write_stablehlo(model, path)
    elif format not in SUFFIXES:
        load_plugin(EXPORTERS, format).write(model, path)
    else:
        model.export(path if format == SAVED_MODEL else str(path), format=format, verbose=False)
        if format == ONNX and (more := [each.name for each in path.parent.iterdir() if each != path]):
            raise ValueError(f"its weights don't fit into one file; there are {', '.join(sorted(more))} too")


def _write_stablehlo(model: Any, path: Path) -> None:
    """Write the function from inputs to predictions, weights included, for any number of rows."""
    import jax
    from jax import export

    inputs, _ = read_structure(model)
    scope, platform = export.SymbolicScope(), export.default_export_platform()
    trainable = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def make_spec(place: int, tensor: Any) -> Any:
        axes = ["rows" if not axis else f"axis_{place}_{axis}" for axis in range(len(tensor.shape))]
        sizes = [name if size is None else str(size) for name, size in zip(axes, tensor.shape, strict=True)]
        shape = export.symbolic_shape(", ".join(sizes), scope=scope) if sizes else ()
        return jax.ShapeDtypeStruct(shape, tensor.dtype)

    flat = keras.tree.flatten(inputs)
    specs = keras.tree.pack_sequence_as(inputs, [make_spec(*each) for each in enumerate(flat)])
    predict = jax.jit(lambda inputs: model.stateless_call(trainable, others, inputs, training=False)[0])
    exported = export.export(predict, platforms=tuple(dict.fromkeys((platform, "cpu"))))(specs)
    path.write_bytes(exported.serialize())
