"""What agents, the head and the command line send each other, checked field by field.

A message is a JSON object with `do`. Nothing that comes from a peer is used before its type is checked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.spec import NodeId, check_cache_name, check_simple_name
from insitu.cluster.decide import AgentFacts, AgentLoad, Member, Membership, membership
from insitu.exchange import parse_address
from insitu.grid import StagedImport

MAX_LINE_BYTES = 4 << 20
"""Bytes of one message at most."""
MAX_CATALOG_BYTES = 1 << 30
_PAGE_BYTES, _PART_PAGES = 4096, 256
_MAX_TEXT, _MAX_NUMBER = 4096, 1 << 62
_MAX_SECONDS = 1e15
_MAX_LISTED = 1024
_MAX_COLUMNS = 10_000
_MAX_CERTIFICATE = 16 << 10
_MAX_PARTITIONS = 1 << 16

Message = dict[str, Any]


def _text(name: str, value: Any, longest: int = _MAX_TEXT) -> str:
    if type(value) is not str or len(value) > longest:
        raise ClusterError(f"{name} must be a text of {longest} characters at most. Received: {value!r:.100}")
    return value


def _number(name: str, value: Any, limit: int = _MAX_NUMBER) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ClusterError(f"{name} must be a whole number in [0, {limit}). Received: {value!r:.100}")
    return value


def parse_seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises ClusterError for anything else."""
    if type(value) not in (int, float) or not -_MAX_SECONDS < value < _MAX_SECONDS:
        raise ClusterError(f"{name} must be a number of seconds. Received: {value!r:.100}")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ClusterError(f"{name} must be true or false. Received: {value!r:.100}")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > _MAX_LISTED:
        raise ClusterError(f"{name} must be a list of texts. Received: {value!r:.100}")
    return tuple(_text(name, each) for each in value)


def parse_texts(name: str, value: Any) -> dict[str, str]:
    """Return texts by name. Raises ClusterError for anything else."""
    if not isinstance(value, dict) or len(value) > _MAX_PARTITIONS:
        raise ClusterError(f"{name} must be an object of texts. Received: {value!r:.100}")
    return {_text(name, key): _text(name, text) for key, text in value.items()}


def parse_arguments(value: Any) -> list[str]:
    """Return the arguments of a command. Raises ClusterError for what can't be any."""
    found = list(_texts("arguments", value))
    if any("\0" in each for each in found):
        raise ClusterError("arguments must be texts without a zero. Received: one with it")
    return found


def parse_columns(value: Any) -> int:
    """Return the width of a caller's terminal. Raises ClusterError for anything else."""
    return _number("columns", value, _MAX_COLUMNS)


def parse_versions(value: Any) -> dict[str, str]:
    """Return versions by name. Raises ClusterError for anything else."""
    required = set(membership.REQUIRED_VERSIONS)
    if not isinstance(value, dict) or len(value) > _MAX_LISTED or not required <= value.keys():
        raise ClusterError(f"versions must be those of insitu, python and others. Received: {value!r:.100}")
    return {_text("versions", name): _text("versions", version) for name, version in value.items()}


