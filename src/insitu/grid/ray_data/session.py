"""This process as a program of Ray that reads files by Ray Data. Ray is imported here."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from insitu.base.errors import InputError, SourceError
from insitu.base.process.processes import runs_raylet
from insitu.grid.ray_data.readers import ReaderRequest

ADDRESS_ENV = "RAY_ADDRESS"
_UNPICKLE_ENV = "RAY_DATA_WEBDATASET_ALLOW_UNSAFE_DESERIALIZATION"
_INSTALL = "pip install 'insitu[ray-data]'"
_MAX_SHOWN = 300
_ERROR = re.compile(r"(?:\w+\.)*[A-Z]\w*: \S")
"""A line of a traceback that names an error. Others are indented."""
_SECONDS = 60.0
"""Within which each node of a Ray cluster looks at files."""


def has_cluster() -> bool:
    """Return whether there is a Ray cluster that this process can join."""
    return bool(os.environ.get(ADDRESS_ENV)) or runs_raylet()


def import_ray_data() -> Any:
    """Return the module `ray.data`. Raises InputError if it, or what it needs, isn't installed."""
    try:
        import ray.data
    except ImportError as error:
        raise InputError(
            f"--reader needs Ray Data. Received: a Python without {error.name or error}. Install it where "
            f"`insitu import` runs and on all nodes of the Ray cluster, if there is one: {_INSTALL}"
        ) from error
    return ray.data


class RaySession:
    """A connection of this process to Ray, which it makes when it first reads. Close it."""

    def __init__(self, request: ReaderRequest) -> None:
        self._request = request
        #: Whether this object has connected the process, and not somebody before it.
        self._is_own = False

    def connect(self, *, to_cluster: bool) -> None:
        """Connect to the Ray cluster, or to a Ray of this machine alone, which begins now.

        Raises InputError if Ray isn't installed, or no cluster is there; SourceError where it doesn't take
        this process in.
        """
        if os.environ.get(_UNPICKLE_ENV, "0").lower() not in ("", "0", "false"):
            raise InputError(
                f"An import unpickles nothing. Received: {_UNPICKLE_ENV} in the environment. Unset it"
            )
        import_ray_data()
        import ray

        if ray.is_initialized():
            return
        address = os.environ.get(ADDRESS_ENV, "auto") if to_cluster else "local"
        if "://" in address:
            raise InputError(
                f"{ADDRESS_ENV} is auto or HOST:PORT of the head of a Ray cluster that this machine is a "
                f"node of. Received: {address}, which is of Ray's client. Unset it to read on this machine"
            )
        if to_cluster and not runs_raylet():
            raise InputError(
                "Nodes read by Ray where this machine is a node of a Ray cluster. Received: a machine "
                "without Ray. Join the cluster by `ray start --address HOST:PORT`, or give --read-on here"
            )
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a notice about GPUs otherwise
        if not to_cluster:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own: dict[str, Any] = {} if to_cluster else {"include_dashboard": False}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
        except Exception as error:
            ray.shutdown()
            raise SourceError(
                f"Ray must take this process in to read files. Received: {describe_failure(error)}, with "
                f"address {address}. `ray status` shows the cluster; --read-on here reads without it"
            ) from error
        self._is_own = True

    def close(self) -> None:
        """Disconnect. A Ray of this machine alone ends."""
        if self._is_own:
            import ray

            ray.shutdown()
            self._is_own = False

    def check_seen(self, states: Mapping[str, tuple[int, int]]) -> None:
        """Raise SourceError unless all nodes of Ray see the same files. `states`: path -> (size in bytes,
        when it changed last, in nanoseconds)."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        names = list(states)

        def look() -> list[Any]:  # goes to the nodes by its code, so that they needn't have insitu
            import os

            found: list[Any] = []
            for name in names:
                try:
                    each = os.stat(name)
                    found.append((each.st_size, each.st_mtime_ns))
                except OSError as error:
                    found.append(str(error.strerror))
            return found

        asked = {
            str(node["NodeManagerHostname"]): ray.remote(look)
            .options(
                num_cpus=0,
                max_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
            for node in ray.nodes()
            if node["Alive"]
        }
        problems = []
        for host, reference in asked.items():
            try:
                answers = ray.get(reference, timeout=_SECONDS)
            except Exception as error:
                problems.append(f"{host} can't look: {describe_failure(error)}")
                continue
            bad = [name for name, answer in zip(names, answers, strict=True) if answer != states[name]]
            if bad:
                more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
                problems.append(f"{host} has no {bad[0]}, or another one{more}")
        if problems:
            raise SourceError(
                f"All nodes of the Ray cluster must see the same files. Received: {'; '.join(problems)}. Put "
                f"them where all nodes see them under the same path, or give `--read-on here`"
            )

    def read_tables(
        self, names: Sequence[str], *, include_paths: bool, rows: int | None = None
    ) -> Iterator[Any]:
        """Yield the rows of files as Arrow tables: file by file, as they are named, in the order of each.

        With `include_paths` there is a column `path`, with the path of each row's file without the protocol.
        `rows`: so many of the first ones at most. Raises SourceError if Ray can't read.
        """
        data = import_ray_data()
        with warnings.catch_warnings():  # it warns of its own settings
            warnings.simplefilter("ignore")
            context = data.DataContext.get_current()
            context.execution_options.preserve_order = True
            context.enable_progress_bars = False
            if hasattr(context, "use_datasource_v2"):  # it cuts files into pieces of its own
                context.use_datasource_v2 = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        options = {**self._request.options, "include_paths": include_paths, "file_extensions": None}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dataset = getattr(data, self._request.reader.function)(list(names), **options)
                if rows is not None:
                    dataset = dataset.limit(rows)
                tables = iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))
        except Exception as error:
            raise self._explain(error, names) from error
        try:
            while True:
                try:
                    table = next(tables, None)
                except Exception as error:
                    raise self._explain(error, names) from error
                if table is None:
                    return
                yield table
        finally:
            if hasattr(tables, "close"):
                tables.close()

    def _explain(self, error: Exception, names: Sequence[str]) -> SourceError:
        said = describe_failure(error)
        if self._request.reader.function == "read_images":
            said = find_damaged_picture(names) or said
        for name in names:
            said = said.replace(name, name.partition("?")[0]) if "?" in name else said
        packages = self._request.reader.packages
        missing = [package for module, package in packages.items() if f"'{module}" in said or package in said]
        if "No module named" in said or ("import" in said.lower() and missing):
            return SourceError(
                f"--reader {self._request.name} needs {' and '.join(missing or ['another package'])} on each "
                f"node that reads. Received: {said}. Install it there by pip"
            )
        return SourceError(
            f"Files must be as Ray's reader {self._request.name} expects them. Received: {said}. Name "
            f"files of that kind alone, or fetch them again"
        )


def describe_failure(error: BaseException) -> str:
    """Return in a line what has failed: the first error of Ray's text, which caused the others, else its last
    line. Advice of Ray's own may follow it."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    found = next(filter(_ERROR.match, lines), lines[-1] if lines else type(error).__name__)
    return f"{found.strip():.{_MAX_SHOWN}}"


def find_damaged_picture(names: Sequence[str]) -> str:
    """Return the first picture of this machine that can't be read, and why, which Ray doesn't name; else an
    empty text."""
    try:
        from PIL import Image
    except ImportError:
        return ""
    for name in names:
        try:
            with Image.open(name) as picture:
                picture.load()
        except FileNotFoundError:  # a URL
            return ""
        except Exception as error:
            return f"{name}: {error}"
    return ""
