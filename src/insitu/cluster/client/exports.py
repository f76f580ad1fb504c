"""Exported models of a job: which there are, and copies of them elsewhere.

Exporters publish `EXPORTER/STEP.keras`, or the like in other formats, whole and by one rename.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from insitu.durable import sync_folder, sync_tree
from insitu.errors import InputError
from insitu.export_formats import KERAS, SAVED_MODEL, SUFFIXES
from insitu.paths import JobPaths

_EXPORT = re.compile(r"(\d{8,})(\.\w+)?")
_FORMATS = {suffix: format for format, suffix in SUFFIXES.items()}
_SCORES = "best.json"
"""Lies beside the exports of a BestExporter."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A model that an exporter has published."""

    #: The file or folder, in the job's folder.
    path: Path
    #: Updates that the model has had.
    step: int

    @property
    def exporter(self) -> str:
        return self.path.parent.name

    @property
    def format(self) -> str:
        """Its format, as `insitu.export_formats` names them."""
        return _FORMATS[self.path.suffix]

    @property
    def is_saved_model(self) -> bool:
        """Whether it is a SavedModel, a folder; else it is a file."""
        return self.format == SAVED_MODEL


def find_export(
    job: JobPaths, *, best: bool = False, exporter: str | None = None, format: str | None = None
) -> ExportedModel:
    """Return the job's export of the most steps: of all exporters, of the BestExporter, or of the one named.

    Where some of these have the `format`, it is one of them; else one that can be converted: a .keras file.
    Raises InputError where there is none, or `best` could mean several.
    """
    found = _list_exports(job)
    if not found:
        raise InputError(
            "Models of a job come from exporters such as insitu.estimator.FinalExporter. Received: "
            f"{job.root.name}, with none in {job.exports}. Pass exporters to the EvalSpec; of a "
            "RunConfig with model_dir they are in MODEL_DIR/export"
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
    found = []
    for path in job.exports.glob("*/*"):
        name = _EXPORT.fullmatch(path.name)
        if name is not None and (name[2] or "") in _FORMATS and path.is_dir() == (name[2] is None):
            found.append(ExportedModel(path, int(name[1])))
    return found


def copy_export(model: ExportedModel, target: Path) -> Path:
    """Copy a model to `target`, or into it where that is a folder, by one rename. Returns the copy's path.

    Raises InputError where something has that name, or the model was removed meanwhile; OSError.
    """
    final = target / model.path.name if target.is_dir() else target
    if (final.suffix if final.suffix in _FORMATS else "") != model.path.suffix:
        what = f"ends with {model.path.suffix}" if model.path.suffix else "has no such end, as a folder"
        raise InputError(
            f"The end of a name tells the format of a model: {', '.join(filter(None, _FORMATS))}. Received: "
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
            if model.is_saved_model:
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
        _sync(staged)
        staged.rename(final)
        sync_folder(final.parent)
    finally:
        shutil.rmtree(staged, ignore_errors=True) if staged.is_dir() else staged.unlink(missing_ok=True)
    return final


def _sync(path: Path) -> None:
    if path.is_dir():
        sync_tree(path)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
