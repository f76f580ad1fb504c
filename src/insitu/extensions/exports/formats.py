"""Writes a model in one format. What a backend or the libraries here can't write is refused before."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.base.export_formats import KERAS, ONNX, SAVED_MODEL, STABLEHLO, SUFFIXES

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
    if format not in SUFFIXES:
        raise InputError(f"An export's format is one of {', '.join(SUFFIXES)}. Received: {format!r}")
    if format == KERAS:
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
