"""The servers that a client's configuration of Ignite names, a Spring XML file as `ignite-tf` took it.

Of a thin client's configuration addresses are taken as they are. Of a node's, those by which nodes find each
other name the hosts. They are asked at the port for thin clients that it says, else at the default one.
Nothing else is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from insitu.base.errors import InputError
from insitu.extensions.ignite.address import DEFAULT_PORT, SCHEME, HostPort, format_server

MOST_BYTES = 1 << 20
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+))(?::(\d{1,5})(?:\.\.\d{1,5})?)?")


def address_by_configuration(path: Path, cache: str) -> str:
    """Return the address of a cache at the servers that a configuration names. Raises InputError."""
    try:
        text = path.read_bytes()[: MOST_BYTES + 1]
    except OSError as error:
        raise InputError(
            f"--config names a client's configuration of Ignite. Received: {path}, which can't be read: "
            f"{error.strerror or error}"
        ) from None
    servers = ",".join(map(format_server, find_servers(text, str(path))))
    return f"{SCHEME}{servers}/{cache}"


def find_servers(text: bytes, name: str) -> list[HostPort]:
    """Return the servers that a configuration names, each once. Raises InputError."""
    # A document with declarations of its own could grow without end while it is read.
    bare = re.sub(rb"<!--.*?-->", b"", text, flags=re.DOTALL)
    if len(text) > MOST_BYTES or b"<!" in bare or b"\0" in bare:  # zeros: UTF-16, which would hide them
        raise _make_error(
            name, "a document of more than a mebibyte, with declarations of its own, or in UTF-16"
        )
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise _make_error(name, f"no XML ({error})") from None
    found: dict[HostPort, None] = {}
    default = _find_port(root, name)
    for bean in root.iter():
        kind = bean.get("class", "").rpartition(".")[2]
        if _tag(bean) != "bean" or not kind:
            continue
        for child in bean:
            if _tag(child) == "property" and child.get("name") == "addresses":
                values = [child.get("value"), *(each.text for each in child.iter() if _tag(each) == "value")]
                for value in values:
                    for part in (value or "").split(","):
                        if part.strip():
                            thin = kind == "ClientConfiguration"
                            found[_parse(part.strip(), name, default, thin=thin)] = None
    if not found:
        raise _make_error(name, "no addresses")
    return list(found)


def _find_port(root: ElementTree.Element, name: str) -> int:
    """Return the port at which the servers of a node's configuration listen for thin clients."""
    for bean in root.iter():
        if bean.get("class", "").endswith(".ClientConnectorConfiguration"):
            for child in bean:
                if child.get("name") == "port":
                    text = (child.get("value") or "").strip()
                    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 65535):
                        raise _make_error(name, f"port {text!r}")
                    return int(text)
    return DEFAULT_PORT


def _parse(text: str, name: str, default: int, *, thin: bool) -> HostPort:
    parts = _ADDRESS.fullmatch(text)
    port = int(parts[3]) if parts and parts[3] and thin else DEFAULT_PORT if thin else default
    if parts is None or not 1 <= port <= 65535 or "{" in text:
        raise _make_error(name, f"address {text!r}")
    return parts[1] or parts[2], port


def _tag(element: ElementTree.Element) -> str:
    return str(element.tag).rpartition("}")[2]


def _make_error(name: str, received: str) -> InputError:
    return InputError(
        f"--config names a Spring XML file with the addresses of servers, in a ClientConfiguration or an IP "
        f"finder. Received: {name} with {received}. Name the servers in the address instead: "
        f"{SCHEME}HOST[:PORT][,HOST...]/CACHE"
    )
