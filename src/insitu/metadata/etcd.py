"""The store in an etcd, under `/insitu/CLUSTER/`: keys in `keys/`, ids of transactions in `ids/`.

insitu compacts no etcd, which others may use, too: start it with `--auto-compaction-retention=1h`.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from insitu.base.errors import (
    InputError,
    LeaseEnded,
    MetadataRefused,
    RevisionCompacted,
    StorageFull,
    StoreUnavailable,
)
from insitu.metadata.etcd_address import EtcdAddress
from insitu.metadata.etcd_gateway import (
    CALL_SECONDS,
    FAILED_PRECONDITION,
    NOT_FOUND,
    OUT_OF_RANGE,
    EtcdAnswer,
    EtcdGateway,
    Unanswered,
)
from insitu.metadata.interface import (
    IDLE_SECONDS,
    Change,
    Compare,
    Operation,
    Outcome,
    Put,
    Record,
    check_lease_seconds,
    check_limit,
    check_transaction,
    encode_key,
    encode_text,
    find_deadline,
    find_end,
)

T = TypeVar("T")
_FORMAT = 1
_ROOT = b"/insitu/"
_KEYS_AT_ONCE, _SMALL_AT_ONCE, _SMALL_BYTES = 20, 100, 4096
"""Keys of one request, and of one if values are small: etcd says nothing until it has read all of them, and
has to begin its answer within a second."""
_REMEMBERED_SECONDS, _RENEWED_SECONDS = 660, 60.0
"""Ids go with a lease that all transactions of a minute share, so each is known for ten minutes at least."""
_MADE, _REFUSED = b"made", b"refused"
"""Value of an id's key: the transaction was made, or a comparison failed.

