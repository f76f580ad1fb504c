"""Snapshots of caches of Apache Ignite: what a job on `ignite://...` trains on.

A snapshot is a version of a cache of insitu that has the partitions of Ignite, each on the node beside the
server that is primary for it. It is read again for each job: Ignite has no mark by which to know that rows
are as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from insitu.base.context import Context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid.catalog import Catalog
from insitu.grid.ignite import (
    COLUMN_OPTIONS,
    Address,
    FieldOptions,
    cache_name_of,
    is_ignite_address,
    parse_address,
    parse_field_options,
    wait_until_stable,
)
from insitu.grid.importing import run_import
from insitu.grid.reading import resolve
from insitu.options import ImportOptions

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

_read: dict[tuple[str, str], tuple[int, Mapping[str, Sequence[str]]]] = {}
"""(home, cache) -> the version that this process has read, and the options that it was read with."""


def read_snapshot(
    paths: Paths,
    address: str,
    fields: FieldOptions,
    ragged: Sequence[str] = (),
    progress: Callable[[int, int, int | None], None] | None = None,
    after: CacheSpec | None = None,
    remote: RemoteStores | None = None,
) -> CacheSpec:
    """Read a cache of Ignite into a new version of its snapshots. Raises what `run_import` does.

    `after`: the version whose columns, partitions and nodes it keeps, for a job that trains on that. `remote`
    are the agents of the cluster whose head has this home, if it has one: each reads from the servers on its
    host into its own store.
    """
    name = cache_name_of(parse_address(address)) if after is None else after.name
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
    fields = parse_field_options(given["tensor"], given["fill"], given["arrow"], given["without"])
    address = _find_servers(origin)
    wait_until_stable(address, origin["topology"][1])
    return read_snapshot(paths, str(address), fields, given["ragged"], after=before, remote=remote)


def _find_servers(origin: Mapping[str, Any]) -> Address:
    """Return the address of a snapshot with all servers that it was read from: any may be gone by now."""
    address = parse_address(origin["address"])
    servers = list(address.servers)
    for name in origin.get("servers", ()):
        with contextlib.suppress(InputError):  # the UUID of one whose address wasn't known
            servers += parse_address(f"ignite://{name}/{address.cache}").servers
    return Address(tuple(dict.fromkeys(servers)), address.cache)


def find_snapshot(
    paths: Paths, context: Context, address: str, given: Mapping[str, str | Sequence[str]]
) -> tuple[str, int | None]:
    """Return (cache, version) of the snapshot that this process trains on; version None: that of the job.

    Outside a job the cache is read by the first call. Another name than that of a cache of Ignite is returned
    as it is. Raises InputError, SourceError, and TypeError for unknown options.
    """
    _check_options(address, given)
    if not is_ignite_address(address):
        return address, None
    name = cache_name_of(parse_address(address))
    lists = {option: _as_list(given.get(option, ())) for option in COLUMN_OPTIONS}
    fields = parse_field_options(lists["tensor"], lists["fill"], lists["arrow"], lists["without"])
    options = fields.to_json() | {"ragged": sorted(lists["ragged"])}
    if context.job is not None:
        _check_job(name, paths, context, address, options if any(lists.values()) else None)
        return name, None
    if context.by_hand or context.shared_secret is not None:
        raise InputError(
            f"A cache of Ignite is read by one process, for all that train together. Received: {address} in "
            f"one of several processes. Import it before: insitu import NAME {address}"
        )
    key = (str(paths.home), name)
    version, before = _read.get(key, (0, options))
    if before != options:
        raise InputError(
            f"A process reads a cache of Ignite once. Received: {address} with {_write(options)}, after it "
            f"was read with {_write(before)}. Give the same options, and choose columns by features="
        )
    if Catalog(paths).find(name, version) is None:
        version = read_snapshot(paths, address, fields, lists["ragged"]).version
        _read[key] = version, options
    return name, version


def _check_options(name: str, given: Mapping[str, object]) -> None:
    """Raise TypeError and InputError for options that a call with this name can't have."""
    unknown = given.keys() - set(COLUMN_OPTIONS)
    if unknown:
        raise TypeError(f"dataset() got an unexpected keyword argument {min(unknown)!r}")
    if given and not is_ignite_address(name):
        raise InputError(
            f"{' and '.join(given)} are said of the columns of a cache of Ignite. Received: cache {name}. "
            f"Leave them out"
        )


def _as_list(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _check_job(
    name: str, paths: Paths, context: Context, address: str, options: Mapping[str, Sequence[str]] | None
) -> None:
    """Raise InputError unless the job was started on this cache of Ignite, with these options if given."""
    if context.cache != name:
        raise InputError(
            f"In a job, all tasks train on one snapshot of a cache of Ignite, which `insitu start` reads. "
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
