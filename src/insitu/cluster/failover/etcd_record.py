"""A home's record of its member of an etcd that insitu runs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from insitu.base.disk.access import PRIVATE_FILE, make_folder
from insitu.base.disk.durable import replace_file
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cluster.wire import is_own_folder

CA, CERTIFICATE, KEY = "ca.pem", "member.pem", "member.key"
MEMBER, LOCK, LOG, DATA = "member.json", "lock", "log", "data"
"""Files in the folder of a member, and the folder of etcd itself."""


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A home's record of its member."""

    #: Its name, drawn once.
    name: str
    #: Its address for clients, as host:port.
    client: str
    #: Its address for other members, as host:port.
    peer: str
    #: The cluster of insitu; empty: it was never started.
    cluster: str = ""
    #: All members, as etcd's --initial-cluster has them.
    peers: str = ""


def read_member(paths: Paths) -> MemberRecord | None:
    """Return the record of this home's member; None: it has none. Raises InputError for one of others."""
    try:
        data = paths.etcd_file(MEMBER).read_bytes()
    except FileNotFoundError:
        return None
    if not is_own_folder(paths.etcd):
        raise InputError(
            f"The folder of a member of etcd is of the user who runs it. Received: {paths.etcd}, where "
            f"others may write. Remove it"
        )
    try:
        return MemberRecord(**json.loads(data))
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{paths.etcd_file(MEMBER)} must say which member of etcd this home has. Received: what can't be "
            f"read ({error}). If no other one is lost, replace it by `etcdctl member remove` and `add`"
        ) from error


def write_member(paths: Paths, record: MemberRecord) -> None:
    make_folder(paths.home, paths.etcd)
    os.chmod(paths.etcd, 0o700)
    data = json.dumps(asdict(record)).encode()
    replace_file(paths.etcd_file(MEMBER), data, sync=True, mode=PRIVATE_FILE)


def list_environment() -> dict[str, str]:
    """Return the environment of etcd, without the variables by which others configure an etcd of theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
