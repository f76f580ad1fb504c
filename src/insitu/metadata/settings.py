"""Which etcd holds the metadata of a home's cluster, with what it takes to reach it: a file of mode 0600.

The head has it from `insitu up --metadata`, an agent from its head. A home without it has the embedded store.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file
from insitu.base.disk.guarded_paths import read_guarded
from insitu.base.errors import CorruptMetadata, InputError
from insitu.base.paths import Paths
from insitu.metadata.interface import MetadataStore


@dataclass(frozen=True, slots=True)
class MetadataSettings:
    """The etcd of a cluster."""

    #: The cluster, under whose name its keys are stored in etcd.
    cluster: str
    #: The URL, which holds no secrets.
    url: str
    #: Contents of the files that the URL names, by its options.
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: The members that insitu runs itself, as etcd's --initial-cluster has them; empty: others run it.
    peers: str = ""


def parse_settings(data: Any) -> MetadataSettings:
    """Return the settings that a file or the head has. Raises ValueError."""
    try:
        settings = MetadataSettings(**data)
        texts = (settings.cluster, settings.url, settings.peers, *settings.files, *settings.files.values())
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    if not all(isinstance(text, str) for text in texts) or not settings.url.startswith("etcd:"):
        raise ValueError("they name no etcd")
    return settings


def read_settings(paths: Paths) -> MetadataSettings | None:
    """Return the settings of a home; None: its metadata isn't in etcd. Raises CorruptMetadata, InputError."""
    try:
        return parse_settings(json.loads(read_guarded(paths.home, paths.metadata_settings)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CorruptMetadata(
            f"{paths.metadata_settings} must say which etcd holds the metadata. Received: what can't be read "
            f"({error}). Copy it from another host of the cluster, with mode 0600"
        ) from error


def write_settings(paths: Paths, settings: MetadataSettings) -> None:
    """Keep the settings for processes of this home. Raises OSError."""
    data = json.dumps(encode_settings(settings)).encode()
    replace_file(paths.metadata_settings, data, sync=True, mode=PRIVATE_FILE)


def encode_settings(settings: MetadataSettings) -> dict[str, Any]:
    """Return the settings as messages have them."""
    return asdict(settings)


def read_url(url: str, cluster: str) -> MetadataSettings:
    """Return the settings that a user gives by a URL. Raises InputError."""
    from insitu.metadata.etcd_address import hide_login, read_etcd_files

    if not url.startswith("etcd:"):
        raise InputError(
            f"--metadata names an etcd as etcd://HOST:PORT,..., or is etcd for one that insitu starts. "
            f"Received: {hide_login(url)!r}. Leave it out, and the head keeps metadata in its home"
        )
    return MetadataSettings(cluster, url, read_etcd_files(url))


def open_etcd(settings: MetadataSettings, *, create: bool = False) -> MetadataStore:
    """Return the store in etcd. `create`: it may be a new one, in an etcd without other clusters. Raises
    InputError, MetadataError."""
    from insitu.metadata.etcd import EtcdStore
    from insitu.metadata.etcd_address import make_etcd_address

    address = make_etcd_address(settings.url, settings.files)
    return EtcdStore(address, settings.cluster, create=create, alone=True)


def drop_etcd(settings: MetadataSettings) -> None:
    """Remove all that etcd holds of a cluster, which has ended. Raises InputError, MetadataError."""
    from insitu.metadata.etcd import EtcdStore
    from insitu.metadata.etcd_address import make_etcd_address

    with contextlib.closing(
        EtcdStore(make_etcd_address(settings.url, settings.files), settings.cluster)
    ) as store:
        store.drop()
