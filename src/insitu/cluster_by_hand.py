"""Reads a cluster that the user has made by hand: processes that find each other by TF_CONFIG, without
`insitu start`.

Each process has the same `cluster` and its own `task` in TF_CONFIG, as tf.distribute's workers have. All of
them train together. There is no controller: where one is lost, the others end with an error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.errors import InputError
from insitu.paths import Paths
from insitu.spec import ROLES, TaskId
from insitu.unauthenticated import is_loopback

SECRET_ENV = "INSITU_SECRET"
SECRET_FILE_ENV = "INSITU_SECRET_FILE"
MIN_SECRET_BYTES = 16
"""Bytes that a user's secret must have."""
_MADE_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class HandMadeCluster:
    """The place of this process in a cluster by TF_CONFIG."""

    #: Role and number as insitu counts them: a chief is worker 0, and the workers follow it.
    task: TaskId
    #: Addresses of all that train, the chief's first, as `host:port`.
    workers: tuple[str, ...]
    #: Number of tasks of all roles.
    size: int


def read_cluster(tf_config: Mapping[str, Any]) -> HandMadeCluster | None:
    """Return the cluster that a TF_CONFIG describes; None where it has no task or no cluster.

    Raises InputError where it can't be one.
    """
    cluster, own = tf_config.get("cluster"), tf_config.get("task")
    if not cluster or not own:
        return None
    try:
        role, index = str(own["type"]), int(own.get("index", 0))
        addresses = {str(name): tuple(map(str, found)) for name, found in cluster.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            'TF_CONFIG must have the form {"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": '
            f'"worker", "index": 0}}}}. Received: {json.dumps(dict(tf_config))}'
        ) from error
    if role not in ROLES:
        raise InputError(f"The task in TF_CONFIG must be one of {', '.join(ROLES)}. Received: {role!r}")
    if role != "evaluator" and not 0 <= index < len(addresses.get(role, ())):
        raise InputError(
            f"The task in TF_CONFIG must be in its cluster. Received: {role} {index}, and "
            f"{len(addresses.get(role, ()))} addresses of {role} tasks"
        )
    chief = addresses.get("chief", ())
    if role == "chief":
        role, index = "worker", 0
    elif role == "worker":
        index += len(chief)
    task = TaskId(role, index)  # type: ignore[arg-type]
    workers = (*chief, *addresses.get("worker", ()))
    return HandMadeCluster(task, workers, sum(map(len, addresses.values())))


def find_secret(environ: Mapping[str, str], paths: Paths, workers: tuple[str, ...]) -> bytes:
    """Return the secret that the processes of a cluster prove to each other.

    The user's, out of INSITU_SECRET_FILE or INSITU_SECRET. Without one, processes of one user on one machine
    share a file in $INSITU_HOME, which is made where it isn't there. Raises InputError.
    """
    if given := _read_given(environ):
        return given
    if not all(map(is_loopback, workers)):
        raise InputError(
            "Processes on several hosts need a secret that only they know. Received: a TF_CONFIG with "
            f"workers {', '.join(workers)}, neither {SECRET_FILE_ENV} nor {SECRET_ENV}. Make one, as by "
            "`openssl rand -hex 32 > secret; chmod 600 secret`, copy it to each host, and set "
            f"{SECRET_FILE_ENV}=secret for each process. `insitu start` needs none"
        )
    own = _share_file(paths.cluster_secret)
    return hmac.new(own, json.dumps(workers).encode(), hashlib.sha256).digest()


def _read_given(environ: Mapping[str, str]) -> bytes:
    """Return the user's own secret, or b"" without one."""
    name = SECRET_FILE_ENV if environ.get(SECRET_FILE_ENV) else SECRET_ENV
    value = environ.get(name)
    if not value:
        return b""
    try:
        secret = Path(value).expanduser().read_bytes().strip() if name == SECRET_FILE_ENV else value.encode()
    except OSError as error:
        raise InputError(f"{name} must name a file that can be read. Received: {value} ({error})") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise InputError(
            f"{name} must give at least {MIN_SECRET_BYTES} bytes. Received: {len(secret)}. Make a secret by "
            "`openssl rand -hex 32`"
        )
    return secret


def _share_file(path: Path) -> bytes:
    """Return the content of the user's own secret file, which is made where it isn't there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(os.urandom(_MADE_SECRET_BYTES))
            if not path.exists():
                os.link(staged, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            staged.unlink(missing_ok=True)
        found = path.stat()
        secret = path.read_bytes()
    except OSError as error:
        raise InputError(f"The file {path} must be this user's own. Received: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(secret) < MIN_SECRET_BYTES:
        raise InputError(
            f"The file {path} must be this user's own, readable by nobody else, of {MIN_SECRET_BYTES} "
            f"bytes or more. Received: owner {found.st_uid}, mode {found.st_mode & 0o777:o}, {len(secret)} "
            "bytes. Remove it: the next process makes it again"
        )
    return secret
