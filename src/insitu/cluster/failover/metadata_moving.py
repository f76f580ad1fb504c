"""Moves the metadata of the cluster of this home from its file to an etcd, or back, while no head runs.

All is copied and read back first. Then one step decides where the truth is:

- To etcd: the file `metadata.json` of this home appears. Nobody changes the catalogue meanwhile.
- From etcd: its store gets the mark `moved`, by a transaction that compares the key of the head. No head
  begins with it any more. The file `metadata.json` goes after that, and this home's head may begin.

Whatever else is left to do is done by the same command, run again, or by the next start of the head.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from insitu.base.errors import ClusterError, CorruptMetadata, InputError
from insitu.base.paths import Paths
from insitu.base.process.processes import read_host
from insitu.cluster.decide import HEAD_LEASE_SECONDS, find_cluster_number
from insitu.cluster.failover.etcd_members import OWN_ETCD, HostCommands, Report, make_members, start_members
from insitu.cluster.leases import NUMBER_KEY, OPTIONS_KEY, Lead, Won, win
from insitu.cluster.wire import HeadRecord, change_head, check_record_owner, read_head, take_process_lock
from insitu.grid import Catalog, is_catalog_record
from insitu.grid.shared_files import advance_generation
from insitu.metadata import (
    HEAD_KEY,
    MOVED,
    MOVING,
    FencedStore,
    MetadataSettings,
    MetadataStore,
    Record,
    copy_records,
    open_etcd,
    open_store,
    put_mark,
    read_leader,
    read_mark,
    read_records,
    read_settings,
    read_url,
    remove_mark,
    require_target,
    require_truth,
    write_fence,
    write_settings,
)

EMBEDDED = "embedded"
"""The value of `--metadata` for the file in the head's home."""
_LOOK_SECONDS = 1.0
_OF_HEAD = (NUMBER_KEY, OPTIONS_KEY)
"""Keys of etcd that the record of the head has otherwise."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The records to move."""

    #: Their present store.
    origin: str
    #: Their new store.
    target: str
    #: How many records say which files there are.
    names: int
    #: How many are the catalogue.
    catalog: int
    #: Their bytes.
    size: int


Ask = Callable[[MovePlan], bool]
"""Returns whether somebody agrees."""


def move_metadata(paths: Paths, wanted: str, ask: Ask) -> bool:
    """Move the metadata of this home's cluster to the etcd of a URL, or to this home
    (EMBEDDED). Returns whether it is there now.

    Raises InputError if a head runs, or the target holds something else; GridError, MetadataError.
    """
    require_home(paths)
    settings = read_settings(paths)
    if wanted == OWN_ETCD or (settings is not None and settings.peers):
        raise InputError(
            "insitu starts its etcd on the hosts while metadata is moved. Received: no --hosts. Give --hosts "
            "FILE, and --launcher as for `insitu up`"
        )
    with without_head(paths):
        return _move(paths, wanted, ask)


def require_home(paths: Paths) -> HeadRecord:
    """Return the record of the head whose home this is. Raises InputError if there is none to be moved."""
    check_record_owner(paths)
    record = read_head(paths)
    if record is None or not record.has_metadata:
        raise InputError(
            f"Metadata is moved in the home of a head. Received: {paths.home}, which has none. A new cluster "
            f"gets its store by `insitu up --hosts FILE --metadata URL`"
        )
    return record


def _move(paths: Paths, wanted: MetadataSettings | str, ask: Ask) -> bool:
    record = require_home(paths)
    if wanted == EMBEDDED:
        return _move_here(paths, record, ask)
    settings = wanted if isinstance(wanted, MetadataSettings) else read_url(wanted, record.cluster)
    return _move_to_etcd(paths, record, settings, ask)


