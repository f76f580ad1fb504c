"""Answers requests about names, in the process that has the metadata store."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from insitu.base.errors import InputError, InsituError, StoreUnavailable
from insitu.cluster.files.peers import Fields, describe_error
from insitu.grid.shared_files import (
    FILE,
    FOLDER,
    Entry,
    NameTree,
    UsedUp,
    check_change,
    check_path,
    check_volume,
    parse_entry,
)
from insitu.metadata import MetadataStore

LIST_PAGE = 1000
CHANGES = ("publish", "rename", "remove", "folder")
NAME_KINDS = frozenset({"look", "children", "list", "volumes", *CHANGES})
"""Kinds of requests about names."""


class NameService:
    """Answers by one metadata store, unless `check` raises GridError: its names aren't all. For several
    threads."""

    def __init__(self, store: MetadataStore, check: Callable[[], None] = lambda: None) -> None:
        self._names = NameTree(store)
        self._check = check

    def answer(self, kind: str, fields: Fields) -> Fields:
        """Do what is asked for, and return failures as answers: `busy`, `lost` if a change may have been made
        or not, `used_up`, and those of `describe_error`."""
        try:
            self._check()
            return self._act(kind, fields)
        except UsedUp:
            return {"used_up": True}
        except StoreUnavailable as error:
            return {"lost": error.message}
        except (InsituError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EAGAIN:
                return {"busy": True}
            return describe_error(error)

    def _act(self, kind: str, fields: Fields) -> Fields:
        if kind == "volumes":
            return {"volumes": self._names.list_volumes()}
        volume, path = check_volume(fields.get("volume")), check_path(fields.get("path"))
        if kind in CHANGES:
            return self._change(kind, volume, path, fields)
        if kind == "look":
            found = self._names.look(volume, path)
            if isinstance(found, Entry):
                return {"entry": found.to_json(), "kind": FILE}
            return {"entry": None, "kind": None if found is None else FOLDER}
        after = check_path(fields.get("after", ""))
        if kind == "children":
            listed = self._names.list_children(volume, path, after, LIST_PAGE)
        elif kind == "list":
            listed = self._names.list_below(volume, path, after, LIST_PAGE)
        else:
            raise InputError(f"Nobody knows this about files. Received: {kind!r:.100}")
        rows = [[each.path, each.kind, each.size, each.modified, each.copies] for each in listed]
        return {"listed": rows, "whole": len(rows) < LIST_PAGE}

    def _change(self, kind: str, volume: str, path: str, fields: Fields) -> Fields:
        change, again = check_change(fields.get("change")), fields.get("again") is True
        if not path and kind != "remove":
            raise InputError("What is changed has a path in its volume. Received: the volume itself")
        if kind == "publish":
            entry, expected = parse_entry(fields.get("entry")), fields.get("expected")
            if expected is not None and type(expected) is not int:
                raise InputError(f"expected is a version. Received: {expected!r:.100}")
            version = self._names.publish(volume, path, entry, expected, change, again=again)
            return {"version": version}
        if kind == "rename":
            target = _check_target(fields.get("target"))
            self._names.rename(volume, path, target, change, again=again)
        elif kind == "remove":
            recursive = fields.get("recursive") is True
            self._names.remove(volume, path, change, recursive=recursive, again=again)
        else:
            self._names.make_folder(volume, path, change, again=again)
        return {}


def _check_target(value: Any) -> str:
    target = check_path(value)
    if not target:
        raise InputError("A file is moved to a path in its volume. Received: the volume itself")
    return target
