"""Imports data and starts jobs from Python, such as a notebook: `insitu.import_data` and `insitu.start`."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.base.wording import list_first, suggest_name
from insitu.options import Declared, ImportOptions, JobOptions, options_of

if TYPE_CHECKING:
    from insitu.base.spec import CacheSpec
    from insitu.grid.transfer import RemoteStores

_POLL_SECONDS = 0.2


def find_agents(paths: Paths) -> RemoteStores | None:
    """Return the stores that an import in this home writes to; None: those of this machine alone.

    Raises ClusterError if another machine has the head, and if no head answers.
    """
    from insitu.grid import is_home_of_agent

    if not (paths.head.exists() or is_home_of_agent(paths)):
        return None
    from insitu.cluster import find_owners

    return find_owners(paths)


def import_data(name: str, source: Any, **options: Any) -> list[CacheSpec]:
    """Read rows into a new version of a cache, split into partitions over the nodes.

    Arguments:
        name: The cache's name, such as "orders".
        source: A path, a glob or a URL, or a list of them, as `insitu import` takes them; or a DataFrame of
            pandas or Polars, an Arrow table or dataset, a dict of arrays, a NumPy array [rows, ...] (its
            column is x), a tf.data.Dataset, a Hugging Face dataset, or a generator of rows as dicts.
        options: Those of `insitu import`, by their names with underscores. Options with `COLUMN=VALUE` take a
            dict, those that may be repeated a list.

    Returns the versions that were made: one, or one for each part of `split`. Each has `name`, `version`,
    `rows` and `columns`. What was inferred, such as the form of a CSV file, is said on stderr.

    Raises InputError for a source or options that can't be used, SourceError for data that can't be read or
    taken as it is (the message says by which options it is), CacheExists without `overwrite=True`. Then all
    caches are as they were.

    Example:
        >>> import insitu
        >>> (cache,) = insitu.import_data("orders", {"price": [1.5, 2.0], "city": ["Rome", "Oslo"]})
        >>> cache.rows
        2
    """
    from insitu.grid import open_object, run_import

    paths = Paths.default()
    texts = _list_paths(source)
    given = _read_options(ImportOptions, options)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="insitu-import-") as spool:
        data = None if texts else open_object(source, Path(spool))
        sources = texts or (str(getattr(data, "path", "rows")),)
        asked = ImportOptions(name, sources, **given)
        published = run_import(paths, asked, note=notes.append, remote=find_agents(paths), data=data)
    for note in list_first(notes):
        sys.stderr.write(f"[insitu] {note}\n")
    return published


def _list_paths(source: Any) -> tuple[str, ...]:
    """Return the paths and URLs that are imported; none for other sources."""
    if isinstance(source, str | PathLike):
        return (fspath(source),)
    if (
        isinstance(source, list | tuple)
        and source
        and all(isinstance(each, str | PathLike) for each in source)
    ):
        return tuple(fspath(each) for each in source)
    return ()


def _read_options(declaration: type[Declared], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of declared options. Raises InputError for those that there aren't."""
    known = {each.name: each for each in options_of(declaration)}
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise InputError(f"Options are {', '.join(known)}. Received: {name}{suggest_name(name, known)}")
        option = known[name]
        if isinstance(value, Mapping) and option.many:
            value = [f"{key}={each}" for key, each in value.items()]
        if isinstance(value, str) and option.many:
            value = [value]
        if option.many:
            value = tuple(map(str, value or ()))
        elif isinstance(value, str):
            value = option.read(value)
        found[name] = value
    return found


class Job:
    """A job that `insitu.start` has started."""

    def __init__(self, job_id: str) -> None:
        #: Its id, as `insitu ps` shows it.
        self.id = job_id
        #: The names of its files.
        self.paths = Paths.default().job(job_id)

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {self.state})"

    @property
    def state(self) -> str:
        """Its state: pending, running, finished, failed or stopped."""
        from insitu.cluster import read_status

        return str(read_status(self.paths).state.phase)

    @property
    def code(self) -> Path:
        """The folder in which its script runs and writes."""
        return self.paths.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended, at most `timeout` seconds. Returns its exit code, 0 if it has finished.

        Raises ClusterError if it still runs then.
        """
        from insitu.cluster import is_running, read_exit_code

        deadline = None if timeout is None else time.monotonic() + timeout
        while is_running(self.paths):
            if deadline is not None and time.monotonic() > deadline:
                raise ClusterError(
                    f"{self.id} must end within {timeout:g} s. Received: a job that is {self.state}. It "
                    f"continues; wait again, or stop it by stop()"
                )
            time.sleep(_POLL_SECONDS)
        return read_exit_code(self.paths)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the lines of its output, with the task before each. `follow`: also those to come, to its
        end."""
        from insitu.cluster import follow as follow_log
        from insitu.cluster import is_running

        job = self.paths
        for lines in follow_log(job.output, (lambda: not is_running(job)) if follow else (lambda: True)):
            yield from (line.decode(errors="replace") for line in lines)

    @property
    def history(self) -> dict[str, list[float]]:
        """The logs of each epoch, as `keras.callbacks.History` has them; those of all calls of `fit` in a
        row."""
        from insitu.cluster import read_curve

        ends = {(point.call, point.epoch): point.metrics for point in read_curve(self.paths)}
        found: dict[str, list[float]] = {}
        for metrics in ends.values():
            for name, value in metrics.items():
                found.setdefault(name, []).append(value)
        return found

    def stop(self) -> None:
        """End it. It can be continued by `insitu resume`. Raises JobEnded if it has ended already."""
        from insitu.cluster import stop_job

        stop_job(self.paths)


def start(
    cache: str | None, job_dir: str | PathLike[str], script: str, *arguments: str, **options: Any
) -> Job:
    """Start a training job on the nodes that hold a cache, as `insitu start` does. Returns it at once.

    Arguments:
        cache: The cache's name; None: the script brings its own data.
        job_dir: The folder, or a .zip, that holds the script. The job runs a copy of it.
        script: The script in it, such as "train.py".
        arguments: Arguments of the script.
        options: Those of `insitu start`, by their names with underscores, such as `workers=2`.

    Raises InputError, or one of its kinds, for what can't be used; UnknownCache; StorageFull.

    Example:
        >>> job = insitu.start("digits/train", "my_job", "train.py", workers=2)  # doctest: +SKIP
        >>> job.wait(), job.history["loss"]  # doctest: +SKIP
    """
    from insitu.base.spec import NO_CACHE
    from insitu.cluster import submit

    given = _read_options(JobOptions, options)
    command = (script, *map(str, arguments))
    options_of_job = JobOptions(NO_CACHE if cache is None else cache, Path(job_dir), command, **given)
    return Job(submit(Paths.default(), options_of_job))
