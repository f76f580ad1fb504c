"""The stores of nodes on other hosts, as commands and imports use them: through the servers of their agents.

Each call ends soon after a server is dead or can't be reached, and names the node.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from insitu.base.errors import DamagedImages, SourceError, TransferError
from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec, NodeId
from insitu.grid.intake import RowPlan, TextsTooLong, Unit, encode_options
from insitu.grid.layout import normalize_address
from insitu.grid.sources import SourceOptions
from insitu.grid.transfer.client import SILENCE_SECONDS, PartitionClient, Refused, ServerAddress
from insitu.grid.transfer.fetching import fetch_partition
from insitu.grid.transfer.requests import SOURCE_FAILED, TEXTS_TOO_LONG

ATTEMPTS = 3
"""How often in a row a server may not answer."""
_PAUSES = (0.02, 0.5)
"""The first and the longest pause between two questions how far a task is."""
_AT_ONCE = 32
_FETCHES = 4
"""Partitions that are fetched to this machine at the same time."""

Progress = Callable[[NodeId, int, int], None]
"""Called with (node, bytes done there, all of them)."""
R = TypeVar("R")
Counts = npt.NDArray[np.int64]


class _Stopped(Exception):
    """What is sent or fetched isn't needed any more."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a store says before an import."""

    #: Its id.
    store: str
    #: Bytes that are free on its disk.
    disk_free: int
    #: Bytes that its quota allows; None: it has none.
    quota_free: int | None
    #: By cache, a number above those of all versions that it holds.
    next: Mapping[str, int]
    #: By cache, the highest version that it holds as published; 0: none.
    published: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a node has got."""

    #: Partitions that it has now, of those it was to have.
    partitions: int
    #: Bytes that have moved for that; those that were there already don't count.
    bytes: int


@dataclass(frozen=True, slots=True)
class RemoteCheck:
    """What has become of one copy of a partition on another host."""

    #: The partition's number.
    partition: int
    #: The node.
    node: NodeId
    #: The file, on that node's host.
    path: str
    #: What is wrong with it; None: nothing.
    problem: str | None
    #: The blocks that are damaged, where that is known.
    blocks: tuple[int, ...]


class RemoteStores:
    """The stores of the agents that are alive."""

    def __init__(
        self,
        addresses: Mapping[NodeId, ServerAddress],
        secret: bytes,
        *,
        here: Iterable[NodeId] = (),
        leaving: Iterable[NodeId] = (),
        silence: float = SILENCE_SECONDS,
        number: int | None = None,
    ) -> None:
        """`here` are agents of this home, whose stores need no server; those `leaving` get nothing new.

        `number`: how often the head of the cluster was replaced, as this home knows: agents that know of more
        refuse what would change their stores.
        """
        self._addresses = dict(addresses)
        self._secret = secret
        self._silence = silence
        self._number = number
        #: Nodes with agents whose stores are in this home.
        self.here: tuple[NodeId, ...] = tuple(sorted(here))
        #: Nodes that are to leave: they are read from, and get nothing new.
        self.leaving: frozenset[NodeId] = frozenset(leaving)
        #: Bytes of rows that were sent to each node from here. Written by the import.
        self.sent: Counter[NodeId] = Counter()
        self._counting = threading.Lock()

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The nodes whose stores are in other homes, by name."""
        return tuple(sorted(self._addresses.keys() - set(self.here)))

    @property
    def imports(self) -> RemoteImport:
        """How these nodes read the sources of an import."""
        return RemoteImport(self, self._addresses, self._silence)

    @property
    def all_nodes(self) -> tuple[NodeId, ...]:
        """All nodes whose agents are alive, by name: also those whose stores are in this home."""
        return tuple(sorted(self._addresses))

    def survey(self, caches: Iterable[str]) -> dict[NodeId, Survey]:
        """Ask all stores how much room they have, and what they hold of some caches. Raises TransferError."""
        fields = {"caches": list(caches)}

        def ask(node: NodeId) -> Survey:
            answer = self.ask(node, "survey", fields)
            room = answer["quota_free"]
            versions = dict(answer["next"]), dict(answer["published"])
            return Survey(str(answer["store"]), int(answer["disk_free"]), room, *versions)

        return run_on_all(self.nodes, ask, threading.Event())

    def confirm(self, nodes: Iterable[NodeId]) -> None:
        """Raise TransferError if one of these agents follows a head that has replaced that of this home. One
        that doesn't answer is passed over."""
        for node in nodes:
            try:
                self.ask(node, "confirm", {}, attempts=1)
            except TransferError as error:
                if isinstance(error.__cause__, Refused):
                    raise

    def prepare(self, nodes: Iterable[NodeId], cache: CacheSpec, token: str, base: CacheSpec | None) -> None:
        """Have stores put what they got of a version in its place, where nobody reads it yet.

        `base`: the version whose partitions it shares. Raises TransferError.
        """
        fields = {
            "cache": cache.to_json(),
            "token": token,
            "base": None if base is None else base.to_json(),
        }
        self.run_tasks(dict.fromkeys(nodes, fields), "prepare")

    def end_import(
        self, nodes: Iterable[NodeId], cache: str, token: str, *, published: bool
    ) -> dict[NodeId, str]:
        """Have stores mark what an import brought as published, or remove it. Returns why, by node, where it
        isn't known to be done."""
        fields = {"cache": cache, "token": token, "published": published}

        def end(node: NodeId) -> str:
            try:
                self.run_tasks({node: fields}, "end")
            except TransferError as error:
                return error.message
            return ""

        return {node: why for node, why in run_on_all(nodes, end, threading.Event()).items() if why}

    def fetch(
        self,
        cache: CacheSpec,
        wanted: Mapping[NodeId, Collection[int]],
        progress: Progress = lambda node, done, total: None,
        *,
        marked: bool = True,
        rate: float | None = None,
    ) -> dict[NodeId, Fetched]:
        """Have each node of `wanted` get these partitions of `cache` from their owners, all at the same time.

        With `marked` the copies go when no job has the version pinned any more. `rate`: bytes a second that
        each node receives at most. Returns what each node has
        got. What has come stays for the next call. Raises TransferError, which names node and reason.
        """
        described = cache.to_json()
        requests = {
            node: {
                "cache": described,
                "partitions": sorted(indices),
                "sources": self._find_sources(cache, indices),
                "marked": marked,
                "rate": rate,
            }
            for node, indices in wanted.items()
            if indices
        }
        answers = self.run_tasks(requests, "fetch", progress)
        return {node: Fetched(len(wanted[node]), int(answer["moved"])) for node, answer in answers.items()}

    def fetch_here(
        self,
        paths: Paths,
        node: NodeId,
        cache: CacheSpec,
        indices: Collection[int],
        progress: Progress = lambda node, done, total: None,
    ) -> Fetched:
        """Fetch partitions into the store of a node in this home. Raises TransferError, StorageFull."""
        total = sum(cache.partitions[index].bytes for index in indices)
        counts = Counter[str]()
        stopped = threading.Event()

        def fetch(index: int) -> None:
            before = -1

            def count(done: int, _: int) -> None:
                nonlocal before
                if stopped.is_set():
                    raise _Stopped
                with self._counting:
                    counts["moved"] += 0 if before < 0 else done - before
                    counts["done"] += done - max(0, before)
                    progress(node, counts["done"], total)
                before = done

            owners = cache.partitions[index].owners
            sources = [self._addresses[owner] for owner in owners if owner in self._addresses]
            fetch_partition(
                paths, node, cache, index, sources, self._secret, silence=self._silence, progress=count
            )

        with ThreadPoolExecutor(_FETCHES) as threads:
            futures = [threads.submit(fetch, index) for index in indices]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stopped.set()
                threads.shutdown(cancel_futures=True)
            for future in done:
                future.result()
        return Fetched(len(indices), counts["moved"])

    def _find_sources(self, cache: CacheSpec, indices: Collection[int]) -> dict[str, Any]:
        owners = {owner for index in indices for owner in cache.partitions[index].owners}
        return {owner: asdict(self._addresses[owner]) for owner in owners if owner in self._addresses}

    def verify(
        self,
        cache: CacheSpec,
        wanted: Mapping[NodeId, Collection[int]],
        rate: float | None = None,
        progress: Progress = lambda node, done, total: None,
    ) -> list[RemoteCheck]:
        """Have nodes read their copies whole. `rate`: bytes a second each of them reads at most.

        Raises TransferError.
        """
        described = cache.to_json()
        requests = {
            node: {"cache": described, "partitions": sorted(indices), "rate": rate}
            for node, indices in wanted.items()
        }
        answers = self.run_tasks(requests, "verify", progress)
        return [
            RemoteCheck(int(index), node, str(path), problem, tuple(blocks))
            for node, answer in answers.items()
            for index, path, problem, blocks in answer["results"]
        ]

    def release(self, node: NodeId, cache: CacheSpec, indices: Collection[int]) -> None:
        """Have a node remove copies that it doesn't own any more, when no job has the version pinned. Raises
        TransferError."""
        self.ask(node, "release", {"cache": cache.to_json(), "partitions": sorted(indices)})

    def list_versions(self, node: NodeId) -> list[tuple[str, int]]:
        """Return (cache, version) of what a store holds. Raises TransferError."""
        return [(str(cache), int(version)) for cache, version in self.ask(node, "manifests", {})]

    def read_manifest(self, node: NodeId, cache: str, version: int) -> dict[str, Any]:
        """Return the manifest of a version as JSON with the partitions that are there. Raises
        TransferError."""
        return dict(self.ask(node, "manifest", {"cache": cache, "version": version}))

    def recount(self, node: NodeId, cache: CacheSpec, *, write: bool) -> tuple[tuple[int, ...], list[str]]:
        """Have a node verify its copies of a version, and with `write` write their manifest again.

        Returns the partitions that it owns a good copy of, and what is wrong with others. Raises
        TransferError.
        """
        fields = {"cache": cache.to_json(), "write": write}
        results = self.run_tasks({node: fields}, "recount")[node]["results"]
        held = tuple(int(index) for index, problem, fetched in results if problem is None and not fetched)
        return held, [f"{node}: {problem}" for _, problem, _ in results if problem is not None]

    def run_tasks(
        self,
        requests: Mapping[NodeId, Mapping[str, Any]],
        kind: str,
        progress: Progress = lambda node, done, total: None,
    ) -> dict[NodeId, Mapping[str, Any]]:
        """Have several nodes do a task each, and wait for all. Raises TransferError for the first failure."""
        stopped = threading.Event()

        def run(node: NodeId) -> Mapping[str, Any]:
            return self.run_task(node, kind, requests[node], progress, stopped)

        return run_on_all(requests, run, stopped)

    def run_task(
        self,
        node: NodeId,
        kind: str,
        fields: Mapping[str, Any],
        progress: Progress,
        stopped: threading.Event,
    ) -> Mapping[str, Any]:
        """Have a node do a task, and wait for it. Raises TransferError."""
        with self._connect(node) as connection:
            name = connection.ask(kind, fields)["task"]
            pause = _PAUSES[0]
            while not stopped.wait(pause):
                pause = min(2 * pause, _PAUSES[1])
                found: Mapping[str, Any] = connection.ask("task", {"task": name})
                if not found["known"]:
                    raise TransferError(f"{node}: its agent was started again in the middle. Try again")
                progress(node, int(found["done"]), int(found["total"]))
                if found["problem"]:
                    raise TransferError(f"{node}: {found['problem']}")
                if found["ended"]:
                    return found
        raise TransferError(f"{node}: it was stopped")

    def ask(self, node: NodeId, kind: str, fields: Mapping[str, Any], attempts: int = ATTEMPTS) -> Any:
        """Have a node do something that takes a moment. Returns its answer. Raises TransferError."""
        with self._connect(node) as connection:
            return connection.ask(kind, fields, attempts)

    def make_client(self, node: NodeId) -> PartitionClient:
        """Return a connection to a node. Raises TransferError."""
        if node not in self._addresses:
            raise TransferError("no agent of this name is alive. `insitu nodes` shows all")
        return PartitionClient(self._addresses[node], self._secret, silence=self._silence)

    def _connect(self, node: NodeId) -> _Connection:
        return _Connection(node, partial(self.make_client, node), self._number)


