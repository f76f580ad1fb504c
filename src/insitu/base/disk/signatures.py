"""Sign what this user or job writes and reads back, so that nobody else's bytes are taken for it.

A checksum keeps decay out, a signature forgery: it is a digest that only who has the key can make. A job's
key follows from its secret. A user's key is a file of INSITU_HOME, made on first use.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE, make_sticky_folder
from insitu.base.disk.durable import staged_file, sync_folder, write_synced
from insitu.base.errors import InputError
from insitu.base.paths import Paths

KEY_BYTES = 32


class OtherKey(ValueError):
    """Raised for what was signed with another key."""


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose, from which the secret can't be found out."""
    return hmac.digest(secret, f"insitu {purpose}".encode(), "sha256")


def read_user_key(paths: Paths) -> bytes:
    """Return this user's key; make it on first use. Raises InputError, OSError."""
    path = paths.key(os.geteuid())
    make_sticky_folder(paths.home, path.parent)
    if not path.exists():
        with staged_file(path) as staged:
            write_synced(staged, secrets.token_bytes(KEY_BYTES), PRIVATE_FILE)
            with contextlib.suppress(FileExistsError):
                os.link(staged, path)
        sync_folder(path.parent)
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        key = file.read(KEY_BYTES + 1)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or len(key) != KEY_BYTES:
        raise InputError(
            f"A key must be a file of {KEY_BYTES} bytes that its owner alone may read. Received: {path} of "
            f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}, {len(key)} bytes. Put back the "
            f"right one, or delete it: checkpoints that were signed with it then can't be read"
        )
    return key


def sign(state: Any, key: bytes) -> bytes:
    """Return `state` as JSON, signed."""
    text = json.dumps(state)
    return json.dumps({"key": _identify(key), "hmac": _compute(text, key), "state": text}).encode()


def unsign(data: bytes, key: bytes) -> Any:
    """Return what `sign` was given. Raises OtherKey; ValueError, KeyError, TypeError or AttributeError if
    `data` is anything else."""
    outer = json.loads(data)
    if not hmac.compare_digest(outer["key"].encode(), _identify(key).encode()):
        raise OtherKey("it was signed with another key")
    if not hmac.compare_digest(outer["hmac"].encode(), _compute(outer["state"], key).encode()):
        raise ValueError("its signature is wrong")
    return json.loads(outer["state"])


def _compute(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(), "sha256").hexdigest()


def _identify(key: bytes) -> str:
    """Return a value that differs between keys and says nothing about them."""
    return hashlib.sha256(b"insitu key " + key).hexdigest()[:16]
