"""Have what Keras saves in a job be whole, although all tasks save it: published by a rename.

In the job's folder `base/disk/written_once.py` has the chief write files. This is for other folders, to which
each task publishes the same, and for exports, which TensorFlow writes without Python's `open`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from insitu.base.context import context
from insitu.base.disk.written_once import find_written_files
from insitu.base.process.import_hooks import call_after_import


def install_whole_saves() -> None:
    """Treat what Keras saves as the module says, in a task that trains. Done once."""
    owner = next(base for base in keras.Model.__mro__ if "export" in vars(base))
    if getattr(owner.export, "is_whole", False):
        return
    owner.export = _export_whole(owner.export)
    for module, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        setattr(module, name, _save_whole(getattr(module, name)))
    call_after_import("tensorflow", _load_own_exports)


def _save_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_whole(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        files = find_written_files()
        is_elsewhere = files is not None and _is_local(filepath) and files.name_of(filepath) is None
        if not is_elsewhere or not Path(filepath).parent.is_dir():
            return save(model, filepath, *args, **kwargs)
        with _whole(Path(filepath)) as place:
            return save(model, str(place), *args, **kwargs)

    return save_whole


def _export_whole(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def export_whole(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        files = find_written_files()
        if files is None or not _is_local(filepath):
            return export(model, filepath, *args, **kwargs)
        target = Path(filepath)
        target.parent.mkdir(parents=True, exist_ok=True)
        if files.is_chief:
            with _whole(target) as place:
                return export(model, str(place), *args, **kwargs)
        own = Path(files.own_folder(filepath))
        shutil.rmtree(own, ignore_errors=True)
        own.parent.mkdir(parents=True, exist_ok=True)
        result = export(model, str(own), *args, **kwargs)
        if own.is_dir() and not target.exists():
            # In the job's folder, what this task writes would go to a place of its own.
            _publish_copy(own, target, target.parent if files.name_of(target) is None else own.parent)
        return result

    export_whole.is_whole = True  # type: ignore[attr-defined]
    return export_whole


def _load_own_exports() -> None:
    """Have TensorFlow load what this task has exported: the chief may just be replacing what is there."""
    import tensorflow as tf

    # An import of `tensorflow.saved_model.experimental`, as in Keras' export, makes another module
    # `tf.saved_model`, with the function of the defining module.
    defined: Any = importlib.import_module("tensorflow.python.saved_model.load")
    load = defined.load

    @functools.wraps(load)
    def load_own(export_dir: Any, *args: Any, **kwargs: Any) -> Any:
        files = find_written_files()
        if files is not None and not files.is_chief and _is_local(export_dir):
            own = files.own_folder(export_dir)
            export_dir = own if os.path.isdir(own) else export_dir
        return load(export_dir, *args, **kwargs)

    defined.load = tf.saved_model.load = load_own


def _is_local(filepath: Any) -> bool:
    return isinstance(filepath, str | os.PathLike) and "://" not in str(filepath)


@contextlib.contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Yield a path to write to. The files there at the end replace `target`, and so do files beside it.
    Nothing changes after an error."""
    me = context()
    task = f".{target.name}-{me.job_id}-{me.role}-{me.index}-"
    own = f"{task}{os.getpid()}-"
    for left in target.parent.glob(f"{glob.escape(task)}*"):
        if not left.name.startswith(own):
            # An earlier process of this task was killed while it saved.
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=own, dir=target.parent))
    try:
        yield folder / target.name
        # The file that names the others comes last.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == target.name):
            _replace(path, target.parent / path.name, folder)
    finally:
        shutil.rmtree(folder)


def _replace(path: Path, there: Path, folder: Path) -> None:
    """Rename `path` to `there`, whatever is there, which goes to `folder`."""
    while True:
        try:
            os.replace(path, there)
            return
        except OSError as error:
            if not (path.is_dir() and error.errno in (errno.ENOTEMPTY, errno.EEXIST)):
                raise
            # A folder that has files isn't replaced by a rename. Another task may have just published it.
            os.rename(there, tempfile.mkdtemp(dir=folder, prefix="replaced-"))


def _publish_copy(folder: Path, target: Path, beside: Path) -> None:
    """Copy a folder to `target`, whole, unless another task was faster. The copy is made in `beside`."""
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=beside))
    try:
        copy = shutil.copytree(folder, part / target.name)
        with contextlib.suppress(OSError):
            os.rename(copy, target)
    finally:
        shutil.rmtree(part)