def _object(name: str, value: Any, kind: type) -> Mapping[str, Any]:
    names = {field.name for field in fields(kind)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ClusterError(f"{name} must have the fields {', '.join(sorted(names))}. Received: others")
    return value


def parse_facts(value: Any) -> AgentFacts:
    """Return what an agent says about itself. Raises ClusterError."""
    data = _object("facts", value, AgentFacts)

    def text(name: str) -> str:
        return _text(name, data[name], _MAX_CERTIFICATE)

    try:
        node = NodeId(check_simple_name("A node's name", text("node")))
    except InputError as error:
        raise ClusterError(error.message) from None
    return AgentFacts(
        node=node,
        store=text("store"),
        folder=text("folder"),
        process=text("process"),
        host=text("host"),
        address=text("address"),
        port=_number("port", data["port"], 1 << 16),
        certificate=text("certificate"),
        versions=parse_versions(data["versions"]),
        cores=_number("cores", data["cores"]),
        gpus=_texts("gpus", data["gpus"]),
        memory=_number("memory", data["memory"]),
        disk=_number("disk", data["disk"]),
        processor=text("processor"),
        clock=parse_seconds("clock", data["clock"]),
    )


def parse_load(value: Any) -> AgentLoad:
    """Return what an agent reports. Raises ClusterError."""
    data = _object("load", value, AgentLoad)
    return AgentLoad(**{name: _number(name, data[name]) for name in data})


def parse_member(value: Any) -> Member:
    """Return a member out of a list that the head has sent or saved. Raises ClusterError."""
    if isinstance(value, dict):  # a list that a head before this version has saved
        value = {"leave_by": None, "is_empty": False, "refused": "", **value}
    data = _object("member", value, Member)
    state = _text("state", data["state"])
    if state not in ("alive", "silent", "lost", "left"):
        raise ClusterError(f"state must be one that agents have. Received: {state!r}")
    connection = data["connection"]
    return Member(
        parse_facts(data["facts"]),
        parse_load(data["load"]),
        state,  # type: ignore[arg-type]
        parse_seconds("since", data["since"]),
        parse_seconds("heard", data["heard"]),
        None if connection is None else _number("connection", connection),
        parse_seconds("clock_skew", data["clock_skew"]),
        None if data["leave_by"] is None else parse_seconds("leave_by", data["leave_by"]),
        _flag("is_empty", data["is_empty"]),
        _text("refused", data["refused"]),
    )


def parse_members(value: Any) -> dict[NodeId, Member]:
    """Return members by node. Raises ClusterError."""
    if not isinstance(value, list) or len(value) > 1 << 16:
        raise ClusterError(f"members must be a list. Received: {value!r:.100}")
    members = map(parse_member, value)
    return {member.facts.node: member for member in members}


def encode_members(members: Membership) -> list[Message]:
    return [asdict(member) for _, member in sorted(members.members.items())]


def parse_job_order(message: Message) -> tuple[str, str]:
    """Return (job, address of its supervisor). Raises ClusterError."""
    try:
        job = check_simple_name("A job's id", _text("job", message.get("job")))
        address = _text("address", message.get("address"))
        parse_address(address)
    except InputError as error:
        raise ClusterError(error.message) from None
    return job, address


def encode_inventory(cache: str, version: int, partitions: Mapping[int, tuple[int, str]]) -> Message:
    """Say what a store holds of a version: {partition: (bytes, checksum)}."""
    listed = [[index, size, checksum] for index, (size, checksum) in sorted(partitions.items())]
    return {"do": "inventory", "cache": cache, "version": version, "partitions": listed}


def parse_inventory(message: Message) -> tuple[str, int, dict[int, tuple[int, str]]]:
    """Return (cache, version, {partition: (bytes, checksum)}). Raises ClusterError."""
    try:
        cache = check_cache_name(_text("cache", message.get("cache")))
    except InputError as error:
        raise ClusterError(error.message) from None
    listed = message.get("partitions")
    if not isinstance(listed, list) or len(listed) > _MAX_PARTITIONS:
        raise ClusterError(f"partitions must be a list. Received: {listed!r:.100}")
    found = {}
    for each in listed:
        if not isinstance(each, list) or len(each) != 3:
            raise ClusterError(f"a partition must be number, bytes and checksum. Received: {each!r:.100}")
        index = _number("partition", each[0], _MAX_PARTITIONS)
        found[index] = (_number("bytes", each[1]), _text("checksum", each[2], 100))
    return cache, _number("version", message.get("version"), 1 << 31), found


def encode_imports(staged: Sequence[StagedImport]) -> Message:
    """Name the imports that have brought something to a store and weren't ended there."""
    return {"do": "imports", "imports": [[each.cache, each.token, each.version] for each in staged]}


def parse_imports(message: Message) -> list[StagedImport]:
    """Return what `encode_imports` was given. Raises ClusterError."""
    listed = message.get("imports")
    if not isinstance(listed, list) or len(listed) > _MAX_LISTED:
        raise ClusterError(f"imports must be a list. Received: {listed!r:.100}")
    return [_parse_import(each) for each in listed]


def _parse_import(value: Any) -> StagedImport:
    if not isinstance(value, list) or len(value) != 3:
        raise ClusterError(f"an import must be cache, token and version. Received: {value!r:.100}")
    cache, token, version = value
    try:
        check_cache_name(_text("cache", cache))
        check_simple_name("An import's token", _text("token", token))
    except InputError as error:
        raise ClusterError(error.message) from None
    return StagedImport(cache, token, None if version is None else _number("version", version, 1 << 31))


def encode_end(staged: StagedImport, published: bool) -> Message:
    """Have an agent end an import that is over."""
    return {"do": "end_import", "import": [staged.cache, staged.token, None], "published": published}


def parse_end(message: Message) -> tuple[StagedImport, bool]:
    """Return what `encode_end` was given. Raises ClusterError."""
    published = message.get("published")
    if type(published) is not bool:
        raise ClusterError(f"published must be true or false. Received: {published!r:.100}")
    return _parse_import(message.get("import")), published


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
        number = _number("number", message.get("number"), MAX_CATALOG_BYTES)
        start = _number("start", message.get("start"), MAX_CATALOG_BYTES)
        size = _number("bytes", message.get("bytes"), MAX_CATALOG_BYTES)
        count = _number("count", message.get("count"), MAX_CATALOG_BYTES)
        if number == 0:
            self._begin(_text("of", message.get("of")), size)
        try:
            part = base64.b64decode(_text("part", message.get("part"), MAX_LINE_BYTES), validate=True)
        except ValueError:
            raise ClusterError("A part of the catalogue must be base64. Received: something else") from None
        if number != self._next or len(self._data) != size or start + len(part) > size:
            raise ClusterError("The parts of the catalogue must come in order. Received: another one")
        self._next += 1
        self._data[start : start + len(part)] = part
        if self._next < count:
            return None
        data, self._data, self._next = bytes(self._data), bytearray(), 0
        digest = hashlib.sha256(data).hexdigest()
        if digest != message.get("digest"):
            raise ClusterError("The catalogue must have the digest that was announced. Received: another one")
        self._whole, self._digest = data, digest
        return data

    def _begin(self, of: str, size: int) -> None:
        if of and of != self._digest:
            raise ClusterError("Changed pages must be of the last catalogue. Received: those of another one")
        self._data = bytearray((self._whole if of else b"")[:size].ljust(size, b"\0"))
        self._next = 0
