"""Settings of a node's store by its owner, such as its quota.

They are in a file in the store, so that they stay with its disk. Readers don't need it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from insitu.base.disk.access import is_shared, make_folder, owner_file_mode
from insitu.base.disk.durable import replace_file, seal, unseal
from insitu.base.disk.guarded_paths import read_guarded
from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId

_FORMAT = 1
_SECOND_PATH = re.compile(r"insitu-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings of one store. Written by `change_settings`."""

    #: The bytes that the store may hold; None: as many as fit.
    quota: int | None = None
    #: The path to which an earlier version has put partitions, see repair.py; None: nowhere.
    second_path: Path | None = None
    #: The bytes of memory that files of `insitu://` may use; None: a share of the host's.
    file_memory: int | None = None


def read_settings(paths: Paths, node: NodeId) -> StoreSettings:
    """Return what was set for the store of a node.

    Raises GridError if that can't be read, also if another member of a shared home has written it.
    """
    path = paths.store_settings(node)
    try:
        state = unseal(read_guarded(paths.home, path))
        if state["format"] != _FORMAT:
            raise ValueError(f"its format is {state['format']}, this insitu knows {_FORMAT}")
        quota, memory = state["quota"], state.get("file_memory")
        return StoreSettings(
            None if quota is None else int(quota),
            _check_place(state.get("tier")),
            None if memory is None else int(memory),
        )
    except FileNotFoundError:
        return StoreSettings()
    except InputError as error:
        raise GridError(error.message) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise GridError(
            f"The settings of a store must be readable. Received: {path} ({error}). Remove that file, then "
            f"set the quota again with `insitu up --quota SIZE`"
        ) from error


def _check_place(folder: str | None) -> Path | None:
    """Return the folder of a store on a second path. Raises ValueError for one that insitu didn't make."""
    if folder is None:
        return None
    place = Path(folder)
    if not place.is_absolute() or ".." in place.parts or not _SECOND_PATH.fullmatch(place.name):
        raise ValueError(f"its second path, {folder!r:.200}, is none that insitu has made")
    return place


def write_settings(paths: Paths, node: NodeId, settings: StoreSettings) -> None:
    """Replace what was set for a store; it survives a power cut.

    Raises InputError for a user whose settings don't count in this home, OSError.
    """
    if os.geteuid() != 0 and is_shared(paths.home) and paths.home.stat().st_uid != os.geteuid():
        raise InputError(
            f"The owner of a shared home sets the quotas of its stores. Received: user "
            f"{os.geteuid()} for {paths.home} of user {paths.home.stat().st_uid}. Ask that user"
        )
    make_folder(paths.home, paths.node(node))
    state: dict[str, int | str | None] = {
        "format": _FORMAT,
        "quota": settings.quota,
        "file_memory": settings.file_memory,
    }
    if settings.second_path is not None:
        state["tier"] = str(settings.second_path)
    replace_file(paths.store_settings(node), seal(state), sync=True, mode=owner_file_mode(paths.home))


def set_quota(paths: Paths, node: NodeId, quota: int | None) -> None:
    """Set the bytes that the store of a node may hold; None: as many as fit. Raises InputError, OSError."""
    if quota is not None and quota < 0:
        raise InputError(f"A quota is a number of bytes from 0 on. Received: {quota}")
    write_settings(paths, node, replace(read_settings(paths, node), quota=quota))


def set_file_memory(paths: Paths, node: NodeId, limit: int | None) -> None:
    """Set the bytes of memory that files of `insitu://` may use in a store; None: a share of the host's.

    Raises InputError, OSError.
    """
    if limit is not None and limit < 0:
        raise InputError(f"A limit of memory is a number of bytes from 0 on. Received: {limit}")
    write_settings(paths, node, replace(read_settings(paths, node), file_memory=limit))
