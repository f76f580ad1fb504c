"""Runs a function as a job of several workers, and returns what they return: `insitu.run`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import traceback
from collections.abc import Callable
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.base.context import context
from insitu.base.errors import InputError, JobEnded, TaskFailed
from insitu.service.client import Job, start

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths
    from insitu.cluster import JobStatus

_REFUSED = {
    "detach": "insitu.run waits for the function to return. Start a job without waiting by insitu.start",
    "as_json": "insitu.run prints what the tasks print, and returns what they return. Leave it out",
}
"""Options of `insitu start` that make no sense here, with the reason."""


def run(function: Callable[..., Any], *arguments: Any, cache: str | None = None, **options: Any) -> list[Any]:
    """Run a function in each worker of a job, as `insitu start` runs a script, and return what they return.

    For notebooks, and for scripts that do more than train. The function travels as its source, with the
    functions, classes and imports that it uses, and with plain values: None, bools, numbers, texts, bytes,
    NumPy arrays, and lists, tuples, sets and dicts of them. They are copies: what a task changes stays there.
    The output of the tasks is printed as it comes. An interrupt stops the job.

    Arguments:
        function: A function written by `def` in a notebook or a file. Models, strategies and data sets are
            made inside it. `insitu.context()` is that of the task.
        arguments: Plain values for it, the same in each worker.
        cache: The cache that the workers train on, beside its rows; None: the function brings its own data.
        options: Those of `insitu start`, by their names with underscores, such as `workers=2` or `seed=7`;
            but `detach` and `as_json`.

    Returns a list with a plain value for each worker, in the order of their numbers, the chief first. A
    History of Keras is returned as its dict `history`, a tensor as a NumPy array.

    Raises InputError, or one of its kinds, before anything starts, for what can't travel and for options
    that can't be used; TaskFailed with the task's traceback if the function raises, returns anything else
    than plain values, or is killed more often than the job is restarted; ClusterError, StorageFull.

    Example:
        >>> def train(epochs):
        ...     strategy = insitu.MultiWorkerMirroredStrategy()
        ...     with strategy.scope():
        ...         model = make_model()
        ...     rows = insitu.dataset("digits/train").shuffle().batch(64)
        ...     return model.fit(rows, epochs=epochs)
        >>> first, second = insitu.run(train, 3, cache="digits/train", workers=2)  # doctest: +SKIP
        >>> first["loss"] == second["loss"]  # doctest: +SKIP
        True
    """
    from insitu.base.serialization import to_bytes
    from insitu.service.function_source import SCRIPT, VALUES, write_script

    if (me := context()).job_id is not None:
        raise InputError(
            f"insitu.run starts a job, and is called outside of one. Received: a call in {me.task} of "
            f"{me.job_id}. Call the function itself there"
        )
    for name in _REFUSED.keys() & options.keys():
        raise InputError(f"{_REFUSED[name]}. Received: {name}={options[name]!r}")
    script = write_script(function, arguments)
    name = getattr(function, "__name__", "function")
    options.setdefault("name", re.sub(r"[^A-Za-z0-9_.-]", "-", name).lstrip("_.-") or "function")
    with tempfile.TemporaryDirectory(prefix="insitu-run-") as folder:
        Path(folder, SCRIPT).write_text(script.text)
        Path(folder, VALUES).write_bytes(to_bytes(script.values))
        job = start(cache, folder, SCRIPT, **options)
    sys.stderr.write(f"{job.id}\n")
    try:
        _print_output(job, prefix=options.get("prefix", True))
    except KeyboardInterrupt:
        with contextlib.suppress(JobEnded):
            job.stop()
        raise
    return _read_results(job, name)


def _print_output(job: Job, *, prefix: bool) -> None:
    """Print what the tasks print, as it comes, to the job's end; insitu's own lines to stderr."""
    from insitu.cluster import split_prefix
    from insitu.service.logs import clean_line

    for line in job.logs(follow=True):
        source, text = split_prefix(line.encode())
        own = source == "insitu"
        head = f"[{source}] " if prefix or own else ""
        stream = sys.stderr if own else sys.stdout
        stream.write(f"{head}{clean_line(text)}\n")
        stream.flush()


def _read_results(job: Job, name: str) -> list[Any]:
    """Return what the workers of a job that has ended have returned. Raises TaskFailed."""
    from insitu.base.serialization import copy_value, from_bytes
    from insitu.cluster import read_status

    status = read_status(job.paths)
    if status.state.phase != "finished":
        raise _describe_failure(job.paths, status, name)
    tasks = [each.task for each in status.state.tasks if each.task.role in ("chief", "worker")]
    tasks.sort(key=lambda task: (task.role != "chief", task.index))
    # A worker that was taken away by `insitu scale` has returned nothing.
    found = [path for task in tasks if (path := _result_file(job.code, str(task))).exists()]
    return [copy_value(from_bytes(path.read_bytes())) for path in found]


def _describe_failure(job: JobPaths, status: JobStatus, name: str) -> TaskFailed:
    cause = status.state.attempts[-1].cause if status.state.attempts else None
    task = str(cause.task) if cause is not None and cause.task is not None else ""
    incarnation = next((each.incarnation for each in status.state.tasks if str(each.task) == task), 0)
    text = ""
    with contextlib.suppress(OSError, ValueError, KeyError):
        raised = json.loads(_error_file(job.code, task).read_text())
        # One of an attempt before says nothing about this one.
        text = raised["traceback"] if raised["incarnation"] == incarnation else ""
    shown = f"\n\nThe traceback of {task}:\n\n{text}" if text else ""
    message = (
        f"{name} must return in each worker. Received: the job {status.spec.job_id} {status.state.phase}: "
        f"{status.state.reason}. `insitu logs {status.spec.job_id}` shows its output{shown}"
    )
    return TaskFailed(message, job_id=status.spec.job_id, task=task, traceback=text, logs=str(job.output))


class FunctionTask:
    """A task that runs such a function. The script of the job makes it."""

    def __init__(self, script: str | PathLike[str]) -> None:
        from insitu.base.serialization import copy_value, from_bytes
        from insitu.service.function_source import VALUES

        self._folder = Path(fspath(script)).parent
        #: The plain values that the function uses, by their names.
        self.values: dict[str, Any] = copy_value(from_bytes((self._folder / VALUES).read_bytes()))

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function, and keep what it returns or raises for `run`."""
        me = context()
        try:
            self._keep(function, _to_plain(function(*arguments)))
        except SystemExit as end:
            if end.code in (None, 0):
                self._keep(function, None)
            raise
        except BaseException as error:
            frames = error.__traceback__ and error.__traceback__.tb_next
            text = "".join(traceback.format_exception(type(error), error, frames))
            with contextlib.suppress(OSError), open(_error_file(self._folder, str(me.task)), "w") as file:
                json.dump({"incarnation": me.incarnation, "traceback": text}, file)
            raise

    def _keep(self, function: Callable[..., Any], value: Any) -> None:
        from insitu.base.serialization import NotSerializable, to_bytes

        try:
            data = to_bytes(value)
        except NotSerializable as error:
            raise InputError(
                f"A function that insitu.run starts returns plain values: numbers, texts, bytes, arrays, and "
                f"lists, tuples, sets and dicts of them. Received: {function.__name__}, which returns a "
                f"{type(value).__name__} ({error}). Return such values, and save a model by model.save(PATH)"
            ) from error
        # By open(), as the files of a job's folder are written once.
        with open(_result_file(self._folder, str(context().task)), "wb") as file:
            file.write(data)


def _to_plain(value: Any) -> Any:
    """Return the history of a History of Keras, and a tensor as an array; other values as they are."""
    keras = sys.modules.get("keras")
    if keras is None:
        return value
    if isinstance(value, keras.callbacks.History):
        return value.history
    if keras.ops.is_tensor(value):
        return keras.ops.convert_to_numpy(value)
    if type(value) in (list, tuple):
        return type(value)(map(_to_plain, value))
    if type(value) is dict:
        return {key: _to_plain(each) for key, each in value.items()}
    return value


def _result_file(folder: Path, task: str) -> Path:
    return folder / f"returned-{task.replace(':', '-')}.bin"


def _error_file(folder: Path, task: str) -> Path:
    return folder / f"raised-{task.replace(':', '-')}.json"
