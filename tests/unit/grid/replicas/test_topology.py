"""Bringing nodes up and down without losing what they hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from insitu.base.errors import GridError, InputError
from insitu.base.paths import Paths
from insitu.grid import Catalog, bring_up, import_cache, load_topology, take_down


@pytest.fixture
def source(tmp_path: Path) -> str:
    np.save(tmp_path / "a.npy", np.arange(100))
    return str(tmp_path / "a.npy")


def test_there_is_one_node_without_any_up(paths: Paths) -> None:
    assert load_topology(paths).nodes == ("node-0",)


def test_up_and_down(paths: Paths) -> None:
    assert bring_up(paths, 3).nodes == ("node-0", "node-1", "node-2") == load_topology(paths).nodes
    assert all(paths.node(node).is_dir() for node in load_topology(paths).nodes)
    assert bring_up(paths, 2).nodes == ("node-0", "node-1")
    take_down(paths)
    assert load_topology(paths).nodes == ("node-0",) and not paths.nodes.exists()


@pytest.mark.parametrize("nodes", [0, -1, 10_000])
def test_bad_numbers_are_refused(nodes: int, paths: Paths) -> None:
    with pytest.raises(InputError, match="--nodes must be in"):
        bring_up(paths, nodes)


def test_nodes_with_rows_are_not_left_out(paths: Paths, source: str) -> None:
    bring_up(paths, 3)
    import_cache(paths, "a", [source])
    with pytest.raises(InputError, match="leave out node-2, which holds partitions of a"):
        bring_up(paths, 2)
    assert bring_up(paths, 5) == load_topology(paths)
    assert {p.owners[0] for p in Catalog(paths).get("a").partitions} == {"node-0", "node-1", "node-2"}


def test_down_keeps_caches_unless_forced(paths: Paths, source: str) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [source])
    Catalog(paths).pin("a", 1, "job-1")
    with pytest.raises(InputError, match=r"1 cache.*a, in use by job-1.*--force"):
        take_down(paths)
    take_down(paths, force=True)
    assert Catalog(paths).stored() == [] and Catalog(paths).pinned_by("a") == []
    assert not paths.nodes.exists()
    assert import_cache(paths, "a", [source])[0].version == 1


def test_a_damaged_list_of_nodes_is_named(paths: Paths) -> None:
    bring_up(paths, 2)
    for text in ("{", "[]", '{"nodes": []}'):
        paths.topology.write_text(text)
        with pytest.raises(GridError, match=r"topology\.json can't be read"):
            load_topology(paths)
