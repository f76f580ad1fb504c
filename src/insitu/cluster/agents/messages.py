"""What agents, the head and the command line send each other, checked field by field.

A message is a JSON object with `do`. Nothing that comes from a peer is used before its type is checked.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from insitu.cluster.decide import AgentFacts, AgentLoad, Member, Membership, membership
from insitu.errors import ClusterError, InputError
from insitu.exchange import parse_address
from insitu.grid import StagedImport
from insitu.spec import NodeId, check_cache_name, check_simple_name

MAX_LINE_BYTES = 4 << 20
"""Bytes of one message at most."""
MAX_CATALOG_BYTES = 1 << 30
_PART_BYTES = 1 << 20
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


def parse_take_over_after(value: Any) -> float | None:
    """Return the seconds without a head after which a node takes over; None: never. Raises ClusterError."""
    return None if value is None else parse_seconds("take_over_after", value)


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


def split_catalog(data: bytes) -> Iterator[Message]:
    """Yield the messages that carry the catalogue."""
    digest = hashlib.sha256(data).hexdigest()
    for start in range(0, max(1, len(data)), _PART_BYTES):
        part = base64.b64encode(data[start : start + _PART_BYTES]).decode()
        yield {"do": "catalog", "digest": digest, "start": start, "bytes": len(data), "part": part}


class CatalogParts:
    """Puts the catalogue together from its messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, message: Message) -> bytes | None:
        """Return the catalogue once it is whole. Raises ClusterError for parts that don't fit."""
        start = _number("start", message.get("start"), MAX_CATALOG_BYTES)
        size = _number("bytes", message.get("bytes"), MAX_CATALOG_BYTES)
        if start == 0:
            self._data = bytearray()
        try:
            part = base64.b64decode(_text("part", message.get("part"), MAX_LINE_BYTES), validate=True)
        except ValueError:
            raise ClusterError("A part of the catalogue must be base64. Received: something else") from None
        self._data += part
        if start + len(part) != len(self._data) or len(self._data) > size:
            raise ClusterError("The parts of the catalogue must come in order. Received: another one")
        if len(self._data) < size:
            return None
        data, self._data = bytes(self._data), bytearray()
        if hashlib.sha256(data).hexdigest() != message.get("digest"):
            raise ClusterError("The catalogue must have the digest that was announced. Received: another one")
        return data