class RemoteImport:
    """How nodes read the sources of one import.

    All raise TransferError; where blocks need fewer rows, TextsTooLong; where a node can't read a source,
    SourceError.
    """

    def __init__(
        self, remote: RemoteStores, addresses: Mapping[NodeId, ServerAddress], silence: float
    ) -> None:
        self._remote, self._addresses, self._silence = remote, addresses, silence
        #: Set where the results of what nodes count and read aren't needed any more.
        self.stopped = threading.Event()

    def see_files(self, node: NodeId, files: Sequence[str]) -> list[Any]:
        """Return [bytes, time of the last change] of files that a node sees, or why it can't read them."""
        return list(self._remote.ask(node, "see_files", {"files": list(files)}))

    def count_unit(
        self, node: NodeId, unit: Unit, options: SourceOptions, on_read: Callable[[int], None]
    ) -> int:
        """Have a node count the rows of a unit."""
        fields = {"unit": unit.to_json(), "options": encode_options(options)}
        return int(self._run(node, "count_rows", fields, on_read)[0])

    def read_unit(
        self,
        node: NodeId,
        plan: RowPlan,
        unit: Unit,
        options: SourceOptions,
        owners: Collection[NodeId],
        on_read: Callable[[int], None],
    ) -> tuple[Counts, list[str]]:
        """Have a node read a unit and send its rows to their owners.

        Returns (the rows of each destination, what is wrong with each image that was passed over).
        """
        fields = {
            "unit": unit.to_json(),
            "options": encode_options(options),
            "token": plan.token,
            "owners": {owner: asdict(self._addresses[owner]) for owner in owners},
            "silence": max(1, round(self._silence)),
        }
        counts, skipped = self._run(node, "read_rows", fields, on_read)
        return np.array(counts, np.int64), list(map(str, skipped))

    def list_addresses(self, nodes: Collection[NodeId]) -> dict[NodeId, frozenset[str]]:
        """Return the addresses and the name of each node's host, normalized."""
        answers = {node: self._remote.ask(node, "list_addresses", {}) for node in nodes}
        return {node: frozenset(map(normalize_address, found)) for node, found in answers.items()}

    def read_servers(
        self, requests: Mapping[NodeId, Mapping[str, Any]], token: str, progress: Progress
    ) -> dict[NodeId, Mapping[str, Any]]:
        """Have nodes read what they hold of a table of another system. Returns what each has read.

        `requests` are those of `ServerRequest`, as JSON.
        """
        fields = {node: {"token": token, "request": request} for node, request in requests.items()}
        answers = self._remote.run_tasks(fields, "read_servers", progress)
        return {node: read_results(node, answer)[0] for node, answer in answers.items()}

    def _run(
        self, node: NodeId, kind: str, fields: Mapping[str, Any], on_read: Callable[[int], None]
    ) -> list[Any]:
        before = 0

        def count(_: NodeId, done: int, total: int) -> None:
            nonlocal before
            on_read(done - before)
            before = done

        return read_results(node, self._remote.run_task(node, kind, fields, count, self.stopped))


