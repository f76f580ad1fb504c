"""Opens the store that a setting names."""

from __future__ import annotations

from pathlib import Path

from insitu.base.errors import InputError
from insitu.metadata.interface import MetadataStore


def open_store(url: str | Path, cluster: str, *, create: bool = False) -> MetadataStore:
    """Return the store of metadata of `cluster`: the path of a file, or the URL of an etcd.

    `create`: it may be a new one. Otherwise what isn't there raises InputError, so what was lost doesn't look
    like an empty cluster.
    """
    if isinstance(url, str) and url.startswith("etcd:"):
        from insitu.metadata.etcd import EtcdStore
        from insitu.metadata.etcd_address import parse_etcd_url

        return EtcdStore(parse_etcd_url(url), cluster, create=create)
    if "://" in str(url):
        raise InputError(f"Metadata is in a file, or in etcd://HOST:PORT,... Received: {url!r}")
    from insitu.metadata.embedded import EmbeddedStore

    return EmbeddedStore(Path(url), cluster, create=create)