@contextlib.contextmanager
def without_head(paths: Paths) -> Iterator[None]:
    """Keep a head from being started here. Raises InputError if one runs."""
    lock = take_process_lock(paths.head_lock)
    if lock is None:
        raise InputError(
            f"Metadata is moved while no head runs. Received: the head of {paths.home}, which does. Run "
            f"`insitu down` first"
        )
    try:
        yield
    finally:
        os.close(lock)


def _name_here(paths: Paths) -> str:
    return f"{paths.metadata} on {read_host()}"


def _move_to_etcd(paths: Paths, record: HeadRecord, wanted: MetadataSettings, ask: Ask) -> bool:
    before = read_settings(paths)
    if before is not None and before.url != wanted.url:
        raise InputError(
            f"Metadata is moved between a home and an etcd. Received: --metadata {wanted.url}, and "
            f"{before.url}, which has it. Move it to `embedded` first"
        )
    with contextlib.closing(open_etcd(before or wanted, create=before is None)) as target:
        if before is None and not _fill_etcd(paths, record, wanted, target, ask):
            return False
        finish_move(paths, before or wanted, target)
    return True


def _fill_etcd(
    paths: Paths, record: HeadRecord, wanted: MetadataSettings, target: MetadataStore, ask: Ask
) -> bool:
    """Copy all to etcd, and have it be the truth. Returns whether that was done."""
    here = _name_here(paths)
    with _opened(paths, record) as source:
        if (where := read_mark(source, MOVED)) is None:
            require_truth(source, str(paths.metadata))
            require_target(target, wanted.url, here)
            if not ask(_plan(paths, record, source, wanted.url)):
                return False
            with Catalog(paths).hold() as catalog:
                copy_records(_collect(source, catalog, record), target, here, source.list_made())
                write_settings(paths, wanted)  # from here on etcd has the truth
            return True
    if where != wanted.url:
        raise InputError(
            f"Metadata is moved from the home that uses it. Received: {paths.home}, whose store was moved to "
            f"{where}. Name that one: then this home uses it again"
        )
    require_truth(target, wanted.url)
    write_settings(paths, wanted)  # the file was lost
    return True


def _plan(paths: Paths, record: HeadRecord, source: MetadataStore, target: str) -> MovePlan:
    with Catalog(paths).hold() as catalog:
        records = _collect(source, catalog, record)
    return _count(records, _name_here(paths), target)


def _count(records: Mapping[str, Record], origin: str, target: str) -> MovePlan:
    catalog = sum(map(is_catalog_record, records))
    names = len(records) - catalog - sum(key in records for key in _OF_HEAD)
    return MovePlan(origin, target, names, catalog, sum(len(each.value) for each in records.values()))


def _collect(source: MetadataStore, catalog: Mapping[str, bytes], record: HeadRecord) -> dict[str, Record]:
    """Return the records for etcd: names, the catalogue, and the fields of the head's record."""
    options = json.dumps({"copy_lost_after": record.copy_lost_after}).encode()
    own = {NUMBER_KEY: b"%d" % find_cluster_number(record.epoch), OPTIONS_KEY: options}
    others = {key: Record(key, value, 0) for key, value in {**catalog, **own}.items()}
    return advance_generation(read_records(source)) | others


@contextlib.contextmanager
def _opened(paths: Paths, record: HeadRecord) -> Iterator[MetadataStore]:
    with contextlib.closing(open_store(paths.metadata, record.cluster)) as store:
        yield store


def finish_move(paths: Paths, settings: MetadataSettings, store: MetadataStore) -> None:
    """Do what is left of a move to this etcd, which has the truth, if that was interrupted: mark the previous
    file. Raises InputError if the truth isn't there."""
    record = read_head(paths)
    if read_mark(store, MOVED) is not None or read_mark(store, MOVING) not in (None, _name_here(paths)):
        require_truth(store, settings.url)
    if record is not None and paths.metadata.exists():
        with contextlib.suppress(CorruptMetadata), _opened(paths, record) as before:  # which is no truth
            if read_mark(before, MOVED) is None and read_mark(before, MOVING) is None:
                put_mark(before, MOVED, settings.url)
    remove_mark(store, MOVING)