def read_results(node: NodeId, answer: Mapping[str, Any]) -> list[Any]:
    """Return what a node has found. Raises TextsTooLong, SourceError, DamagedImages."""
    results = list(answer["results"])
    if results == [TEXTS_TOO_LONG]:
        raise TextsTooLong
    if results and isinstance(results[0], list) and results[0][:1] == [SOURCE_FAILED]:
        _, message, problems = results[0]
        if problems:
            raise DamagedImages(tuple(map(str, problems)))
        raise SourceError(f"{node}: {message}")
    return results


class _Connection:
    """A connection to one node for several questions, made when it is needed, and again after a failure."""

    def __init__(self, node: NodeId, connect: Callable[[], PartitionClient], number: int | None) -> None:
        self._node, self._connect, self._number = node, connect, number
        self._client: PartitionClient | None = None

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def ask(self, kind: str, fields: Mapping[str, Any], attempts: int = ATTEMPTS) -> Any:
        """Ask the node. Returns its answer. Raises TransferError, after `attempts` where it isn't reached."""
        for attempt in range(attempts):
            try:
                if self._client is None:
                    self._client = self._connect()
                return self._client.act(kind, {**fields, "cluster_number": self._number})
            except Refused as error:
                raise TransferError(f"{self._node}: {error.message}") from error
            except TransferError as error:
                self._close()
                if attempt + 1 == attempts:
                    raise TransferError(f"{self._node}: {error.message}") from error

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def run_on_all(
    nodes: Iterable[NodeId], run: Callable[[NodeId], R], stopped: threading.Event
) -> dict[NodeId, R]:
    """Run something for each node in a thread of its own. The first failure stops all, and is raised."""
    listed = list(nodes)
    if not listed:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(listed))) as threads:
        futures = {node: threads.submit(run, node) for node in listed}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
        finally:
            stopped.set()
            threads.shutdown(cancel_futures=True)
        for future in failed:
            future.result()
        return {node: future.result() for node, future in futures.items()}
