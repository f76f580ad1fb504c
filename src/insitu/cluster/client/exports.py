"""Exported models of a job: which there are, and copies of them elsewhere.

Exporters publish `EXPORTER/STEP.keras`, or the like in other formats, whole and by one rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from insitu.base.disk.durable import sync_folder, sync_tree
from insitu.base.errors import InputError
from insitu.base.export_formats import KERAS, SAVED_MODEL, find_format, list_suffixes
from insitu.base.paths import EVENT_FILE, JobPaths
from insitu.cluster.job_files import Journal

_EXPORT = re.compile(r"(\d{8,})(\.\w+)?")
_SCORES = "best.json"
"""Stored beside the exports of a BestExporter."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that an exporter has published."""

    #: The file or folder, in the job's folder.
    path: Path
    #: Updates that the model has had; of a model that the script has saved itself, when that was, in seconds
    #: since 1970.
    step: int
    #: The name of the exporter; "" of a model that the script has saved itself.
    exporter: str = ""

    @property
    def format(self) -> str:
        """Its format, as `insitu.base.export_formats` names them."""
        return find_format(self.path) or SAVED_MODEL


def find_export(
    job: JobPaths, *, best: bool = False, exporter: str | None = None, format: str | None = None
) -> ExportedModel:
    """Return the job's export of the most steps: of all exporters, of the BestExporter, or of the one named.
    If it has no exporters, that is the model which its script has saved last.

    If some of these have the `format`, it is one of them; else one that can be converted: a .keras file.
    Raises InputError if there is none, or `best` could mean several.
    """
    found = _list_exports(job)
    if not found and not best and exporter is None:
        found = _list_saved(job)
    if not found:
        raise InputError(
            "Models of a job are those that its script saves in the folder where it runs, as by "
            "model.save('model.keras') in the chief, and those of exporters such as "
            f"insitu.estimator.FinalExporter. Received: {job.root.name}, with none"
            f"{' of exporters' if best or exporter else ''}. Of a RunConfig with model_dir they are in "
            "MODEL_DIR/export"
        )
    known = sorted({model.exporter for model in found})
    if exporter is not None:
        if exporter not in known:
            raise InputError(f"Exporters of {job.root.name} are {', '.join(known)}. Received: {exporter!r}")
        found = [model for model in found if model.exporter == exporter]
    elif best:
        scored = [name for name in known if (job.exports / name / _SCORES).is_file()]
        if len(scored) != 1:
            raise InputError(
                "--best takes the export of the job's one BestExporter. Received: "
                f"{job.root.name}, with {', '.join(scored) or 'none'} of the exporters {', '.join(known)}. "
                "Name an exporter by --exporter"
            )
        found = [model for model in found if model.exporter == scored[0]]
    for wanted in (format, KERAS) if format is not None else ():
        if chosen := [model for model in found if model.format == wanted]:
            found = chosen
            break
    return max(found, key=lambda model: (model.step, model.exporter))


def _list_exports(job: JobPaths) -> list[ExportedModel]:
    found, suffixes = [], list_suffixes().values()
    for path in job.exports.glob("*/*"):
        name = _EXPORT.fullmatch(path.name)
        if name is not None and (name[2] or "") in suffixes and path.is_dir() == (name[2] is None):
            found.append(ExportedModel(path, int(name[1]), path.parent.name))
    return found


def _list_saved(job: JobPaths) -> list[ExportedModel]:
    """Return the models that the script has saved itself, in formats that can be exported."""
    saved = [(job.root / each.path, int(each.changed)) for each in list_outputs(job) if each.kind == "model"]
    return [ExportedModel(path, at) for path, at in saved if find_format(path) is not None]


def copy_export(model: ExportedModel, target: Path) -> Path:
    """Copy a model to `target`, or into it if that is a folder, by one rename. Returns the copy's path.

    Raises InputError if something has that name, or the model was removed meanwhile; OSError.
    """
    final = target / model.path.name if target.is_dir() else target
    suffixes = list_suffixes().values()
    if (final.suffix if final.suffix in suffixes else "") != model.path.suffix:
        what = f"ends with {model.path.suffix}" if model.path.suffix else "has no such end, as a folder"
        raise InputError(
            f"The end of a name tells the format of a model: {', '.join(filter(None, suffixes))}. Received: "
            f"{final} for a model whose name {what}. Give another name, or a folder that is there, where the "
            f"model is called {model.path.name}"
        )
    if os.path.lexists(final):
        raise InputError(
            f"An export replaces nothing. Received: {final}, which is there already. Remove it, or give "
            "another name"
        )
    if not final.parent.is_dir():
        raise InputError(
            f"A model is put into a folder that is there. Received: {final}. Make {final.parent} first"
        )
    staged = final.with_name(f".{final.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        try:
            if model.path.is_dir():
                shutil.copytree(model.path, staged)
            else:
                shutil.copyfile(model.path, staged)
        except (FileNotFoundError, shutil.Error) as error:
            if model.path.exists():
                raise
            raise InputError(
                f"An exporter keeps its newest models. Received: {model.path}, which it removed while it was "
                "copied. Give the command again"
            ) from error
        sync_tree(staged)
        staged.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True) if staged.is_dir() else staged.unlink(missing_ok=True)
    return final


