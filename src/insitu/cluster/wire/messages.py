"""What agents, the head and the command line send each other, checked field by field.

A message is a JSON object with `do`. Nothing that comes from a peer is used before its type is checked.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from insitu.base.errors import ClusterError, InputError
from insitu.base.spec import NodeId, check_cache_name, check_simple_name
from insitu.base.typed import Count, Seconds, Text, convert, convert_exactly
from insitu.cluster.decide import AgentFacts, AgentLoad, Member, Membership, membership
from insitu.exchange import parse_address
from insitu.grid import StagedImport

MAX_LINE_BYTES = 4 << 20
"""Bytes of one message at most."""
MAX_CATALOG_BYTES = 1 << 30
_PAGE_BYTES, _PART_PAGES = 4096, 256
_Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
_CatalogNumber = Annotated[int, Meta(ge=0, lt=MAX_CATALOG_BYTES)]
_Partition = tuple[Annotated[int, Meta(ge=0, lt=1 << 16)], Count, Annotated[str, Meta(max_length=100)]]
_Import = tuple[Text, Text, _Version | None]
TextsByName = Annotated[dict[Text, Text], Meta(max_length=1 << 16)]

Message = dict[str, Any]


class _Inventory(Struct):
    """Partitions of one version in a store: number, bytes and checksum of each."""

    cache: Text
    version: _Version
    partitions: Annotated[list[_Partition], Meta(max_length=1 << 16)]


class _Imports(Struct):
    """Cache, token and version of imports."""

    imports: Annotated[list[_Import], Meta(max_length=1024)]


class _End(Struct):
    """Cache, token and version of an import, and whether it was published."""

    import_: _Import = field(name="import")
    published: bool


class _CatalogPart(Struct):
    """Part of a catalogue."""

    number: _CatalogNumber
    start: _CatalogNumber
    bytes: _CatalogNumber
    count: _CatalogNumber
    of: Text
    part: Annotated[str, Meta(max_length=MAX_LINE_BYTES)]
    digest: Text


def parse_seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises ClusterError for anything else."""
    return float(convert(name, value, Seconds, ClusterError))


def parse_facts(value: Any) -> AgentFacts:
    """Return the facts that an agent sends about itself. Raises ClusterError."""
    return _check_facts(convert_exactly("facts", value, AgentFacts, ClusterError))


def _check_facts(facts: AgentFacts) -> AgentFacts:
    with _as_cluster_error():
        check_simple_name("A node's name", facts.node)
    if not set(membership.REQUIRED_VERSIONS) <= facts.versions.keys():
        raise ClusterError(
            f"versions must be those of insitu, python and others. Received: {facts.versions!r:.100}"
        )
    return facts


def parse_load(value: Any) -> AgentLoad:
    """Return the load that an agent reports. Raises ClusterError."""
    return convert_exactly("load", value, AgentLoad, ClusterError)


def parse_member(value: Any) -> Member:
    """Return a member out of a list that the head has sent or saved. Raises ClusterError."""
    if isinstance(value, dict):  # a list that a head before this version has saved
        value = {"leave_by": None, "is_empty": False, "refused": "", **value}
    member = convert_exactly("member", value, Member, ClusterError)
    _check_facts(member.facts)
    return member


def parse_members(value: Any) -> dict[NodeId, Member]:
    """Return members by node. Raises ClusterError."""
    if not isinstance(value, list) or len(value) > 1 << 16:
        raise ClusterError(f"members must be a list. Received: {value!r:.100}")
    members = map(parse_member, value)
    return {member.facts.node: member for member in members}


def encode_members(members: Membership) -> list[Message]:
    return [asdict(member) for _, member in sorted(members.members.items())]


def parse_job_order(message: Message) -> tuple[str, str, bool]:
    """Return (job, address of its supervisor, whether its server runs in a place beside the agent). Raises
    ClusterError."""
    job, address = (convert(name, message.get(name), Text, ClusterError) for name in ("job", "address"))
    with _as_cluster_error():
        check_simple_name("A job's id", job)
        parse_address(address)
    return job, address, message.get("has_place") is True


def encode_inventory(cache: str, version: int, partitions: Mapping[int, tuple[int, str]]) -> Message:
    """Say what a store holds of a version: {partition: (bytes, checksum)}."""
    listed = [[index, size, checksum] for index, (size, checksum) in sorted(partitions.items())]
    return {"do": "inventory", "cache": cache, "version": version, "partitions": listed}


def parse_inventory(message: Message) -> tuple[str, int, dict[int, tuple[int, str]]]:
    """Return (cache, version, {partition: (bytes, checksum)}). Raises ClusterError."""
    found = convert("inventory", message, _Inventory, ClusterError)
    with _as_cluster_error():
        check_cache_name(found.cache)
    partitions = {index: (size, checksum) for index, size, checksum in found.partitions}
    return found.cache, found.version, partitions


