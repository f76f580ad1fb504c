"""The certificate of an agent stays the same, and is its own alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.nodes.agent import take_certificate

NODE = NodeId("a")


@pytest.fixture
def paths(home: Path) -> Paths:
    paths = Paths(home)
    paths.node(NODE).mkdir(parents=True)
    return paths


def test_it_is_the_same_next_time(paths: Paths) -> None:
    made = take_certificate(paths, NODE)
    assert take_certificate(paths, NODE) == made and made.key_pem.startswith("-----BEGIN EC PRIVATE KEY")
    assert stat.S_IMODE(paths.agent_certificate(NODE).stat().st_mode) == 0o600


def test_one_whose_key_others_may_read_or_that_is_damaged_is_made_again(paths: Paths) -> None:
    path = paths.agent_certificate(NODE)
    made = take_certificate(paths, NODE)
    path.chmod(0o644)
    second = take_certificate(paths, NODE)
    assert second.pem != made.pem and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(f"{made.pem}{second.key_pem}")
    third = take_certificate(paths, NODE)
    assert third.pem not in (made.pem, second.pem)
    for text in ("", "text", third.pem):
        path.write_text(text)
        assert take_certificate(paths, NODE).pem != third.pem
    path.unlink()
    path.symlink_to("/etc/hostname")
    take_certificate(paths, NODE)
    assert not path.is_symlink()
