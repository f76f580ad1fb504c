"""Scrubs: what has decayed is named by partition, node and block, and repaired."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from insitu.base.paths import Paths
from insitu.base.spec import CacheSpec
from insitu.grid import Catalog, bring_up, import_cache, scrub_cache
from insitu.grid.partitions import Partition
from insitu.grid.replicas.scrubbing import Pace


@pytest.fixture(params=[None, "lz4", "zstd"])
def cache(paths: Paths, tmp_path: Path, request: pytest.FixtureRequest) -> CacheSpec:
    """A cache of two partitions, each with several blocks and a backup."""
    bring_up(paths, 2)
    np.save(tmp_path / "a.npy", np.arange(400_000).reshape(-1, 2))
    import_cache(paths, "a", [str(tmp_path / "a.npy")], partitions=2, backups=1, compress=request.param)
    found = Catalog(paths).get("a")
    assert found.block_rows and found.partitions[0].rows > found.block_rows
    return found


def damage_block(path: Path, cache: CacheSpec, block: int) -> None:
    info = cache.partitions[0]
    place = Partition.of_cache(path, cache, info).places[block]
    with path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]))
        file.write(b"damage")


def test_a_good_cache_is_read_whole(paths: Paths, cache: CacheSpec) -> None:
    read: list[int] = []
    checks = scrub_cache(paths, cache, on_read=read.append)
    found = [(check.partition, check.problem) for check in checks]
    assert found == [(0, None), (0, None), (1, None), (1, None)]
    assert sum(read) == sum(2 * info.bytes for info in cache.partitions)


def test_partition_node_and_block_are_named(paths: Paths, cache: CacheSpec) -> None:
    path = paths.partition("node-1", "a", 1, 0)
    damage_block(path, cache, 1)
    (damaged,) = [check for check in scrub_cache(paths, cache) if check.problem is not None]
    assert (damaged.partition, damaged.node, damaged.blocks, damaged.repaired) == (0, "node-1", (1,), False)
    assert str(path) in str(damaged.problem) and "damaged are 1" in str(damaged.problem)


def test_a_damaged_copy_is_repaired_from_the_other(paths: Paths, cache: CacheSpec) -> None:
    path, other = (paths.partition(node, "a", 1, 0) for node in ("node-0", "node-1"))
    whole = other.read_bytes()
    damage_block(path, cache, 0)
    assert [check.repaired for check in scrub_cache(paths, cache, repair=True)] == [True, False, False, False]
    assert path.read_bytes() == whole and path.stat().st_mode == other.stat().st_mode
    assert not any(check.problem for check in scrub_cache(paths, cache))
    assert {entry.name for entry in path.parent.iterdir() if "part-" in entry.name} >= {path.name}
    path.unlink()
    assert scrub_cache(paths, cache, repair=True)[0].repaired and path.read_bytes() == whole


def test_a_file_cut_short_or_with_a_bad_footer_has_no_block_to_name(paths: Paths, cache: CacheSpec) -> None:
    short, footer = (paths.partition(node, "a", 1, 0) for node in ("node-0", "node-1"))
    short.write_bytes(short.read_bytes()[:-1])
    data = bytearray(footer.read_bytes())
    data[-5] ^= 1
    footer.write_bytes(data)
    found = scrub_cache(paths, cache, repair=True)
    assert [check.blocks for check in found] == [()] * 4
    assert "bytes, expected" in str(found[0].problem) and "its checksum is" in str(found[1].problem)
    assert not any(check.repaired for check in found), "there is no good copy"


def test_a_pace_waits_for_what_was_read_too_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [0.0], []
    monkeypatch.setattr("insitu.grid.replicas.scrubbing.time.monotonic", lambda: now[0])
    monkeypatch.setattr("insitu.grid.replicas.scrubbing.time.sleep", waits.append)
    pace = Pace(100.0)
    pace(50)
    now[0] = 2.0
    pace(50)
    assert waits == [0.5, 0.0]
