"""The settings of connections to Ignite, as one host sends them to another over an authenticated channel.

They are those of the environment, with what is in the files that it names. The host that gets them keeps them
in memory alone, and no longer than it reads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError
from insitu.extensions.ignite.address import ConnectionSettings, read_credentials, read_settings

_TEXTS = (
    "INSITU_IGNITE_USERNAME",
    "INSITU_IGNITE_PASSWORD",
    "INSITU_IGNITE_TLS",
    "INSITU_IGNITE_KEY_PASSWORD",
    "INSITU_IGNITE_SERVER_NAME",
    "INSITU_IGNITE_TIMEOUT",
    "IGNITE_DATASET_CERT_PASSWORD",
)
_FILES = (
    "INSITU_IGNITE_CA",
    "INSITU_IGNITE_CERT",
    "INSITU_IGNITE_KEY",
    "IGNITE_DATASET_CERTFILE",
    "IGNITE_DATASET_KEYFILE",
)
_MOST_BYTES = 4 << 20
"""Bytes of one value; a bundle of authorities has a few hundred thousand."""


def carry_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings that another host is to use, by variable; of files, what is in them.

    Raises InputError and SourceError for settings that can't be used.
    """
    read_settings(environment)
    user, password = read_credentials(environment)
    given = {**environment, "INSITU_IGNITE_USERNAME": user, "INSITU_IGNITE_PASSWORD": password}
    texts = {name: given[name] for name in _TEXTS if given.get(name)}
    if given.get("INSITU_IGNITE_TLS") == "0":
        return texts
    return texts | {name: Path(given[name]).read_text() for name in _FILES if given.get(name)}


@contextlib.contextmanager
def take_settings(given: Any) -> Iterator[ConnectionSettings]:
    """Yield what `carry_settings` returned on another host. Raises InputError for anything else, and doesn't
    show what it is: there are passwords in it."""
    if not isinstance(given, dict) or not all(
        name in (*_TEXTS, *_FILES) and isinstance(value, str) and len(value) <= _MOST_BYTES
        for name, value in given.items()
    ):
        raise InputError("Settings of connections to Ignite are texts by variable. Received: something else")
    with contextlib.ExitStack() as files:
        texts = {name: value for name, value in given.items() if name in _TEXTS}
        paths = {name: files.enter_context(_file_in_memory(given[name])) for name in _FILES if name in given}
        yield read_settings(texts | paths)


@contextlib.contextmanager
def _file_in_memory(text: str) -> Iterator[str]:
    """Yield the path of a file that is in memory, and that this process alone can open."""
    descriptor = os.memfd_create("insitu-ignite", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "w") as file:
            file.write(text)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
