"""Exporters: publish the model once it is evaluated, in one of several formats."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file
from insitu.base.errors import InputError
from insitu.base.export_formats import KERAS
from insitu.base.tf_signatures import takes_old
from insitu.extensions.exports import check_format, find_exports, publish

Scores = Mapping[str, float]
Compare = Callable[..., bool]
"""Takes the best scores so far and the newest; returns whether the newest are better. Arguments that have
TensorFlow's names, `best_eval_result` and `current_eval_result`, are passed by name."""


class Exporter:
    """The base of exporters. `name` is the folder in `MODEL_DIR/export`, of this exporter alone. `format` is
    "keras", "tf_saved_model", "onnx" or "stablehlo"."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        taken = inspect.signature(cls.export).parameters
        if "is_final" not in taken and not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            raise InputError(
                "An exporter has export(self, model, export_path, step, scores, example, *, is_final). "
                f"Received: {cls.__name__} with ({', '.join(taken)}). Take a model, in place of an estimator "
                "and a checkpoint"
            )

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


_OLD = {
    "serving_input_receiver_fn": "Leave it out: an export takes the model's inputs, the features",
    "assets_extra": "Copy files beside the export",
    "as_text": "Leave it out: exports are binary",
}


class LatestExporter(Exporter):
    """Exports after each evaluation, and keeps the newest `exports_to_keep` (None: all)."""

    @takes_old(**_OLD)
    def __init__(self, name: str = "latest", *, exports_to_keep: int | None = 5, format: str = KERAS) -> None:
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

    @takes_old(**_OLD)
    def __init__(self, name: str = "final", *, format: str = KERAS) -> None:
        super().__init__(name, format)

    def export(
        self, model: Any, export_path: Path, step: int, scores: Scores, example: Any, *, is_final: bool
    ) -> Path | None:
        if not is_final:
            return None
        return publish(model, export_path / self.name, step, example, self.format)


def is_loss_smaller(best: Scores, newest: Scores) -> bool:
    """Return whether the loss has become smaller. A finite one is smaller than one that isn't."""
    _check_has("loss", newest)
    if not math.isfinite(newest["loss"]):
        return False
    return not math.isfinite(best["loss"]) or newest["loss"] < best["loss"]


class BestExporter(Exporter):
    """Exports where the newest scores are the best so far, as `compare_fn(best, newest)` says.

    Scores have `global_step`, too. The best are beside the exports, so that a job that continues knows them.
    """

    @takes_old(**_OLD, event_file_pattern="Leave it out: the best scores so far are beside the exports")
    def __init__(
        self,
        name: str = "best",
        *,
        compare_fn: Compare = is_loss_smaller,
        exports_to_keep: int | None = 5,
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
        scores = {**scores, "global_step": step}
        best = _read_scores(folder, self.format)
        if best is not None and not _compare(self._compare, best, scores):
            return None
        path = publish(model, folder, step, example, self.format)
        replace_file(folder / _SCORES, json.dumps(dict(scores)).encode())
        remove_oldest(folder, self._kept, self.format)
        return path


_SCORES = "best.json"
_NAMES = ("best_eval_result", "current_eval_result")


def _compare(function: Compare, best: Scores, newest: Scores) -> bool:
    """Return what a compare_fn says. As in TensorFlow its arguments may come in any order. Raises InputError
    where it raises."""
    try:
        has_names = set(_NAMES) <= inspect.signature(function).parameters.keys()
    except ValueError:  # some functions in C have no signature
        has_names = False
    try:
        if has_names:
            return bool(function(**dict(zip(_NAMES, (best, newest), strict=True))))
        return bool(function(best, newest))
    except InputError:
        raise
    except Exception as error:  # it is the user's
        raise InputError(
            f"A compare_fn returns whether the newest scores are better. Received: {error!r}, of scores "
            f"{', '.join(newest)}"
        ) from error


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
