"""The command that shows what the tasks of a job have written for TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from insitu.base.errors import InputError

if TYPE_CHECKING:
    from insitu.base.paths import JobPaths


_WITHOUT_TENSORFLOW = (
    "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf'); "
    "from tensorboard.main import run_main; sys.exit(run_main())"
)
"""Starts TensorBoard with its own access to files, by fsspec. TensorFlow's doesn't know `insitu://`."""


def has_summaries(job: JobPaths) -> bool:
    """Return whether a task has written something for TensorBoard."""
    from insitu.cluster import find_event_folders

    return bool(find_event_folders(job))


def make_tensorboard_command(
    job: JobPaths | str, host: str, port: int, find: Callable[[str], Any] | None = None
) -> list[str]:
    """Return the command that starts TensorBoard for a job, or for files of `insitu://`. Raises InputError if
    it isn't installed."""
    from importlib.util import find_spec

    from insitu.cluster import find_event_folders

    if (find or find_spec)("tensorboard") is None:
        raise InputError(
            "`insitu tensorboard` starts TensorBoard. Received: an environment without it. Install it: pip "
            "install 'insitu[tensorboard]'"
        )
    if isinstance(job, str):
        options = ["--logdir", job, "--host", host, "--port", str(port), "--load_fast", "false"]
        return [sys.executable, "-P", "-c", _WITHOUT_TENSORFLOW, *options]
    folders = find_event_folders(job) or [job.all_summaries]
    # Its names of runs are paths in this folder.
    shown = job.root if len(folders) > 1 else folders[0]
    options = ["--logdir", str(shown), "--host", host, "--port", str(port)]
    return [sys.executable, "-m", "tensorboard.main", *options]