The second is for tries whose answer was lost, and which etcd may make yet, say in a process that was
stopped: they compare the id's key too. After its lease they can't be made, for they want that lease.
"""


class EtcdStore:
    """A `MetadataStore` in an etcd of version 3.4 or newer; tested on 3.4, 3.5 and 3.6."""

    def __init__(
        self, address: EtcdAddress, cluster: str, *, create: bool = False, alone: bool = False
    ) -> None:
        """`alone`: a new one isn't made in an etcd that holds another cluster's."""
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", cluster):
            raise InputError(
                f"A cluster's name in etcd is 1 to 64 letters, digits and . _ -. Received: {cluster!r}"
            )
        self._gateway = EtcdGateway(address)
        self._prefix = _ROOT + cluster.encode() + b"/"
        self._format_key = {"key": _text(self._prefix + b"format")}
        #: Held for the lease of ids, and until when it is new enough.
        self._lock = threading.Lock()
        self._lease_of_ids, self._renew_at = 0, 0.0
        try:
            self._open(cluster, create, alone)
        except BaseException:
            self.close()
            raise

    def get(self, keys: Sequence[str]) -> tuple[dict[str, Record], int]:
        return self._get_whole(keys, _deadline())

    def range(self, prefix: str, after: str = "", limit: int = 1000) -> tuple[list[Record], int]:
        check_limit(limit)
        low, last = encode_text(prefix), encode_text(after)
        first = max(low, last + b"\0") if after else low
        deadline = _deadline()
        return _read_whole(lambda at: self._range(first, find_end(low), limit, at, deadline))

    def transact(self, compare: Sequence[Compare], operations: Sequence[Operation], id: str) -> Outcome:
        check_transaction(compare, operations, id)
        deadline, expected = _deadline(), 0
        while True:
            try:
                lease = self._take_lease_of_ids(deadline)
                answer = self._call(
                    "kv/txn", self._make_body(compare, operations, id, expected, lease), deadline
                )
            except EtcdAnswer as error:
                if error.code != NOT_FOUND:
                    raise
                self._require_leases(operations, deadline)
                with self._lock:
                    self._renew_at = 0.0
                continue
            except StorageFull:
                # One that was made, and whose answer was lost, is refused like a new one.
                kvs = self._call("kv/range", {"key": self._make_id_key(id)}, deadline).get("kvs")
                if kvs and b64decode(kvs[0]["value"]) == _MADE:
                    return Outcome(True, int(kvs[0]["mod_revision"]))
                raise
            revision = _revision_of(answer)
            if answer.get("succeeded"):
                return Outcome(True, revision)
            inner = answer["responses"][0]["response_txn"]
            if inner.get("succeeded"):
                # etcd counts operations with those of transactions inside, so they can't be read there.
                found, revision = self._get_whole([each.key for each in compare], deadline, revision)
                return Outcome(False, revision, tuple(found.values()))
            kvs = inner["responses"][0]["response_range"].get("kvs")
            if kvs and b64decode(kvs[0]["value"]) == _MADE:
                return Outcome(True, int(kvs[0]["mod_revision"]))
            expected = int(kvs[0]["mod_revision"]) if kvs else 0

    def list_made(self) -> list[str]:
        made: list[str] = []
        start = self._prefix + b"ids/"
        end = _text(find_end(start))
        while True:
            body = {"key": _text(start), "rangeEnd": end, "limit": str(_SMALL_AT_ONCE)}
            kvs = self._call("kv/range", body, _deadline()).get("kvs")
            if not kvs:
                return made
            found = [b64decode(kv["key"]) for kv in kvs if b64decode(kv["value"]) == _MADE]
            made += [key.rpartition(b"/")[2].decode() for key in found]
            start = b64decode(kvs[-1]["key"]) + b"\0"

    def watch(self, prefix: str, revision: int) -> Iterator[list[Change]]:
        low = encode_text(prefix)
        wanted = {"key": self._encode(low), "rangeEnd": self._encode(find_end(low))}
        heard = time.monotonic()
        while not self._gateway.closed.is_set():
            body = {"createRequest": {**wanted, "startRevision": str(revision + 1)}}
            try:
                for answer in self._gateway.stream(body, self._format_key, IDLE_SECONDS):
                    for changes in self._read_changes(answer, revision):
                        yield changes
                        revision = changes[-1].revision if changes else revision
                        heard = time.monotonic()
            except Unanswered as error:
                if time.monotonic() - heard > CALL_SECONDS:
                    raise StoreUnavailable(
                        f"A member of etcd must tell of changes. Received: none does for {CALL_SECONDS:g} s "
                        f"({error}). Watch again from revision {revision}"
                    ) from error
                self._gateway.closed.wait(0.1)

    def grant(self, seconds: float) -> int:
        check_lease_seconds(seconds)
        return self._grant(math.ceil(seconds), _deadline())

    def keep(self, lease: int) -> bool:
        return int(self._call("lease/keepalive", {"ID": str(lease)}, _deadline()).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        try:
            self._call("lease/revoke", {"ID": str(lease)}, _deadline())
        except EtcdAnswer as answer:
            if answer.code != NOT_FOUND:
                raise

    def close(self) -> None:
        self._gateway.close()

    # Opening

    def _open(self, cluster: str, create: bool, alone: bool) -> None:
        # That of the whole cluster isn't known while its members start.
        version = str(self._call("version", None, _deadline()).get("etcdserver", ""))
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or (int(numbers[1]), int(numbers[2])) < (3, 4):
            raise MetadataRefused(f"etcd must be of version 3.4 or newer. Received: {version!r}. Update it")
        if create and alone:
            self._require_no_other(cluster)
        key, value = self._format_key["key"], _text(json.dumps({"format": _FORMAT}).encode())
        if create:
            absent = {"key": key, "target": "CREATE", "createRevision": "0"}
            put = {"requestPut": {"key": key, "value": value}}
            self._call("kv/txn", {"compare": [absent], "success": [put]}, _deadline())
        kvs = self._call("kv/range", self._format_key, _deadline()).get("kvs")
        if not kvs:
            names = self._list_clusters()
            others = f"but of {', '.join(names)}" if names else "and of no other one"
            raise InputError(
                f"An etcd must hold the metadata of the cluster that uses it. Received: none of {cluster}, "
                f"{others}. Name that cluster's etcd, or make the cluster by `insitu up`"
            )
        try:
            found = int(json.loads(b64decode(kvs[0]["value"]))["format"])
        except (ValueError, KeyError, TypeError):
            found = 0
        if found != _FORMAT:
            raise MetadataRefused(
                f"Metadata of {cluster} in etcd must be of format {_FORMAT}. Received: {found or 'none'}. "
                f"Use the version of insitu that has written it, or a newer one"
            )

    def _require_no_other(self, cluster: str) -> None:
        others = [name for name in self._list_clusters() if name != cluster]
        if others:
            raise InputError(
                f"An etcd holds the metadata of one cluster. Received: a new cluster, and an etcd with that "
                f"of {', '.join(others)}. Run `insitu up` with the INSITU_HOME of that cluster, or name "
                f"another etcd. If that cluster is given up, `etcdctl del --prefix /insitu/` removes it"
            )

    def drop(self) -> None:
        """Remove all that etcd holds of this cluster. No store of it may be used any more."""
        end = _text(find_end(self._prefix))
        self._call("kv/deleterange", {"key": _text(self._prefix), "rangeEnd": end}, _deadline())

    def _list_clusters(self) -> list[str]:
        names: list[str] = []
        start, end = _ROOT, _text(find_end(_ROOT))
        while len(names) < 5:
            body = {"key": _text(start), "rangeEnd": end, "limit": "1", "keysOnly": True}
            kvs = self._call("kv/range", body, _deadline()).get("kvs")
            if not kvs:
                break
            name = b64decode(kvs[0]["key"])[len(_ROOT) :].partition(b"/")[0]
            names.append(name.decode(errors="replace"))
            start = find_end(_ROOT + name + b"/")
        return names

    # Calls

    def _call(self, path: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        return self._gateway.call(path, body, deadline)

    def _get_whole(
        self, keys: Sequence[str], deadline: float, revision: int = 0
    ) -> tuple[dict[str, Record], int]:
        wanted = [self._encode(encode_key(key)) for key in keys]
        return _read_whole(lambda at: self._get(wanted, at, deadline), revision)

    def _get(self, wanted: Sequence[str], revision: int, deadline: float) -> tuple[dict[str, Record], int]:
        found: dict[str, Record] = {}
        for start in range(0, max(1, len(wanted)), _KEYS_AT_ONCE):
            ranges = [
                {"key": key, "revision": str(revision)} for key in wanted[start : start + _KEYS_AT_ONCE]
            ]
            reads = [{"requestRange": each} for each in ranges or [{"key": _text(self._prefix)}]]
            answer = self._call("kv/txn", {"success": reads}, deadline)
            revision = revision or _revision_of(answer)
            for each in answer["responses"]:
                for kv in each["response_range"].get("kvs", ()):
                    record = self._make_record(kv)
                    found[record.key] = record
        return found, revision

    def _range(
        self, first: bytes, end: bytes, limit: int, revision: int, deadline: float
    ) -> tuple[list[Record], int]:
        found: list[Record] = []
        count = _KEYS_AT_ONCE
        while True:
            body = {
                "key": self._encode(first),
                "rangeEnd": self._encode(end),
                "revision": str(revision),
                "limit": str(min(count, limit - len(found))),
            }
            answer = self._call("kv/range", body, deadline)
            revision = revision or _revision_of(answer)
            page = list(map(self._make_record, answer.get("kvs", ())))
            found += page
            is_small = sum(len(each.value) for each in page) <= _SMALL_BYTES * len(page)
            count = _SMALL_AT_ONCE if is_small else _KEYS_AT_ONCE
            if not answer.get("more") or len(found) >= limit:
                return found, revision
            first = found[-1].key.encode() + b"\0"

    def _grant(self, seconds: int, deadline: float) -> int:
        lease = secrets.randbelow(2**62) + 1
        try:
            self._call("lease/grant", {"ID": str(lease), "TTL": str(seconds)}, deadline)
        except EtcdAnswer as answer:
            # It was granted, and the answer lost: nobody else chooses the same number.
            if answer.code != FAILED_PRECONDITION:
                raise
        return lease

    def _take_lease_of_ids(self, deadline: float) -> int:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        with self._lock:
            if now < self._renew_at:
                return self._lease_of_ids
        lease = self._grant(_REMEMBERED_SECONDS, deadline)
        with self._lock:
            self._lease_of_ids, self._renew_at = lease, now + _RENEWED_SECONDS
        return lease

    def _require_leases(self, operations: Sequence[Operation], deadline: float) -> None:
        for lease in {each.lease for each in operations if isinstance(each, Put) and each.lease}:
            answer = self._call("lease/timetolive", {"ID": str(lease)}, deadline)
            if int(answer.get("TTL", -1)) <= 0:
                raise LeaseEnded(
                    f"A key goes with a lease that is alive. Received: lease {lease}, which has ended. Grant "
                    f"another",
                    lease=lease,
                )

    def _make_body(
        self, compare: Sequence[Compare], operations: Sequence[Operation], id: str, expected: int, lease: int
    ) -> dict[str, Any]:
        """Return the request: if the id's key is as expected and all comparisons hold, make the changes and
        write the id down. Else, if the id's key is as expected, write down that this was refused."""
        id_key = self._make_id_key(id)
        untried = {"key": id_key, "target": "MOD", "modRevision": str(expected)}
        conditions = [{"key": self._encode(each.key.encode()), **_make_condition(each)} for each in compare]
        note = {"key": id_key, "lease": str(lease)}
        refused = {
            "compare": [untried],
            "success": [{"requestPut": {**note, "value": _text(_REFUSED)}}],
            "failure": [{"requestRange": {"key": id_key}}],
        }
        return {
            "compare": [untried, *conditions],
            "success": [
                {"requestPut": {**note, "value": _text(_MADE)}},
                *(self._make_operation(each) for each in operations),
            ],
            "failure": [{"requestTxn": refused}],
        }

    def _make_id_key(self, id: str) -> str:
        return _text(self._prefix + b"ids/" + id.encode())

    def _make_operation(self, operation: Operation) -> dict[str, Any]:
        key = self._encode(operation.key.encode())
        if isinstance(operation, Put):
            return {
                "requestPut": {"key": key, "value": _text(operation.value), "lease": str(operation.lease)}
            }
        return {"requestDeleteRange": {"key": key}}

    # Keys and changes

    def _encode(self, key: bytes) -> str:
        return _text(self._prefix + b"keys/" + key)

    def _decode(self, key: str) -> str:
        return b64decode(key)[len(self._prefix) + len(b"keys/") :].decode()

    def _make_record(self, kv: dict[str, Any]) -> Record:
        value = b64decode(kv.get("value", ""))
        return Record(self._decode(kv["key"]), value, int(kv["mod_revision"]), int(kv.get("lease", 0)))

    def _read_changes(self, answer: dict[str, Any], revision: int) -> Iterator[list[Change]]:
        """Yield the changes that a watch reports, by revision; an empty list if it has none."""
        compacted = int(answer.get("compact_revision", 0))
        is_idle = answer.keys().isdisjoint(("events", "created", "canceled"))
        if compacted or (is_idle and _revision_of(answer) < revision):  # it may be an etcd of another history
            raise RevisionCompacted(
                f"A watch begins at a revision from {compacted} on. Received: {revision}. Read all again"
            )
        if is_idle:
            yield []
        changes = [
            Change(
                self._decode(event["kv"]["key"]),
                int(event["kv"]["mod_revision"]),
                None if event.get("type") == "DELETE" else b64decode(event["kv"].get("value", "")),
            )
            for event in answer.get("events", ())
        ]
        for _, together in groupby(changes, lambda change: change.revision):
            yield list(together)


def _deadline() -> float:
    return find_deadline(CALL_SECONDS)


def _read_whole(read: Callable[[int], T], revision: int = 0) -> T:
    """Return what `read` finds at a revision (0: the newest), at the newest if etcd has forgotten that one
    between two requests."""
    while True:
        try:
            return read(revision)
        except EtcdAnswer as answer:
            if answer.code != OUT_OF_RANGE:
                raise
            revision = 0


def _make_condition(compare: Compare) -> dict[str, str]:
    if compare.value is not None:
        return {"target": "VALUE", "value": _text(compare.value)}
    return {"target": "MOD", "modRevision": str(compare.revision)}


def _text(data: bytes) -> str:
    """Return bytes as JSON has them."""
    return b64encode(data).decode()


def _revision_of(answer: dict[str, Any]) -> int:
    return int(answer["header"]["revision"])