def encode_imports(staged: Sequence[StagedImport]) -> Message:
    """Name the imports that have brought something to a store and weren't ended there."""
    return {"do": "imports", "imports": [[each.cache, each.token, each.version] for each in staged]}


def parse_imports(message: Message) -> list[StagedImport]:
    """Return the imports that `encode_imports` was given. Raises ClusterError."""
    return [_check_import(*each) for each in convert("imports", message, _Imports, ClusterError).imports]


def encode_end(staged: StagedImport, published: bool) -> Message:
    """Have an agent end an import that is over."""
    return {"do": "end_import", "import": [staged.cache, staged.token, None], "published": published}


def parse_end(message: Message) -> tuple[StagedImport, bool]:
    """Return the import and the flag that `encode_end` was given. Raises ClusterError."""
    found = convert("end", message, _End, ClusterError)
    return _check_import(*found.import_), found.published


def _check_import(cache: str, token: str, version: int | None) -> StagedImport:
    with _as_cluster_error():
        check_cache_name(cache)
        check_simple_name("An import's token", token)
    return StagedImport(cache, token, version)


@contextlib.contextmanager
def _as_cluster_error() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise ClusterError(error.message) from None


@dataclass(frozen=True, slots=True)
class CatalogVersion:
    """A catalogue that was sent: the next one is described by the pages in which it differs."""

    #: SHA-256 of its bytes, hexadecimal.
    digest: str
    #: A digest of each page.
    pages: tuple[bytes, ...]


def identify_catalog(data: bytes) -> CatalogVersion:
    """Return how the catalogue `data` is known to those who were sent it."""
    view = memoryview(data)
    pages = (view[at : at + _PAGE_BYTES] for at in range(0, len(data), _PAGE_BYTES))
    digests = tuple(hashlib.blake2b(page, digest_size=16).digest() for page in pages)
    return CatalogVersion(hashlib.sha256(data).hexdigest(), digests)


def split_catalog(data: bytes, version: CatalogVersion, before: CatalogVersion | None) -> Iterator[Message]:
    """Yield the messages that carry the catalogue `data` to an agent that has `before`, or None."""
    held = before.pages if before is not None else ()
    # Of each part the first page, and the one behind its last.
    parts: list[tuple[int, int]] = []
    for number, page in enumerate(version.pages):
        if number < len(held) and held[number] == page:
            continue
        if parts and parts[-1][1] == number < parts[-1][0] + _PART_PAGES:
            parts[-1] = parts[-1][0], number + 1
        else:
            parts.append((number, number + 1))
    of = before.digest if before is not None else ""
    head = {"do": "catalog", "digest": version.digest, "of": of, "bytes": len(data), "count": len(parts)}
    for number, (first, end) in enumerate(parts or [(0, 0)]):
        part = base64.b64encode(data[first * _PAGE_BYTES : end * _PAGE_BYTES]).decode()
        yield {**head, "number": number, "start": first * _PAGE_BYTES, "part": part}


class CatalogParts:
    """Puts catalogues together from their messages, and keeps the last one."""

    def __init__(self) -> None:
        self._whole, self._digest = b"", ""
        #: The one that is on its way, and its next part.
        self._data, self._next = bytearray(), 0

    def add(self, message: Message) -> bytes | None:
        """Return the catalogue once it is whole. Raises ClusterError for parts that don't fit."""
        found = convert("catalog", message, _CatalogPart, ClusterError)
        start, size = found.start, found.bytes
        if found.number == 0:
            self._begin(found.of, size)
        try:
            part = base64.b64decode(found.part, validate=True)
        except ValueError:
            raise ClusterError("A part of the catalogue must be base64. Received: something else") from None
        if found.number != self._next or len(self._data) != size or start + len(part) > size:
            raise ClusterError("The parts of the catalogue must come in order. Received: another one")
        self._next += 1
        self._data[start : start + len(part)] = part
        if self._next < found.count:
            return None
        data, self._data, self._next = bytes(self._data), bytearray(), 0
        digest = hashlib.sha256(data).hexdigest()
        if digest != found.digest:
            raise ClusterError("The catalogue must have the digest that was announced. Received: another one")
        self._whole, self._digest = data, digest
        return data

    def _begin(self, of: str, size: int) -> None:
        if of and of != self._digest:
            raise ClusterError("Changed pages must be of the last catalogue. Received: those of another one")
        self._data = bytearray((self._whole if of else b"")[:size].ljust(size, b"\0"))
        self._next = 0
