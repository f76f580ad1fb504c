"""The stores that the conformance suite runs on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_servers import ETCD, Etcd, needs_etcd

from insitu.metadata import MetadataStore, open_store


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for all tests."""
    if ETCD is None:
        pytest.skip("no etcd: install Debian's etcd-server, or name a binary by ETCD")
    server = Etcd(tmp_path_factory.mktemp("etcd")).wait()
    yield server
    server.close()


@pytest.fixture(params=["embedded", pytest.param("etcd", marks=needs_etcd)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """What `open_store` takes."""
    if request.param == "embedded":
        return str(tmp_path / "metadata.sqlite")
    return str(request.getfixturevalue("etcd").url)


@pytest.fixture
def cluster() -> str:
    return secrets.token_hex(4)


@pytest.fixture
def store(url: str, cluster: str) -> Iterator[MetadataStore]:
    made = open_store(url, cluster, create=True)
    yield made
    made.close()
