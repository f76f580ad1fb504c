"""Files of a job that users may download: checkpoints and models, nothing else of its folder."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

from insitu.base.errors import InputError
from insitu.base.paths import JobPaths

_MOST = 5000
"""Files that are listed."""


class UnknownArtifact(InputError):
    """A job has no such file, or none that may leave it."""


_MODELS = (".keras", ".h5", ".onnx", ".tflite")
"""Suffixes of models, which scripts save in their working folder, that of the job's code."""


def _roots(job: JobPaths) -> dict[str, Path]:
    return {"checkpoints": job.checkpoints, "export": job.exports, "code": job.code}


def _may_leave(root: str, file: str) -> bool:
    return root != "code" or file.endswith(_MODELS)


def list_artifacts(job: JobPaths) -> list[dict[str, Any]]:
    """Return the files as `{"path", "bytes", "changed"}`, sorted. Links are left out."""
    found: list[dict[str, Any]] = []
    for name, root in _roots(job).items():
        for parent, folders, files in os.walk(root):
            folders.sort()
            for file in sorted(files):
                path = Path(parent) / file
                if len(found) >= _MOST or path.is_symlink() or not _may_leave(name, file):
                    continue
                try:
                    state = path.stat()
                except OSError:  # a checkpoint that was replaced just now
                    continue
                shown = f"{name}/{path.relative_to(root).as_posix()}"
                found.append({"path": shown, "bytes": state.st_size, "changed": state.st_mtime})
    return found


def find_artifact(job: JobPaths, path: str) -> Path:
    """Return the file. Raises UnknownArtifact for what isn't listed, whatever links say."""
    parts = PurePosixPath(path).parts
    root = _roots(job).get(parts[0]) if parts else None
    if root is None or ".." in parts or "\0" in path or path.startswith("/"):
        raise UnknownArtifact(
            f"Files of a job are in checkpoints/, export/ and code/. Received: {path[:200]!r}"
        )
    found = root.joinpath(*parts[1:])
    try:
        inside = found.resolve(strict=True).is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError):
        inside = False
    if not inside or not found.is_file() or not _may_leave(parts[0], found.resolve().name):
        raise UnknownArtifact(f"{job.root.name} has no such file. Received: {path[:200]!r}")
    return found.resolve()
