"""The URL of an etcd: `etcd://[USER@]HOST:PORT,...[?ca=FILE&certificate=FILE&key=FILE&password=FILE]`.

It holds names of files and no secrets, so it may stand in arguments, records and logs.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from insitu.base.disk.guarded_paths import descriptor_path
from insitu.base.errors import InputError
from insitu.exchange import parse_address

_SYSTEM = "system"
_OPTIONS = {"ca", "certificate", "key", "password"}
_FORM = "etcd://[USER@]HOST:PORT,...[?ca=FILE|system&certificate=FILE&key=FILE&password=FILE]"


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """How an etcd is reached, and as whom."""

    #: Host and port of each member.
    endpoints: tuple[tuple[str, int], ...]
    #: The user; empty: etcd asks for none.
    user: str
    #: The user's password.
    password: str = field(repr=False)
    #: None: connections aren't encrypted.
    tls: ssl.SSLContext | None


def parse_etcd_url(url: str) -> EtcdAddress:
    """Return the address that a URL names, with what its files hold. Raises InputError."""
    return make_etcd_address(url, read_etcd_files(url))


def read_etcd_files(url: str) -> dict[str, str]:
    """Return what the files hold that a URL names, by its options. Raises InputError."""
    _, _, options = _split(url)
    return {
        name: _read_file(name, Path(value), options) for name, value in options.items() if value != _SYSTEM
    }


def make_etcd_address(url: str, files: Mapping[str, str]) -> EtcdAddress:
    """Return the address that a URL names; its `files` hold what `read_etcd_files` has found. Raises
    InputError."""
    user, hosts, options = _split(url)
    endpoints = tuple(parse_address(each) for each in hosts.split(","))
    return EtcdAddress(endpoints, user, files.get("password", ""), _make_context(options, files))


def hide_login(url: str) -> str:
    """Return what messages may say of a URL, which may hold a password although it must not."""
    return f"{url.partition(':')[0]}://...@{url.rpartition('@')[2]}" if "@" in url else url


def _split(url: str) -> tuple[str, str, dict[str, str]]:
    """Return the user, the hosts and the options of a URL. Raises InputError."""
    shown = hide_login(url)
    # Not by urlsplit: later releases of Python refuse an IPv6 address behind another host.
    whole, _, fragment = url.partition("#")
    address, _, query = whole.partition("?")
    scheme, _, place = address.partition("://")
    netloc, _, path = place.partition("/")
    login, _, hosts = netloc.rpartition("@")
    if ":" in login:
        raise InputError(
            "The URL of an etcd must hold no password: others see it in lists of processes. Received: one "
            "behind the user's name. Put it into a file, and name that by ?password=FILE"
        )
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - _OPTIONS)
    if scheme != "etcd" or not hosts or path.strip("/") or fragment or unknown:
        raise InputError(f"An etcd is named as {_FORM}. Received: {shown!r}")
    if bool(login) != ("password" in options):
        raise InputError(f"A user and a file with the password belong together: {_FORM}. Received: {shown!r}")
    if "ca" not in options and options.keys() & {"certificate", "key"}:
        raise InputError(
            "A certificate of etcd's users needs that of its authority: ?ca=FILE, or ?ca=system. "
            "Received: none"
        )
    return unquote(login), hosts, options


def _read_file(name: str, path: Path, options: Mapping[str, str]) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii" if name != "password" else None)
    except (OSError, UnicodeDecodeError) as error:
        if name != "password":
            raise _wrong_certificates(options, error) from error
        raise InputError(f"etcd's password must be in a file of text. Received: {path} ({error})") from error
    if name != "password":
        return text
    if stat.S_IMODE(mode) & 0o077:
        raise InputError(f"Only the owner may read etcd's password. Received: {path}. Run chmod 600 {path}")
    return text.strip()


def _make_context(options: Mapping[str, str], files: Mapping[str, str]) -> ssl.SSLContext | None:
    if "ca" not in options:
        return None
    try:
        context = ssl.create_default_context()
        if options["ca"] != _SYSTEM:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(cadata=files["ca"])
        if "certificate" in options:
            _load_certificate(context, f"{files['certificate']}\n{files.get('key', '')}")
    except (OSError, ValueError, TypeError, KeyError) as error:  # which ssl's errors are, too
        raise _wrong_certificates(options, error) from error
    return context


def _load_certificate(context: ssl.SSLContext, pem: str) -> None:
    """Load a certificate with its key from memory, which OpenSSL reads from files alone."""
    file = os.memfd_create("insitu-etcd")
    try:
        os.write(file, pem.encode())
        context.load_cert_chain(descriptor_path(file))
    finally:
        os.close(file)


def _wrong_certificates(options: Mapping[str, str], error: Exception) -> InputError:
    named = ", ".join(f"{name}={options.get(name)}" for name in ("ca", "certificate", "key"))
    return InputError(
        f"The certificates for etcd must be PEM files that this user can read, and each with its key. "
        f"Received: {named} ({error})"
    )
