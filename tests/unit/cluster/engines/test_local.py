"""What the local engine says of nodes; `tests/process/test_jobs_engine.py` has the rest."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from insitu.cluster.engines.local import LocalEngine
from insitu.paths import Paths
from insitu.spec import NodeId

NODE, LOST = NodeId("node-0"), NodeId("node-1")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path)


@pytest.fixture
def engine(paths: Paths) -> Iterator[LocalEngine]:
    made = LocalEngine(paths.job("digits-1"))
    yield made
    made.close()


def have_stores(engine: LocalEngine) -> list[bool]:
    return [state.has_store for state in engine.node_states([NODE, LOST]).values()]


def test_a_node_whose_folder_is_gone_has_lost_its_store(engine: LocalEngine, paths: Paths) -> None:
    assert have_stores(engine) == [True, True]
    paths.node(NODE).mkdir(parents=True)
    assert have_stores(engine) == [True, False]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_node_whose_folder_cannot_be_looked_at_has_not_lost_its_store(
    engine: LocalEngine, paths: Paths, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    paths.node(NODE).mkdir(parents=True)
    stat = Path.stat

    def failing(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if path == paths.node(NODE):
            raise OSError(code, os.strerror(code))
        return stat(path, follow_symlinks=follow_symlinks)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", failing)
        assert have_stores(engine) == [True, False]
