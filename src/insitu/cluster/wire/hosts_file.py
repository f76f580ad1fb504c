"""Reads the file of `insitu up --hosts`: a host a line, with what is different there. Pure.

# comment
node1.example.com
10.0.0.7      name=fast  interface=ib0
login@node3   home=/data/insitu
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from insitu.base.errors import InputError
from insitu.base.spec import is_simple_name

_OPTIONS = ("name", "interface", "home", "port")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*|\[[0-9a-fA-F:.%a-z]+\]")


@dataclass(frozen=True, slots=True)
class HostLine:
    """One host, as the user names it."""

    #: What the launcher is given: a name, an address without brackets, or user@name.
    host: str
    #: The name of its node; empty: the store's, or that of the host.
    name: str = ""
    #: The interface or address that its agent serves at; empty: the one that routes to the head.
    interface: str = ""
    #: INSITU_HOME there; empty: what the environment there says.
    home: str = ""
    #: The port of its agent; 0: the system chooses.
    port: int = 0

    @property
    def address(self) -> str:
        """The host without the user."""
        return self.host.rpartition("@")[2]

    @property
    def label(self) -> str:
        """What tells the agent of this line from others: two homes of one host may each have one."""
        return f"{self.host} {self.home}".strip()


def parse_hosts(text: str, name: str) -> list[HostLine]:
    """Return the hosts in the text of the file called `name`. Raises InputError, which names the line."""
    found: list[HostLine] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{name}, line {number}: {error}. Received: {line.strip()!r:.100}") from error
        if words:
            found.append(_parse_line(words, f"{name}, line {number}"))
    if not found:
        raise InputError(f"{name} must name a host a line. Received: no host")
    for kind, values in (
        ("host", [line.host for line in found if not line.home]),
        ("name", [line.name for line in found if line.name]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise InputError(f"{name} must give each {kind} once. Received: {', '.join(twice)} several times")
    return found


def _parse_line(words: list[str], where: str) -> HostLine:
    host, *options = words
    if not _HOST.fullmatch(host):
        raise InputError(
            f"{where}: a host is a name, an address or user@name. Received: {host!r:.100}. Options follow "
            f"it, such as name=NODE"
        )
    user, at, address = host.rpartition("@")
    if address.count(":") == 1 or "]:" in address:
        raise InputError(
            f"{where}: a host is named without a port. Received: {host!r:.100}. Put the port of ssh into "
            f"~/.ssh/config, or give --launcher 'ssh -p PORT {{host}}'; the agent's own is port=PORT"
        )
    # ssh takes addresses of IPv6 without brackets alone.
    host = f"{user}{at}{address.removeprefix('[').removesuffix(']')}"
    values: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _OPTIONS or not equals or not value or key in values:
            raise InputError(
                f"{where}: options are {', '.join(f'{each}=...' for each in _OPTIONS)}, each once. Received: "
                f"{option!r:.100}"
            )
        values[key] = value
    if "name" in values and not is_simple_name(values["name"]):
        raise InputError(
            f"{where}: a node's name is made of letters, digits, '_', '.', '-'. Received: {values['name']!r}"
        )
    port = values.pop("port", "0")
    if not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{where}: port is a number in [0, 65536). Received: {port!r}")
    return HostLine(host, port=int(port), **values)
