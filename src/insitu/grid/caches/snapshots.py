"""Snapshots of tables of other systems: what a job on a URL such as `ignite://...` trains on.

A snapshot is a version of a cache that has the partitions of the table, each on the node beside the server
that is primary for it. It is read again for each job: nothing says that rows are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from insitu.base.context import Context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid.catalog import Catalog
from insitu.grid.importing import run_import
from insitu.grid.reading import resolve
from insitu.grid.sources import (
    COLUMN_OPTIONS,
    ColumnOptions,
    find_connector,
    find_table_connector,
    load_connector,
    parse_column_options,
)
from insitu.options import ImportOptions

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

_read: dict[tuple[str, str], tuple[int, Mapping[str, Sequence[str]]]] = {}
"""(home, cache) -> the version that this process has read, and the options that it was read with."""


def read_snapshot(
    paths: Paths,
    address: str,
    fields: ColumnOptions,
    ragged: Sequence[str] = (),
    progress: Callable[[int, int, int | None], None] | None = None,
    after: CacheSpec | None = None,
    remote: RemoteStores | None = None,
) -> CacheSpec:
    """Read a table of another system into a new version of its snapshots. Raises what `run_import` does.

    `after`: the version whose columns, partitions and nodes it keeps, for a job that trains on that. `remote`
    are the agents of the cluster whose head has this home, if it has one: each reads from the servers on its
    host into its own store.
    """
    name = find_table_connector(address).name_cache(address) if after is None else after.name
    columns: dict[str, Any] = {option: tuple(values) for option, values in fields.to_json().items()}
    options = ImportOptions(name, (address,), overwrite=True, ragged=tuple(ragged), **columns)
    (cache,) = run_import(paths, options, beside_servers=True, after=after, progress=progress, remote=remote)
    return cache


def read_snapshot_again(paths: Paths, before: CacheSpec, remote: RemoteStores | None = None) -> CacheSpec:
    """Read the rows of now into the version that follows a snapshot, by the agents of `remote` if given.
    Raises what `run_import` does, and SourceError if columns or partitions are others now.

    Waits for a topology that stays: while servers come and go, partitions are on their way.
    """
    origin = dict(before.origin or {})
    given = origin["options"]
    address = load_connector(origin["kind"]).find_again(origin)
    columns = parse_column_options(given)
    return read_snapshot(paths, address, columns, given.get("ragged", ()), after=before, remote=remote)


def find_snapshot(
    paths: Paths, context: Context, address: str, given: Mapping[str, str | Sequence[str]]
) -> tuple[str, int | None]:
    """Return (cache, version) of the snapshot that this process trains on; version None: that of the job.

    Outside a job the table is read by the first call. Another name than that of a table is returned as it is.
    Raises InputError, SourceError, and TypeError for unknown options.
    """
    connector = find_connector(address)
    _check_options(address, given, is_table=connector is not None)
    if connector is None:
        return address, None
    name = connector.name_cache(address)
    lists = {option: _as_list(given.get(option, ())) for option in COLUMN_OPTIONS}
    fields = parse_column_options(lists)
    options = fields.to_json() | {"ragged": sorted(lists["ragged"])}
    if context.job is not None:
        _check_job(name, paths, context, address, options if any(lists.values()) else None)
        return name, None
    if context.by_hand or context.shared_secret is not None:
        raise InputError(
            f"A table of another system is read by one process, for all that train together. Received: "
            f"{address} in one of several processes. Import it before: insitu import NAME {address}"
        )
    key = (str(paths.home), name)
    version, before = _read.get(key, (0, options))
    if before != options:
        raise InputError(
            f"A process reads a table of another system once. Received: {address} with {_write(options)}, "
            f"after it was read with {_write(before)}. Give the same options, and choose columns by features="
        )
    if Catalog(paths).find(name, version) is None:
        version = read_snapshot(paths, address, fields, lists["ragged"]).version
        _read[key] = version, options
    return name, version


def _check_options(name: str, given: Mapping[str, object], *, is_table: bool) -> None:
    """Raise TypeError and InputError for options that a call with this name can't have."""
    unknown = given.keys() - set(COLUMN_OPTIONS)
    if unknown:
        raise TypeError(
            f"dataset() got an unexpected keyword argument {min(unknown)!r}; features= names the columns "
            f"that are read"
        )
    if given and not is_table:
        raise InputError(
            f"{' and '.join(given)} are said of the columns of a table of another system. Received: cache "
            f"{name}. Leave them out; features= names the columns that are read, such as features=['a', 'b']"
        )


def _as_list(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _check_job(
    name: str, paths: Paths, context: Context, address: str, options: Mapping[str, Sequence[str]] | None
) -> None:
    """Raise InputError unless the job was started on this table, with these options if given."""
    if context.cache != name:
        raise InputError(
            f"In a job, all tasks train on one snapshot of a table, which `insitu start` reads. "
            f"Received: {address} in a job on {context.cache or 'no cache'}. Start the job on it: insitu "
            f"start {address} JOB_DIR JOB_CMD; or import it before: insitu import NAME {address}"
        )
    cache, _ = resolve(name, paths, context)
    before: Mapping[str, Any] = (cache.origin or {}).get("options", {})
    if options is not None and dict(before) != dict(options):
        raise InputError(
            f"The columns of a job's snapshot are those that `insitu start` has read. Received: "
            f"{_write(options)} in the script, {_write(before)} at the start. Give both the same"
        )


def _write(options: Mapping[str, Sequence[str]]) -> str:
    return (
        " ".join(f"--{name} {value}" for name, values in options.items() for value in values) or "no options"
    )
