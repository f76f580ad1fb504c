"""Exporters: publish the model, as `.keras` files or SavedModels, once it is evaluated.

An export is loaded again, and must predict what the model predicts, before it is published by a rename.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from insitu.durable import replace_file, sync_tree
from insitu.errors import InputError, TrainingError

Scores = Mapping[str, float]
Compare = Callable[[Scores, Scores], bool]
"""Takes the best scores so far and the newest; returns whether the newest are better."""

TOLERANCE = 1e-5
"""What predictions of an export may differ by from the model's: relative, and of the largest value."""


KERAS, SAVED_MODEL = "keras", "tf_saved_model"
"""Formats of exports, by the names of `keras.Model.export`."""
_SUFFIX = {KERAS: ".keras", SAVED_MODEL: ""}
"""What follows the step in the name of an export. TensorFlow Serving takes a folder's number as version."""


class Exporter:
    """The base of exporters. `name` is the folder in `MODEL_DIR/export`, of this exporter alone. `format` is
    "keras" or "tf_saved_model"."""

    def __init__(self, name: str, format: str = KERAS) -> None:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise InputError(
                f"An exporter's name is that of a folder: letters, digits, '_', '-', '.'. Received: {name!r}"
            )
        self.name = name
        self.format = check_format(format)

    def export(
        self, model: Any, export_path: Path, step: int, scores: Scores, example: Any, *, is_final: bool
    ) -> Path | None:
        """Publish `model` below `export_path`, if it is its turn. Returns the file, or None.

        `step` is the number of the model's updates, `example` a batch of its inputs, for comparison.
        """
        raise NotImplementedError


class LatestExporter(Exporter):
    """Exports after each evaluation, and keeps the newest `exports_to_keep` (None: all)."""

    def __init__(self, name: str = "latest", exports_to_keep: int | None = 5, *, format: str = KERAS) -> None:
        super().__init__(name, format)
        _check_kept(exports_to_keep)
        self._kept = exports_to_keep

    def export(
        self, model: Any, export_path: Path, step: int, scores: Scores, example: Any, *, is_final: bool
    ) -> Path | None:
        path = publish(model, export_path / self.name, step, example, self.format)
        remove_oldest(path.parent, self._kept, self.format)
        return path


class FinalExporter(Exporter):
    """Exports once, when training is over."""

    def __init__(self, name: str = "final", *, format: str = KERAS) -> None:
        super().__init__(name, format)

    def export(
        self, model: Any, export_path: Path, step: int, scores: Scores, example: Any, *, is_final: bool
    ) -> Path | None:
        if not is_final:
            return None
        return publish(model, export_path / self.name, step, example, self.format)


def is_loss_smaller(best: Scores, newest: Scores) -> bool:
    """Return whether the loss has become smaller. A loss that isn't finite never is."""
    _check_has("loss", newest)
    return math.isfinite(newest["loss"]) and newest["loss"] < best["loss"]


class BestExporter(Exporter):
    """Exports where the newest scores are the best so far, as `compare_fn(best, newest)` says.

    The best scores lie beside the exports, so that a job that goes on knows them.
    """

    def __init__(
        self,
        name: str = "best",
        compare_fn: Compare = is_loss_smaller,
        exports_to_keep: int | None = 5,
        *,
        format: str = KERAS,
    ) -> None:
        super().__init__(name, format)
        _check_kept(exports_to_keep)
        self._compare = compare_fn
        self._kept = exports_to_keep

    def export(
        self, model: Any, export_path: Path, step: int, scores: Scores, example: Any, *, is_final: bool
    ) -> Path | None:
        folder = export_path / self.name
        best = _read_scores(folder, self.format)
        if best is not None and not self._compare(best, scores):
            return None
        path = publish(model, folder, step, example, self.format)
        replace_file(folder / _SCORES, json.dumps(dict(scores)).encode())
        remove_oldest(folder, self._kept, self.format)
        return path


_SCORES = "best.json"


def check_format(format: str) -> str:
    """Return the name of a format. Raises InputError."""
    if format not in _SUFFIX:
        raise InputError(f"An export's format is one of {', '.join(_SUFFIX)}. Received: {format!r}")
    return format


def publish(model: Any, folder: Path, step: int, example: Any, format: str = KERAS) -> Path:
    """Save `model` as `FOLDER/STEP.keras`, or as the SavedModel `FOLDER/STEP`, once what was saved predicts
    as `model` does on `example`.

    Raises TrainingError, with nothing published, where it can't be saved or loaded, or predicts otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{step:08d}{_SUFFIX[format]}"
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=folder))
    try:
        saved = staging / final.name
        try:
            predict = _save(model, saved, format)
            worst = _compare_predictions(model, predict, example)
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
        if saved.is_dir():
            sync_tree(saved)
            shutil.rmtree(final, ignore_errors=True)  # of a run that published this step before
        else:
            _sync(saved)
        saved.replace(final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def _save(model: Any, path: Path, format: str) -> Callable[[Any], Any]:
    """Save a model, load it again, and return what predicts by it."""
    if format == KERAS:
        model.save(path)
        loaded = keras.models.load_model(path, compile=False)
        return lambda example: loaded(example, training=False)
    import tensorflow as tf

    model.export(path, format=format, verbose=False)
    served = tf.saved_model.load(path)
    # By their order: the example has the structure of the inputs.
    dtypes = [spec.dtype for spec in keras.tree.flatten(model.inputs)]

    def predict(example: Any) -> Any:
        leaves = zip(keras.tree.flatten(example), dtypes, strict=True)
        tensors = [tf.cast(tf.convert_to_tensor(np.asarray(leaf)), dtype) for leaf, dtype in leaves]
        given = keras.tree.pack_sequence_as(example, tensors)
        return keras.tree.map_structure(np.asarray, served.serve(given))

    return predict


def _compare_predictions(model: Any, predict: Callable[[Any], Any], example: Any) -> float:
    """Return the largest difference of predictions, relative to the largest value; infinite for other shapes
    and for what is not a number in one of them alone."""
    pairs = [keras.tree.flatten(each) for each in (model(example, training=False), predict(example))]
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_exports(folder: Path, format: str) -> list[Path]:
    """Return the exports of a format, oldest first."""
    pattern = re.compile(r"\d{8}" + re.escape(_SUFFIX[format]))
    return sorted(path for path in folder.glob("*") if pattern.fullmatch(path.name))


def remove_oldest(folder: Path, kept: int | None, format: str = KERAS) -> None:
    """Remove all exports but the newest `kept`."""
    if kept is not None:
        for path in find_exports(folder, format)[:-kept]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _read_scores(folder: Path, format: str) -> dict[str, float] | None:
    """Return the best scores so far, if there are any, and an export that has them."""
    try:
        scores: dict[str, float] = json.loads((folder / _SCORES).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return scores if find_exports(folder, format) else None


def _check_has(name: str, scores: Scores) -> None:
    if name not in scores:
        raise InputError(f"Scores are compared by {name!r}. Received: {', '.join(scores)}. Pass compare_fn")


def _check_kept(kept: int | None) -> None:
    if kept is not None and kept < 1:
        raise InputError(f"exports_to_keep must be a number above 0, or None. Received: {kept}")
