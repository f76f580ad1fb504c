"""A server's actions on its store for others, beside sending and taking bytes.

Each action has a name and fields in JSON, which are checked one by one. A long action becomes a task: the
answer is its name, and the action `task` says how far it is.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from insitu.base.disk.access import apply_modes, file_mode, make_folder
from insitu.base.disk.durable import replace_file, sync_folder, write_synced
from insitu.base.errors import CorruptManifest, GridError, InputError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId, check_cache_name, check_simple_name
from insitu.grid.catalog import (
    Manifest,
    commit_manifest,
    find_versions,
    last_published_version,
    make_store_id,
    manifest_lock,
    next_stored_version,
    prepare_manifest,
    read_manifest,
    read_prepared,
    write_manifest,
)
from insitu.grid.importing import share_partitions
from insitu.grid.intake import RowPlan
from insitu.grid.partitions import check_size, record_written
from insitu.grid.replicas import Pace, check_copy, in_background, lower_thread
from insitu.grid.serving.import_actions import ImportActions, parse_address
from insitu.grid.stores import measure_store, read_settings
from insitu.grid.transfer import (
    AT_ONCE,
    MAX_PARTITION,
    RateLimit,
    ServerAddress,
    Task,
    Tasks,
    check_number,
    check_text,
    fetch_partition,
    parse_spec,
)

MAX_BODY_BYTES = 64 << 20
_FETCHES = 4
"""Partitions that one task fetches at the same time."""
_MAX_LISTED = 1 << 16
_MOST_ENDED = 1 << 12
"""Ended imports that are remembered: what was asked for before may still run then."""

Fields = Mapping[str, Any]
_FENCED = frozenset({"confirm", "prepare", "release"})
"""Actions by which the catalogue's word becomes true of a store: refused of a head that was replaced."""


def refuse_replaced(number: Any, known: int) -> None:
    """Raise InputError for an order of a head that was replaced: its `number` of the cluster is lower than
    the one `known` here. None: the order is of no head's home."""
    if number is not None and (type(number) is not int or number < known):
        raise InputError(
            f"A store takes orders of the head that its agent follows, in number {known} of the cluster. "
            f"Received: one of number {number!r:.20}, whose head was replaced. Run the command on the "
            f"machine of the head that runs now"
        )


class StoreActions:
    """The actions of the server of one store."""

    def __init__(
        self,
        paths: Paths,
        node: NodeId,
        secret: bytes,
        on_change: Callable[[], None] = lambda: None,
        find_number: Callable[[], int] = lambda: 0,
    ) -> None:
        """`on_change` is called from a thread whenever the store has got a version, or a copy. `find_number`
        returns how often the head of the cluster was replaced, as far as this node knows."""
        self._paths = paths
        self._node = node
        self._secret = secret
        self._on_change = on_change
        self._find_number = find_number
        self._tasks = Tasks()
        #: Held while the partitions of an import are put in place, or removed.
        self._importing = threading.Lock()
        #: (cache, token) of the last imports that have ended, the oldest first. Written under the lock.
        self._ended: dict[tuple[str, str], None] = {}
        #: Held while the next one is used.
        self._guard = threading.Lock()
        #: By cache, version and number of a partition that is fetched: what is held, and by how many tasks
        #: it is held or waited for.
        self._fetching: dict[tuple[str, int, int], tuple[threading.Lock, int]] = {}
        #: Actions for imports that run elsewhere.
        self.imports = ImportActions(paths, node, secret, self._start, self._reopen)
        self._actions: Mapping[str, Callable[[Fields], Any]] = {
            **self.imports.actions,
            "confirm": lambda fields: {},
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
        if kind in _FENCED:
            refuse_replaced(fields.get("cluster_number"), self._find_number())
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
        """Let an import that was ended begin again: --resume continues it."""
        with self._importing:
            for name in plan.names:
                self._ended.pop((name, plan.token), None)

    def end_import(self, cache: str, token: str, *, published: bool) -> None:
        """Mark what an import has brought as published, or remove it. Raises CorruptManifest, OSError."""
        self.imports.close(token)
        with self._importing:  # the import may have failed on another host while this one still prepares
            self._ended[cache, token] = None
            while len(self._ended) > _MOST_ENDED:
                del self._ended[next(iter(self._ended))]
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
        with self._fetch_alone(key):
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

    @contextlib.contextmanager
    def _fetch_alone(self, key: tuple[str, int, int]) -> Iterator[None]:
        """Wait until no other task fetches a partition, and let none do so meanwhile."""
        with self._guard:
            lock, count = self._fetching.get(key, (threading.Lock(), 0))
            self._fetching[key] = lock, count + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, count = self._fetching.pop(key)
                if count > 1:
                    self._fetching[key] = lock, count - 1

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

    # Content of the store

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


# Actions of an agent on its store for an import that runs on the machine of the head.
#
# Partitions arrive in the staged folder of the import. `prepare_version` gives them their place in the
# store, while the catalogue doesn't name the version yet. The folder in staging stays, with a file that
# names the version, until the import has ended well or not. So it is known what belongs to an import that
# has died


def prepare_version(paths: Paths, node: NodeId, cache: CacheSpec, token: str, base: CacheSpec | None) -> int:
    """Put the received files of a version into the store of `node`, where nobody reads them yet.

    `base` is the version whose partitions it shares, if any. All partitions that `node` owns must be there;
    new ones were verified as they came. Returns their bytes. Raises GridError, OSError.
    """
    staged, target = paths.staged(cache.name, token), paths.version(node, cache.name, cache.version)
    held = [info for info in cache.partitions if node in info.owners]
    if target.exists():
        if read_prepared(staged) == cache.version:
            return sum(info.bytes for info in held)  # the answer to the first request was lost
        raise GridError(
            f"A new version has a number of its own. Received: {cache.name} version {cache.version}, which "
            f"is in the store of {node} already. Import again"
        )
    make_folder(paths.home, staged.store(node))
    if base is not None:
        share_partitions(paths, base, staged, [node])
    for info in held:
        check_size(staged.partition(node, info.index), info)
    apply_modes(paths.home, staged.store(node))
    prepare_manifest(paths, node, cache, staged.manifest(node))
    sync_folder(staged.store(node))
    replace_file(staged.prepared, f"{cache.version}\n".encode(), sync=True, mode=file_mode(paths.home))
    make_folder(paths.home, target.parent)
    staged.store(node).rename(target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)
    shared = 0 if base is None else len(base.partitions)
    for info in held:
        if info.index >= shared:
            key = (node, cache.name, cache.version, info.index)
            record_written(paths.partition(*key), info, paths.verified(*key))
    return sum(info.bytes for info in held)


def end_import(paths: Paths, node: NodeId, cache: str, token: str, *, published: bool) -> None:
    """Mark what an import has brought as published, or remove it. Nothing is done a second time.

    Raises OSError, and CorruptManifest if the version can't be marked.
    """
    staged = paths.staged(cache, token)
    version = read_prepared(staged)
    if version is not None:
        manifest = paths.manifest(node, cache, version)
        if published:
            commit_manifest(paths, manifest)
        elif _is_prepared(manifest):
            shutil.rmtree(manifest.parent)
            with contextlib.suppress(OSError):
                manifest.parent.parent.rmdir()
    shutil.rmtree(staged.root, ignore_errors=True)


def _is_prepared(manifest: Path) -> bool:
    try:
        return read_manifest(manifest).state == "prepared"
    except CorruptManifest:
        return False