# Output of a job's script: models, event files of TensorBoard, predictions and other files


Kind = Literal["model", "events", "predictions", "file"]
MOST = 1000
"""Files that are looked at."""
_MODELS = (".keras", ".h5", ".onnx", ".stablehlo", ".tflite")
_SAVED_MODEL = "saved_model.pb"
_LEFT_OUT = "__pycache__"


@dataclass(frozen=True, slots=True)
class Output:
    """A file, or a folder that is one model, that a job has written; or a cache of predictions."""

    #: Its path in the job's folder, or the whole one of predictions elsewhere; of a cache its name.
    path: str
    #: Its kind, by its name.
    kind: Kind
    #: Its size; None of a cache.
    bytes: int | None
    #: When it was last written, in seconds since 1970.
    changed: float


def list_outputs(job: JobPaths) -> list[Output]:
    """Return what the job has written, models first, each kind by its path. Files that came with JOB_DIR and
    weren't changed are left out."""
    attempts = Journal(job.journal).state().attempts if job.journal.exists() else ()
    if not attempts:
        return []
    found = [each for each in _walk(job, job.code) if each.changed >= attempts[0].started]
    found += [each for root in (job.exports, job.all_summaries) for each in _walk(job, root)]
    order = ("model", "predictions", "events", "file")
    predictions = _list_predictions(job)
    files = {each.path for each in predictions if each.bytes is not None}
    found = [each for each in found if each.path not in files] + predictions
    return sorted(found, key=lambda each: (order.index(each.kind), each.path))


def find_event_folders(job: JobPaths) -> list[Path]:
    """Return the folders of `summaries` and `code` in the job's folder that have event files of the job."""
    written = [Path(each.path).parts[0] for each in list_outputs(job) if each.kind == "events"]
    return [job.root / name for name in dict.fromkeys(written)]


def measure_job(job: JobPaths) -> int:
    """Return the bytes of all files in the job's folder."""
    size = 0
    for parent, _, files in os.walk(job.root):
        for file in files:
            with contextlib.suppress(OSError):  # removed just now
                size += os.lstat(os.path.join(parent, file)).st_size
    return size


def _walk(job: JobPaths, root: Path) -> list[Output]:
    found: list[Output] = []
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name != _LEFT_OUT and not name.startswith("."))
        if _SAVED_MODEL in files:
            folders.clear()
            paths = [path for path in Path(parent).rglob("*") if path.is_file()]
            found += _describe(job, Path(parent), "model", paths)
            continue
        for file in files:
            path = Path(parent, file)
            if len(found) >= MOST or path.is_symlink() or file.startswith("."):
                continue
            kind: Kind = "events" if file.startswith(EVENT_FILE) else "file"
            found += _describe(job, path, "model" if path.suffix in _MODELS else kind, [path])
    return found


def _describe(job: JobPaths, path: Path, kind: Kind, files: list[Path]) -> list[Output]:
    with contextlib.suppress(OSError):  # removed just now
        states = [file.stat() for file in files]
        size, changed = sum(s.st_size for s in states), max(s.st_mtime for s in states)
        return [Output(path.relative_to(job.root).as_posix(), kind, size, changed)]
    return []


def _list_predictions(job: JobPaths) -> list[Output]:
    """Return the caches and files that `insitu.predict_into` has made; those elsewhere aren't noted."""
    found: dict[str, Output] = {}
    for path in sorted((job.root / "predictions").glob("*/done.json")):
        with contextlib.suppress(OSError, ValueError):
            note = json.loads(path.read_text())
            if "cache" in note:
                found[note["cache"]] = Output(note["cache"], "predictions", None, path.stat().st_mtime)
            elif "file" in note:
                shown, state = _shorten(job, note["file"]), os.stat(note["file"])
                found[shown] = Output(shown, "predictions", state.st_size, state.st_mtime)
    return list(found.values())


def _shorten(job: JobPaths, file: str) -> str:
    """Return the path of a file in the job's folder; the whole path of one elsewhere."""
    path, root = Path(os.path.realpath(file)), os.path.realpath(job.root)
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else file