def _move_here(paths: Paths, record: HeadRecord, ask: Ask) -> bool:
    settings = read_settings(paths)
    here = _name_here(paths)
    if settings is None:
        with _opened(paths, record) as store:
            if read_mark(store, MOVED) is None:
                _forget_etcd(paths)
                return True
        raise InputError(
            f"Metadata is moved from the home that uses it. Received: {paths.home}, whose store was moved, "
            f"and no {paths.metadata_settings.name}. Run the command in the home of the last head"
        )
    with contextlib.closing(open_etcd(settings)) as source:
        moved = read_mark(source, MOVED)
        if moved not in (None, here):
            raise InputError(
                f"The truth is moved. Received: {settings.url}, which was moved to {moved}. Run the command "
                f"there"
            )
        if moved is None:
            records = read_records(source)
            if not ask(_count(records, settings.url, here)):
                return False
            _copy_here(paths, record, source, settings)
    with _opened(paths, record) as target:
        remove_mark(target, MOVING)
    with Catalog(paths).hold():  # which has what etcd has, and nobody changes it
        paths.metadata_settings.unlink()
    _forget_etcd(paths)
    return True


def _forget_etcd(paths: Paths) -> None:
    for file in (paths.fence, paths.catalog_pending):
        file.unlink(missing_ok=True)


def _win(source: MetadataStore, record: HeadRecord) -> Won:
    """Win the key of the head. That of a command like this one which was killed goes with its lease."""
    deadline = time.monotonic() + HEAD_LEASE_SECONDS + _LOOK_SECONDS
    while True:
        try:
            return win(source, record.epoch, own=record.instance, after_down=True)
        except ClusterError:
            leader = read_leader(source.get([HEAD_KEY])[0].get(HEAD_KEY))
            if (leader is not None and leader.address) or time.monotonic() > deadline:
                raise
        time.sleep(_LOOK_SECONDS)


def _copy_here(paths: Paths, record: HeadRecord, source: MetadataStore, settings: MetadataSettings) -> None:
    """Have no agent become head, copy all, and mark etcd as moved."""
    with contextlib.closing(open_store(paths.metadata, record.cluster, create=True)) as target:
        require_target(target, str(paths.metadata), settings.url)
        won = _win(source, record)
        lead = Lead(source, won)
        lead.resign(down=True)
        key = source.get([HEAD_KEY])[0].get(HEAD_KEY)
        leader = read_leader(key)
        if key is None or leader is None or leader.instance != won.instance or not leader.is_down:
            raise ClusterError("No head leads while metadata is moved. Received: another one. Try again")
        change_head(paths, epoch=won.epoch, instance=won.instance, replaced_by="")
        write_fence(paths, key.value)
        fenced = FencedStore(source, key.value)
        Catalog(paths).take_over()
        records = read_records(source)
        names = {k: r for k, r in records.items() if not is_catalog_record(k) and k not in _OF_HEAD}
        copy_records(advance_generation(names), target, settings.url, source.list_made())
        if OPTIONS_KEY in records:
            change_head(paths, **json.loads(records[OPTIONS_KEY].value))
        put_mark(fenced, MOVED, _name_here(paths))  # from here on no head begins with etcd


def move_with_members(paths: Paths, to_etcd: bool, commands: HostCommands, report: Report, ask: Ask) -> bool:
    """Move the metadata to an etcd that insitu runs, or from it to this home. Members run meanwhile, and end
    after it. Returns whether it is there now. Raises as `move_metadata`, and ClusterError."""
    require_home(paths)
    settings = read_settings(paths)
    with without_head(paths):
        is_new = settings is None
        if settings is None:
            settings = make_members(paths, commands)
        try:
            start_members(paths, settings, commands, report, is_new=is_new)
            return _move(paths, settings if to_etcd else EMBEDDED, ask)
        finally:
            commands.stop()
