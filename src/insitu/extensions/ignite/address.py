"""The address of a cache of Ignite, and the settings of connections to it, from the environment."""

from __future__ import annotations

import os
import re
import ssl
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from insitu.base.errors import InputError, SourceError
from insitu.base.net.ports import format_address
from insitu.base.wording import format_count

SCHEME = "ignite://"
DEFAULT_PORT = 10800
DEFAULT_TIMEOUT = 30.0
_FORM = f"{SCHEME}HOST[:PORT][,HOST...]/CACHE"
_LONGEST_TIMEOUT = 3600.0

HostPort = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a cache is."""

    #: Servers, in the order in which they are tried.
    servers: tuple[HostPort, ...]
    #: The name of the cache in Ignite.
    cache: str

    def __str__(self) -> str:
        # The name may hold what `parse_address` takes for a quoted character.
        cache = self.cache.replace("%", "%25")
        return f"{SCHEME}{','.join(map(format_server, self.servers))}/{cache}"


def format_server(server: HostPort) -> str:
    return format_address(*server)


def parse_address(text: str) -> Address:
    """Return what `ignite://HOST[:PORT][,HOST...]/CACHE` names. Raises InputError, without the password."""
    hosts, _, cache = text[len(SCHEME) :].partition("/")
    if "@" in hosts:
        raise InputError(
            f"An address has the form {_FORM}: a user and a password would be seen by others in the list of "
            f"processes. Received: {SCHEME}...@{hosts.rpartition('@')[2]}. Set INSITU_IGNITE_USERNAME and "
            f"INSITU_IGNITE_PASSWORD"
        )
    if not cache:
        raise InputError(f"An address has the form {_FORM}. Received: {text}, without a cache")
    return Address(tuple(_parse_server(host, text) for host in hosts.split(",")), unquote(cache))


def cache_name_of(address: Address) -> str:
    """Return the name of the cache of insitu that snapshots of a cache of Ignite are versions of."""
    host, port = address.servers[0]
    parts = [re.sub(r"[^A-Za-z0-9_.-]", "_", part).lstrip(".-")[:80] for part in (host, address.cache)]
    whole = f"{host} {address.cache}"
    # What was changed would else be one name with what needed no change.
    mark = "" if whole == " ".join(parts) else f"-{zlib.crc32(whole.encode()):08x}"
    return f"ignite/{parts[0] or 'host'}-{port}/{parts[1] or 'cache'}{mark}"


def _parse_server(text: str, address: str) -> HostPort:
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text.strip())
    port = int(found[3] or DEFAULT_PORT) if found else 0
    if not found or not 1 <= port <= 65535:
        raise InputError(
            f"An address has the form {_FORM}, an IPv6 address in brackets, a port in [1, 65535]. "
            f"Received: {text!r} in {address}"
        )
    return found[1] or found[2], port


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """How servers are connected to. Never printed: it holds a password."""

    #: The user; empty where the cluster has no authentication.
    user: str = field(default="", repr=False)
    #: The user's password.
    password: str = field(default="", repr=False)
    #: Of all connections; None for plain text.
    tls: ssl.SSLContext | None = None
    #: The name that certificates must have; empty: that of the server that is connected to.
    server_name: str = ""
    #: Seconds that each wait may take.
    timeout: float = DEFAULT_TIMEOUT


def read_settings(environment: Mapping[str, str] = os.environ) -> ConnectionSettings:
    """Return the settings that the environment has. Raises InputError and SourceError."""
    user, password = read_credentials(environment)
    return ConnectionSettings(
        user,
        password,
        _make_tls(environment),
        environment.get("INSITU_IGNITE_SERVER_NAME", ""),
        _read_timeout(environment),
    )


def _read_timeout(environment: Mapping[str, str]) -> float:
    text = environment.get("INSITU_IGNITE_TIMEOUT") or str(DEFAULT_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise InputError(f"INSITU_IGNITE_TIMEOUT must be seconds in (0, 3600]. Received: {text!r}")
    return seconds


def read_credentials(environment: Mapping[str, str]) -> tuple[str, str]:
    file = environment.get("INSITU_IGNITE_CREDENTIALS")
    if file:
        return _read_credentials_file(Path(file).expanduser())
    for prefix in ("INSITU_IGNITE", "IGNITE_DATASET"):
        user, password = (environment.get(f"{prefix}_{name}", "") for name in ("USERNAME", "PASSWORD"))
        if user:
            return user, password
        if password:
            raise InputError(
                f"{prefix}_PASSWORD needs a user. Received: no {prefix}_USERNAME. Set it, or unset the "
                f"password"
            )
    return "", ""


def _read_credentials_file(path: Path) -> tuple[str, str]:
    """Return the first two lines of a file: user and password."""
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = [line.rstrip("\r\n") for line in file.readlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"INSITU_IGNITE_CREDENTIALS names a file with the user in its first line and the password in its "
            f"second. Received: {path}, which can't be read: {getattr(error, 'strerror', None) or 'no text'}"
        ) from None
    if mode & 0o077:
        raise InputError(
            f"A file with a password must be its owner's alone. Received: {path} of mode {mode:o}. Give the "
            f"command: chmod 600 {path}"
        )
    if len(lines) < 2 or not lines[0]:
        raise InputError(
            f"INSITU_IGNITE_CREDENTIALS names a file with the user in its first line and the password in its "
            f"second. Received: {path} with {format_count(len(lines), 'line')}"
        )
    return lines[0], lines[1]


def _make_tls(environment: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the context of TLS, where a setting asks for it. Servers are verified, always."""
    old = environment.get("IGNITE_DATASET_CERTFILE", "")
    authority = environment.get("INSITU_IGNITE_CA") or old
    certificate = environment.get("INSITU_IGNITE_CERT") or (
        old if environment.get("IGNITE_DATASET_KEYFILE") else ""
    )
    key = environment.get("INSITU_IGNITE_KEY") or environment.get("IGNITE_DATASET_KEYFILE", "")
    password = environment.get("INSITU_IGNITE_KEY_PASSWORD") or environment.get(
        "IGNITE_DATASET_CERT_PASSWORD"
    )
    wanted = environment.get("INSITU_IGNITE_TLS", "")
    if wanted not in ("", "0", "1"):
        raise InputError(f"INSITU_IGNITE_TLS must be 1 or 0. Received: {wanted!r}")
    if wanted == "0" or not (wanted or authority or certificate):
        return None
    try:
        context = ssl.create_default_context(cafile=authority or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate:
            # Without a password OpenSSL would ask for it on the terminal.
            context.load_cert_chain(certificate, key or None, password or "")
    except (OSError, ssl.SSLError) as error:
        raise SourceError(
            f"Certificates and keys must be PEM files. Received: "
            f"{authority or 'the authorities of the system'}"
            f"{f', {certificate} and {key or certificate}' if certificate else ''}, which can't be used: "
            f"{error.strerror or error}. Set INSITU_IGNITE_CA, INSITU_IGNITE_CERT, INSITU_IGNITE_KEY and, "
            f"for "
            f"an encrypted key, INSITU_IGNITE_KEY_PASSWORD"
        ) from error
    return context
