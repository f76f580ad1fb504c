"""Lets Keras read and write `insitu://`: models, weights, and what its own callbacks keep.

Keras reaches files of other schemes by TensorFlow's `tf.io.gfile`, which doesn't know this one, and isn't
there on other backends. The object that stands for it in Keras is replaced by one that knows both.
"""

from __future__ import annotations

import shutil
from typing import Any

from keras.src.utils import file_utils

SCHEME = "insitu://"


def install_file_access() -> None:
    """Have Keras' functions for files use the cluster's for `insitu://`. Done once."""
    if not isinstance(file_utils.gfile, _Files):
        file_utils.gfile = _Files(file_utils.gfile)


def _is_own(path: Any) -> bool:
    return str(path).startswith(SCHEME)


def _find(path: Any) -> tuple[Any, str]:
    """Return the file system of a path, and the path in it."""
    import fsspec

    system, name = fsspec.core.url_to_fs(str(path))
    return system, str(name)


class _Files:
    """Keras' `gfile`: that of TensorFlow, and the cluster's files."""

    available = True

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _others(self, path: Any) -> Any:
        """Return TensorFlow's. Raises ValueError as Keras does if there is none."""
        if not self._original.available:
            file_utils._raise_if_no_gfile(path)
        return self._original

    def GFile(self, path: Any, mode: str = "r") -> Any:
        if not _is_own(path):
            return self._others(path).GFile(path, mode=mode)
        system, name = _find(path)
        return system.open(name, mode)

    def exists(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).exists(path)
        system, name = _find(path)
        return system.exists(name)

    def isdir(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).isdir(path)
        system, name = _find(path)
        return system.isdir(name)

    def listdir(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).listdir(path)
        system, name = _find(path)
        return [each.rpartition("/")[2] for each in system.ls(name, detail=False)]

    def makedirs(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).makedirs(path)
        system, name = _find(path)
        return system.makedirs(name, exist_ok=True)

    def remove(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).remove(path)
        system, name = _find(path)
        return system.rm_file(name)

    def rmtree(self, path: Any) -> Any:
        if not _is_own(path):
            return self._others(path).rmtree(path)
        system, name = _find(path)
        return system.rm(name, recursive=True)

    def join(self, path: Any, *paths: Any) -> Any:
        if not _is_own(path):
            return self._others(path).join(path, *paths)
        return "/".join([str(path).rstrip("/"), *(str(each).strip("/") for each in paths)])

    def copy(self, source: Any, target: Any, overwrite: bool = False) -> Any:
        if not _is_own(source) and not _is_own(target):
            return self._others(source).copy(source, target, overwrite=overwrite)
        with self._open(source, "rb") as read, self._open(target, "wb") as written:
            shutil.copyfileobj(read, written, 4 << 20)
        return None

    def _open(self, path: Any, mode: str) -> Any:
        return file_utils.File(str(path), mode)
