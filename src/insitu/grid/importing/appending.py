"""`insitu import --append`: a new version of a cache that shares the partitions of the one before it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from insitu.base.disk.durable import staged_file
from insitu.base.disk.guarded_paths import list_trusted_users
from insitu.base.errors import GridError, InputError, SourceError
from insitu.base.paths import Paths, StagedPaths
from insitu.base.spec import CacheSpec, Column, NodeId
from insitu.grid.intake import LABEL
from insitu.grid.partitions import check_size
from insitu.grid.sources import SourceOptions, describe_columns
from insitu.grid.stores import check_quotas
from insitu.options import ImportOptions


def check_base(base: CacheSpec, options: ImportOptions) -> None:
    """Raise InputError if rows can't be appended to `base`, or if options are given that it decides."""
    conflicting = {
        "--overwrite": options.overwrite,
        "--split": options.split is not None,
        "--key": options.key is not None,
        "--backups": options.backups not in (0, base.backups),
        "--label-from-filename": options.label_from_filename and not base.labels,
        "--label-from-folder": options.label_from_folder and not base.labels,
        "--compress": options.compress not in (None, base.codec),
    }
    given = [option for option, is_given in conflicting.items() if is_given]
    if given:
        raise InputError(
            f"--append takes all but the rows from the cache as it is. Received: {' and '.join(given)}. "
            f"Leave {'it' if len(given) == 1 else 'them'} out, or import all rows again with --overwrite"
        )
    if base.key is not None:
        raise InputError(
            f"--append puts new rows into new partitions, but rows with equal keys belong together. "
            f"Received: cache {base.name}, placed by --key {base.key}. Import all rows again with --overwrite"
        )
    if not base.block_rows:
        raise InputError(
            f"--append needs a cache that was imported in blocks. Received: version {base.version} of "
            f"{base.name}, which is older. Import all rows again with --overwrite"
        )


def options_of_base(base: CacheSpec, options: SourceOptions) -> SourceOptions:
    """Return how sources are read whose types are only inferred, so that they agree with `base`."""
    own = [column.name for column in base.columns if not (base.labels and column.name == LABEL)]
    name = own[0] if len(own) == 1 and options.column == SourceOptions().column else options.column
    return replace(options, column=name, base=base.columns)


def check_columns(base: CacheSpec, columns: tuple[Column, ...], rows: str = "What is appended") -> None:
    """Raise SourceError unless the new rows have the columns of `base`. `rows` names them."""
    if columns != base.columns:
        raise SourceError(
            f"{rows} must have the columns of the cache: {describe_columns(base.columns)}. "
            f"Received: {describe_columns(columns)}"
        )


def check_copies(paths: Paths, base: CacheSpec, nodes: Collection[NodeId]) -> None:
    """Raise CorruptPartition if a partition of `base`, which the new version is to share, isn't there, and
    StorageFull if a store has no room for those that it has as links: their files come into it.

    `nodes` are those whose stores are in this home.
    """
    needs: dict[NodeId, int] = {}
    for info in base.partitions:
        for owner in info.owners:
            if owner in nodes:
                path = paths.partition(owner, base.name, base.version, info.index)
                check_size(path, info)
                if path.is_symlink():
                    needs[owner] = needs.get(owner, 0) + info.bytes
    check_quotas(paths, needs)


def join_labels(base: CacheSpec, found: set[str], own: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the classes of all rows: those of `base` keep their numbers, new ones follow, sorted.

    `own`: the classes by which sources number their labels. Raises SourceError if `base` has others.
    """
    if own and own != base.labels:
        raise SourceError(
            f"What is appended must number its classes as the cache does: "
            f"{', '.join(base.labels) or 'none'}. Received: {', '.join(own)}"
        )
    return (*base.labels, *sorted(found - set(base.labels)))


def share_partitions(paths: Paths, base: CacheSpec, staged: StagedPaths, nodes: Collection[NodeId]) -> None:
    """Put the partitions of `base` on `nodes` into a staged version, too, if possible as further names of
    files.

    Either version can be dropped without harm to the other. Raises OSError, CorruptPartition for what isn't
    there, and GridError.
    """
    check_copies(paths, base, nodes)
    for info in base.partitions:
        for owner in (owner for owner in info.owners if owner in nodes):
            target = staged.partition(owner, info.index)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)  # of an import that was interrupted here
            source = paths.partition(owner, base.name, base.version, info.index)
            _check_link(paths, source)
            link_file(source.resolve(), target)
            # The record says at which time and inode the file was right: these are the same for a link.
            record = paths.verified(owner, base.name, base.version, info.index)
            with contextlib.suppress(OSError):
                shutil.copyfile(record, target.with_suffix(record.suffix))


def link_file(source: Path, target: Path) -> None:
    """Give a file one more name, `target`, which may be in use; if that is impossible, copy it. Raises
    OSError."""
    with staged_file(target) as staged:
        try:
            os.link(source, staged)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links, another one, or a file with too many
            shutil.copy2(source, staged)
            with staged.open("rb") as file:
                os.fsync(file.fileno())
        staged.replace(target)


def _check_link(paths: Paths, source: Path) -> None:
    """Raise GridError if another member of a shared home has put a link in the place of a partition: its
    target must not get into the store."""
    found = source.lstat()
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in list_trusted_users(paths.home):
        raise GridError(
            f"A partition is a file. Received: {source}, which user {found.st_uid} has made a link to "
            f"{os.readlink(source)}. If that user moved it to a second path with an earlier version, `insitu "
            f"repair` brings it back. Else have that user say why, or drop the cache"
        )
