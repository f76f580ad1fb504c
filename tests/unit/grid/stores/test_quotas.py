"""What stores hold, and what they may hold."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from partition_servers import SECRET, certificate

from insitu.base.errors import StorageFull
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.grid import Catalog, bring_up, import_cache, measure_store, scrub_cache, set_quotas
from insitu.grid.serving import PartitionServer
from insitu.grid.stores.quotas import check_quota
from insitu.grid.transfer import fetch_partition

NODE, OTHER = NodeId("node-0"), NodeId("node-1")


def save(folder: Path, name: str, rows: int) -> str:
    np.save(folder / f"{name}.npy", np.arange(rows))
    return str(folder / f"{name}.npy")


def test_without_a_quota_anything_may_come(paths: Paths, tmp_path: Path) -> None:
    room = measure_store(paths, NODE)
    assert (room.quota, room.used, room.free) == (None, 0, None)
    check_quota(paths, NODE, 10**18)


def test_files_that_versions_share_count_once(paths: Paths, tmp_path: Path) -> None:
    (old,) = import_cache(paths, "a", [save(tmp_path, "old", 100_000)])
    Catalog(paths).pin("a", 1, "job")
    before = measure_store(paths, NODE).used
    assert old.bytes < before < 1.05 * old.bytes
    (new,) = import_cache(paths, "a", [save(tmp_path, "new", 1000)], append=True)
    assert measure_store(paths, NODE).used - before < 1.5 * (new.bytes - old.bytes) + 20_000


def test_an_import_that_is_too_large_is_refused_before_it_begins(paths: Paths, tmp_path: Path) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [save(tmp_path, "a", 1000)])
    set_quotas(paths, [OTHER], quota=100_000)
    used = measure_store(paths, OTHER).used
    set_quotas(paths, [OTHER], quota=used + 100_000)
    source = save(tmp_path, "large", 100_000)
    # The files of the settings themselves may have gained or lost a digit.
    received = r"Received: about \d+ more, where (?:99|100)\d{3} are free"
    words = rf"store of node-1: its quota is {used + 100_000} bytes. {received}"
    with pytest.raises(StorageFull, match=rf"{words}.*insitu delete CACHE.*insitu quota node-1 SIZE"):
        import_cache(paths, "b", [source], partitions=4)
    assert not list(paths.staging.iterdir()) and abs(measure_store(paths, OTHER).used - used) < 100
    with pytest.raises(StorageFull):
        import_cache(paths, "a", [source], partitions=4, append=True)
    set_quotas(paths, [OTHER], quota=used + 500_000)
    with pytest.raises(StorageFull):
        import_cache(paths, "b", [source], partitions=4, backups=1)
    import_cache(paths, "b", [source], partitions=4)


def test_an_import_whose_size_is_a_guess_stops_while_it_writes(
    paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess counts half, since it may be wrong."""
    path = tmp_path / "a.csv"
    rows = 600_000  # many times what waits in buffers
    path.write_text("t\n" + f"{'x' * 99}\n" * rows)
    set_quotas(paths, [NODE], quota=36_000_000)
    monkeypatch.setattr("insitu.grid.stores.quotas.WATCH_BYTES", 1)
    done: list[int] = []
    with pytest.raises(StorageFull, match=r"its quota is 36000000 bytes. Received: .* more than that"):
        import_cache(paths, "a", [str(path)], partitions=2, progress=lambda rows, *_: done.append(rows))
    assert done[-1] < rows
    assert Catalog(paths).find("a") is None and not list(paths.staging.iterdir())
    monkeypatch.setattr("insitu.grid.stores.quotas.WATCH_BYTES", 1 << 60)
    with pytest.raises(StorageFull, match="more than that"):
        import_cache(paths, "a", [str(path)], partitions=2)
    assert Catalog(paths).find("a") is None and measure_store(paths, NODE).used < 1000


def test_below_what_is_there_nothing_is_removed_and_nothing_comes_in(paths: Paths, tmp_path: Path) -> None:
    (cache,) = import_cache(paths, "a", [save(tmp_path, "a", 100_000)])
    set_quotas(paths, [NODE], quota=1000)
    room = measure_store(paths, NODE)
    assert room.free == 1000 - room.used and room.used > cache.bytes
    with pytest.raises(
        StorageFull, match=rf"quota is 1000 bytes. Received: {room.used - 1000} more than that"
    ):
        import_cache(paths, "b", [save(tmp_path, "b", 10)])
    assert not any(check.problem for check in scrub_cache(paths, cache))
    set_quotas(paths, [NODE], quota=None)
    import_cache(paths, "b", [save(tmp_path, "b", 10)])


def test_copies_from_other_nodes_respect_it(paths: Paths, tmp_path: Path) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [save(tmp_path, "a", 1000)], partitions=2)
    cache = Catalog(paths).get("a")
    set_quotas(paths, [OTHER], quota=measure_store(paths, OTHER).used + 100)
    server = PartitionServer(paths, NODE, SECRET, certificate())
    try:
        with pytest.raises(StorageFull, match="store of node-1"):
            fetch_partition(paths, OTHER, cache, 0, [server.address], SECRET)
        assert not paths.partial(OTHER, "a", 1, 0).exists()
        set_quotas(paths, [OTHER], quota=None)
        fetch_partition(paths, OTHER, cache, 0, [server.address], SECRET)
    finally:
        server.stop()


def test_a_scrub_puts_no_copy_where_there_is_no_room(paths: Paths, tmp_path: Path) -> None:
    bring_up(paths, 2)
    (cache,) = import_cache(paths, "a", [save(tmp_path, "a", 100_000)], partitions=1, backups=1)
    lost = paths.partition(OTHER, "a", 1, 0)
    lost.unlink()
    set_quotas(paths, [OTHER], quota=10_000)
    with pytest.raises(StorageFull, match="store of node-1"):
        scrub_cache(paths, cache, repair=True)
    assert not lost.exists()
    set_quotas(paths, [OTHER], quota=cache.bytes + 10_000)
    assert any(check.repaired for check in scrub_cache(paths, cache, repair=True)) and lost.exists()
    lost.write_bytes(lost.read_bytes()[:-1])
    assert any(check.repaired for check in scrub_cache(paths, cache, repair=True)), (
        "it takes the old one's room"
    )


def test_what_an_interrupted_import_keeps_counts(paths: Paths, tmp_path: Path) -> None:
    staged = paths.staged("a", "1-x").partition("node-0", 0)
    staged.parent.mkdir(parents=True)
    staged.write_bytes(bytes(500))
    assert measure_store(paths, NODE).used == 500 and measure_store(paths, OTHER).used == 0


def test_settings_lie_in_the_store(paths: Paths) -> None:
    set_quotas(paths, [NODE], quota=5)
    state = json.loads(json.loads(paths.store_settings("node-0").read_text())["state"])
    assert state == {"format": 1, "quota": 5, "file_memory": None}
