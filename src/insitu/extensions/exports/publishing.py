"""Publishes a model: it is saved, loaded again and compared with the one that was trained, then renamed."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from insitu.base.disk.durable import sync_tree
from insitu.base.errors import InputError, TrainingError
from insitu.base.export_formats import KERAS, SAVED_MODEL, list_suffixes
from insitu.extensions.exports.formats import check_format, find_loader, read_structure, write_model

TOLERANCE = 1e-5
"""What predictions of an export may differ by from the model's: relative, and of the largest value."""


def publish(model: Any, folder: Path, step: int, example: Any, format: str = KERAS) -> Path:
    """Save `model` as `FOLDER/STEP.keras`, or as `STEP`, `STEP.onnx` or `STEP.stablehlo` in other formats,
    once what was saved predicts as `model` does on `example`.

    Raises InputError if the format can't be written here; TrainingError, with nothing published, where the
    model can't be saved or loaded, or predicts otherwise.
    """
    check_format(format)
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{step:08d}{list_suffixes()[format]}"
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    try:
        saved = staging / final.name
        try:
            expected = model(example, training=False)  # Keras exports what was called before
            predict = _save(model, saved, format)
            worst = _compare_predictions(expected, predict(example))
        except Exception as error:
            raise TrainingError(
                f"An export must be saved and loaded again before it is published. Received: {model.name!r}, "
                f"and {type(error).__name__}: {error}. Register its own classes by "
                "keras.saving.register_keras_serializable; nothing was published."
            ) from error
        if not worst <= TOLERANCE:
            raise TrainingError(
                f"An export must predict as the model that was trained. Received: {model.name!r}, whose copy "
                f"differs by {worst:.3g} of the largest value; {final} was not published. See that its own "
                "layers save all that they compute by."
            )
        sync_tree(saved)
        if saved.is_dir():
            shutil.rmtree(final, ignore_errors=True)  # of a run that published this step before
        saved.replace(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _save(model: Any, path: Path, format: str) -> Callable[[Any], Any]:
    """Save a model, load it again, and return what predicts by it."""
    write_model(model, path, format)
    if format == KERAS:
        loaded = keras.models.load_model(path, compile=False)
        return lambda example: loaded(example, training=False)
    if format == SAVED_MODEL:
        return _load_endpoint(model, path)
    served = find_loader(format)(path)
    return lambda example: served.call([_to_numpy(leaf) for leaf in keras.tree.flatten(example)])


def _load_endpoint(model: Any, path: Path) -> Callable[[Any], Any]:
    """Return what predicts by a SavedModel of Keras, in the structure of the model."""
    import tensorflow as tf

    served = tf.saved_model.load(path)
    # By their order: the example has the structure of the inputs.
    dtypes = [spec.dtype for spec in keras.tree.flatten(model.inputs)]

    def predict(example: Any) -> Any:
        leaves = zip(keras.tree.flatten(example), dtypes, strict=True)
        tensors = [tf.cast(tf.convert_to_tensor(np.asarray(leaf)), dtype) for leaf, dtype in leaves]
        given = keras.tree.pack_sequence_as(example, tensors)
        return keras.tree.map_structure(np.asarray, served.serve(given))

    return predict


def _to_numpy(leaf: Any) -> Any:
    return np.asarray(keras.ops.convert_to_numpy(leaf)) if keras.ops.is_tensor(leaf) else np.asarray(leaf)


def make_example(model: Any) -> Any:
    """Return made-up rows for the inputs of a model, of their structure. Raises ValueError."""
    rng = np.random.default_rng(0)

    def make(spec: Any) -> Any:
        shape = (5, *(length or 1 for length in spec.shape[1:]))
        floats = "float" in spec.dtype
        return rng.normal(size=shape).astype(spec.dtype) if floats else np.zeros(shape, spec.dtype)

    return keras.tree.map_structure(make, read_structure(model)[0])


def convert_export(path: Path, folder: Path, step: int, format: str) -> Path:
    """Publish the model of a `.keras` file in `folder` in another format. Returns the new file or folder.

    Raises InputError if it can't be loaded or written, TrainingError where it predicts otherwise then.
    """
    check_format(format)
    try:
        model = keras.models.load_model(path, compile=False)
        example = make_example(model)
    except Exception as error:
        raise InputError(
            f"A model that is converted is loaded first, without its code. Received: {path}, and "
            f"{type(error).__name__}: {error}. Give the exporter format={format!r} in the script"
        ) from error
    return publish(model, folder, step, example, format)


def _compare_predictions(expected: Any, found: Any) -> float:
    """Return the largest difference of predictions, relative to the largest value; infinite for other shapes
    and for what is not a number in one of them alone."""
    pairs = [keras.tree.flatten(each) for each in (expected, found)]
    if len(pairs[0]) != len(pairs[1]):
        return math.inf
    worst = 0.0
    for one, other in zip(*pairs, strict=True):
        a, b = (np.asarray(keras.ops.convert_to_numpy(value), np.float64) for value in (one, other))
        if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return math.inf
        finite = np.isfinite(a)
        scale = max(1e-30, float(np.abs(a[finite]).max(initial=0.0)))
        worst = max(worst, float(np.abs(a[finite] - b[finite]).max(initial=0.0)) / scale)
    return worst


def find_exports(folder: Path, format: str) -> list[Path]:
    """Return the exports of a format, oldest first."""
    pattern = re.compile(r"\d{8}" + re.escape(list_suffixes()[format]))
    return sorted(path for path in folder.glob("*") if pattern.fullmatch(path.name))
