"""What a server does with its store for others, beside sending and taking bytes.

Each action has a name and fields in JSON, which are checked one by one. What may take long becomes a task:
the answer is its name, and the action `task` says how far it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from insitu.access import file_mode, make_folder
from insitu.durable import write_synced
from insitu.errors import CorruptManifest, InputError
from insitu.grid.manifests import (
    Manifest,
    find_versions,
    last_published_version,
    manifest_lock,
    next_stored_version,
    read_manifest,
    write_manifest,
)
from insitu.grid.quotas import measure_store
from insitu.grid.row_plan import RowPlan
from insitu.grid.scrubbing import Pace, check_copy
from insitu.grid.staged_imports import end_import, prepare_version
from insitu.grid.store_identity import make_store_id
from insitu.grid.store_settings import read_settings
from insitu.grid.transfer.background import AT_ONCE, Task, Tasks
from insitu.grid.transfer.client import ServerAddress
from insitu.grid.transfer.fetching import fetch_partition
from insitu.grid.transfer.import_actions import ImportActions, parse_address
from insitu.grid.transfer.rate_limit import RateLimit
from insitu.grid.transfer.requests import MAX_PARTITION, check_number, check_text, parse_spec
from insitu.paths import Paths
from insitu.priorities import in_background, lower_thread
from insitu.spec import CacheSpec, NodeId, check_cache_name, check_simple_name

MAX_BODY_BYTES = 64 << 20
_FETCHES = 4
"""Partitions that one task fetches at the same time."""
_MAX_LISTED = 1 << 16

Fields = Mapping[str, Any]


class StoreActions:
    """The actions of the server of one store."""

    def __init__(
        self, paths: Paths, node: NodeId, secret: bytes, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """`on_change` is called from a thread whenever the store has got a version, or a copy."""
        self._paths = paths
        self._node = node
        self._secret = secret
        self._on_change = on_change
        self._tasks = Tasks()
        #: Held while the partitions of an import are put in place, or removed.
        self._importing = threading.Lock()
        #: (cache, token) of imports that have ended. Written under the lock.
        self._ended: set[tuple[str, str]] = set()
        #: One for each partition that is fetched now or was, by cache, version and number.
        self._fetching: dict[tuple[str, int, int], threading.Lock] = {}
        #: What is done for imports that run elsewhere.
        self.imports = ImportActions(paths, node, secret, self._start, self._reopen)
        self._actions: Mapping[str, Callable[[Fields], Any]] = {
            **self.imports.actions,
            "survey": self._survey,
            "prepare": self._prepare,
            "end": self._end,
            "fetch": self._fetch,
            "verify": self._verify,
            "release": self._release,
            "task": self._describe_task,
            "manifests": self._list_manifests,
            "manifest": self._read_manifest,
            "recount": self._recount,
        }

    def do(self, kind: str, body: bytes) -> bytes:
        """Do what is asked for, and return the answer. Raises InsituError, OSError."""
        if kind not in self._actions:
            raise InputError(f"A server knows {', '.join(self._actions)}. Received: {kind!r:.100}")
        if len(body) > MAX_BODY_BYTES:
            raise InputError(f"An action has {MAX_BODY_BYTES} bytes at most. Received: {len(body)}")
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"An action is JSON. Received: {len(body)} bytes that aren't ({error})"
            ) from None
        if not isinstance(fields, dict):
            raise InputError("The fields of an action are an object. Received: something else")
        return json.dumps(self._actions[kind](fields)).encode()

    # Imports

    def _survey(self, fields: Fields) -> Any:
        names = [check_cache_name(check_text("cache", name)) for name in _list("caches", fields)]
        room = None if read_settings(self._paths, self._node).quota is None else self._measure_quota()
        return {
            "store": make_store_id(self._paths, self._node),
            "disk_free": _free_bytes(self._paths.node(self._node)),
            "quota_free": room,
            "next": {name: next_stored_version(self._paths, name) for name in names},
            "published": {name: last_published_version(self._paths, name) for name in names},
        }

    def _measure_quota(self) -> int:
        free = measure_store(self._paths, self._node).free
        return 0 if free is None else max(0, free)

    def _prepare(self, fields: Fields) -> Any:
        cache, token = parse_spec("cache", fields.get("cache")), _token(fields)
        given = fields.get("base")
        base = None if given is None else parse_spec("base", given)

        def prepare(task: Task) -> None:
            with self._importing:
                if (cache.name, token) in self._ended:
                    raise InputError(
                        f"An import puts its partitions in place before it ends. Received: {token}"
                    )
                task.add(prepare_version(self._paths, self._node, cache, token, base))

        return self._start(0, prepare)

    def _end(self, fields: Fields) -> Any:
        cache, token = check_cache_name(check_text("cache", fields.get("cache"))), _token(fields)
        published = _flag("published", fields)

        def end(task: Task) -> None:
            self.end_import(cache, token, published=published)
            self._on_change()

        return self._start(0, end)

    def _reopen(self, plan: RowPlan) -> None:
        """Let an import that was ended begin again: --resume goes on with it."""
        with self._importing:
            self._ended -= {(name, plan.token) for name in plan.names}

    def end_import(self, cache: str, token: str, *, published: bool) -> None:
        """Mark what an import has brought as published, or remove it. Raises CorruptManifest, OSError."""
        self.imports.close(token)
        with self._importing:  # the import may have failed on another host while this one still prepares
            self._ended.add((cache, token))
            end_import(self._paths, self._node, cache, token, published=published)

    # Copies

    def _fetch(self, fields: Fields) -> Any:
        cache, indices = _partitions(fields)
        marked, given = _flag("marked", fields), fields.get("sources")
        rate = _rate(fields)
        limit = None if rate is None else RateLimit(rate)
        if not isinstance(given, dict) or len(given) > _MAX_LISTED:
            raise InputError("sources is an object of addresses by node. Received: something else")
        sources = {check_text("node", node): parse_address(value) for node, value in given.items()}

        def fetch_one(task: Task, index: int) -> None:
            owners = cache.partitions[index].owners
            addresses = [sources[owner] for owner in owners if owner in sources and owner != self._node]
            self._fetch_one(task, cache, index, addresses, marked and self._node not in owners, limit)

        def fetch(task: Task) -> None:
            initializer = lower_thread if limit is not None else None
            with _paced(limit), ThreadPoolExecutor(_FETCHES, initializer=initializer) as threads:
                futures = [threads.submit(fetch_one, task, index) for index in indices]
                try:
                    for future in futures:
                        future.result()
                finally:
                    threads.shutdown(cancel_futures=True)
                    self._on_change()

        return self._start(sum(cache.partitions[index].bytes for index in indices), fetch)

    def _fetch_one(
        self,
        task: Task,
        cache: CacheSpec,
        index: int,
        sources: Sequence[ServerAddress],
        marked: bool,
        limit: RateLimit | None,
    ) -> None:
        key = (cache.name, cache.version, index)
        folder = self._paths.version(self._node, cache.name, cache.version)
        with self._fetching.setdefault(key, threading.Lock()):
            make_folder(self._paths.home, folder)
            self._mark(folder, key, marked)
            counted = [-1]

            def count(done: int, total: int) -> None:
                task.add(done - max(0, counted[0]), 0 if counted[0] < 0 else done - counted[0])
                counted[0] = done

            fetch_partition(
                self._paths, self._node, cache, index, sources, self._secret, limit=limit, progress=count
            )
            if counted[0] < 0:  # it was there
                task.add(cache.partitions[index].bytes)

    def _mark(self, folder: Path, key: tuple[str, int, int], marked: bool) -> None:
        """Mark a copy as one that goes when no job needs it, or as one that stays."""
        mark = self._paths.fetched(self._node, *key)
        with manifest_lock(folder):
            if marked:
                write_synced(mark, b"", file_mode(self._paths.home))
            else:
                mark.unlink(missing_ok=True)

    def _release(self, fields: Fields) -> Any:
        """Mark copies whose owner is another node now."""
        cache, indices = _partitions(fields)
        folder = self._paths.version(self._node, cache.name, cache.version)
        for index in indices:
            if self._paths.partition(self._node, cache.name, cache.version, index).exists():
                self._mark(folder, (cache.name, cache.version, index), True)
        return {}

    def _verify(self, fields: Fields) -> Any:
        cache, indices = _partitions(fields)
        rate = _rate(fields)

        def verify(task: Task) -> None:
            pace = Pace(rate, task.add)
            with _paced(rate):
                for index in indices:
                    check = check_copy(self._paths, cache, cache.partitions[index], self._node, pace)
                    problem = None if check.problem is None else str(check.problem)
                    task.results.append([index, str(check.path), problem, list(check.blocks)])

        return self._start(sum(cache.partitions[index].bytes for index in indices), verify)

    # Tasks

    def _start(self, total: int, do: Callable[[Task], None]) -> Any:
        name = self._tasks.start(total, do)
        if name is None:
            raise InputError(f"A server does {AT_ONCE} tasks at the same time. Received: one more")
        return {"task": name}

    def _describe_task(self, fields: Fields) -> Any:
        found = self._tasks.describe(check_text("task", fields.get("task")))
        return {"known": False} if found is None else {"known": True, **found}

    # What the store holds

    def _list_manifests(self, fields: Fields) -> Any:
        found = [place for place in find_versions(self._paths) if place.node == self._node]
        return [[place.name, place.version] for place in found]

    def _read_manifest(self, fields: Fields) -> Any:
        name = check_cache_name(check_text("cache", fields.get("cache")))
        version = check_number("version", fields.get("version"), 1, 1 << 31)
        try:
            manifest = read_manifest(self._paths.manifest(self._node, name, version))
        except CorruptManifest as error:
            return {"problem": str(error)}
        held = []
        for info in (manifest.cache.partitions[index] for index in manifest.held):
            path = self._paths.partition(self._node, name, version, info.index)
            if path.exists() and path.stat().st_size == info.bytes:
                held.append(info.index)
        fetched = [i for i in held if self._paths.fetched(self._node, name, version, i).exists()]
        return {"manifest": manifest.to_json(), "held": held, "fetched": fetched}

    def _recount(self, fields: Fields) -> Any:
        """Verify the copies beside a manifest that can't be trusted, and write that again."""
        cache, write = parse_spec("cache", fields.get("cache")), _flag("write", fields)
        key = (self._node, cache.name, cache.version)
        here = [info for info in cache.partitions if self._paths.partition(*key, info.index).exists()]

        def recount(task: Task) -> None:
            pace = Pace(None, task.add)
            checks = [check_copy(self._paths, cache, info, self._node, pace) for info in here]
            held = tuple(check.partition for check in checks if check.problem is None)
            if write:
                with manifest_lock(self._paths.version(*key)):
                    manifest = Manifest(cache, make_store_id(self._paths, self._node), held, "committed")
                    write_manifest(self._paths.home, self._paths.manifest(*key), manifest)
            for check in checks:
                fetched = self._paths.fetched(*key, check.partition).exists()
                problem = None if check.problem is None else str(check.problem)
                task.results.append([check.partition, problem, fetched])

        return self._start(sum(info.bytes for info in here), recount)


def _list(name: str, fields: Fields) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list) or len(value) > _MAX_LISTED:
        raise InputError(f"{name} is a list. Received: {value!r:.100}")
    return value


def _flag(name: str, fields: Fields) -> bool:
    value = fields.get(name)
    if type(value) is not bool:
        raise InputError(f"{name} is true or false. Received: {value!r:.100}")
    return value


def _paced(rate: object) -> contextlib.AbstractContextManager[None]:
    """Return what to do something in that has a rate: others of the machine aren't to notice."""
    return contextlib.nullcontext() if rate is None else in_background()


def _rate(fields: Fields) -> float | None:
    rate = fields.get("rate")
    if rate is None:
        return None
    if type(rate) not in (int, float) or not 0 < rate < math.inf:
        raise InputError(f"rate is a number of bytes a second. Received: {rate!r:.100}")
    return float(rate)


def _token(fields: Fields) -> str:
    return check_simple_name("An import's token", check_text("token", fields.get("token")))


def _partitions(fields: Fields) -> tuple[CacheSpec, list[int]]:
    cache = parse_spec("cache", fields.get("cache"))
    count = min(MAX_PARTITION, len(cache.partitions))
    return cache, [check_number("partition", index, 0, count) for index in _list("partitions", fields)]


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
