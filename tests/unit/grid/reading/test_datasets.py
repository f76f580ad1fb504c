"""What a script iterates: every row once an epoch, in shards that stay, in an order that is pure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from grid_jobs import ROWS, context, job_context, wait_for_repairs, write_own_map
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.context import Context
from insitu.base.errors import CorruptPartition, InputError, UnknownCache
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.grid import Catalog, Dataset, bring_up, dataset, import_cache
from insitu.grid.partitions import Partition
from insitu.grid.reading.reads import READS
from insitu.grid.reading.structure import ArraySpec


def ids(ds: Dataset, shard: int, epoch: int, start: int = 0) -> list[list[int]]:
    return [b.data.tolist() if b.rows else [] for b in ds.shard_batches(shard, epoch, start)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shards=st.integers(1, 8), size=st.integers(1, 300), shuffle=st.booleans(), epoch=st.integers(0, 3))
def test_every_row_once_an_epoch(
    paths: Paths, source: Path, shards: int, size: int, shuffle: bool, epoch: int
) -> None:
    if Catalog(paths).find("a") is None:
        import_cache(paths, "a", [str(source)], partitions=6)
    ds = dataset("a", features="id", label=None, context=context(paths, num_shards=shards))
    ds = ds.shuffle(5) if shuffle else ds
    if size < shards:
        with pytest.raises(InputError, match="at least one row per shard"):
            ds.batch(size)
        return
    ds = ds.batch(size)
    batches = [list(ds.shard_batches(s, epoch)) for s in range(shards)]
    assert {len(b) for b in batches} == {ds.num_steps} == {len(ds)}
    seen = np.concatenate([b.data for shard in batches for b in shard if b.rows])
    assert sorted(seen.tolist()) == list(range(ROWS))
    for s, shard in enumerate(batches):
        rows = [b.rows for b in shard]
        assert sum(rows) == ds.rows_of_shard(s) and rows == sorted(rows, reverse=True)
        own = size // shards + (s < size % shards)
        assert all(r == own for r in rows[: ds.rows_of_shard(s) // own])


def test_a_task_may_iterate_the_rows_of_all_shards(paths: Paths, cache: str) -> None:
    own = dataset(cache, features="id", label=None, context=context(paths, num_shards=3, shards=(1,)))
    even = own.filter(lambda id: id % 2 == 0).batch(64).map(lambda id: id // 2)
    everything = even.all_shards()
    assert (own.shards, even.shards, everything.shards) == ((1,), (1,), (0, 1, 2))
    assert sorted(np.concatenate(list(everything))) == list(range(ROWS // 2))
    assert len(np.concatenate(list(even))) < ROWS // 2


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_the_number_of_a_row_is_the_same_for_each_reader(
    paths: Paths, source: Path, compress: str | None
) -> None:
    import_cache(paths, "a", [str(source)], partitions=6, compress=compress)
    (of_number,) = [b.tolist() for b in dataset("a", features="id", label=None, paths=paths).batch(ROWS)]

    def check(batch: Any) -> int:
        assert batch["id"].tolist() == [of_number[row] for row in batch["row"]]
        return len(batch["row"])

    for shards in (1, 3):
        here = context(paths, num_shards=shards, shards=tuple(range(shards)))
        ds = dataset("a", features=["row", "id"], label=None, context=here)
        odd = ds.filter(lambda batch: batch["row"] % 2 == 1)
        for rows, count in (
            (ds, ROWS),
            (ds.shuffle(1), ROWS),
            (ds.shuffle(1, exact=False, window_bytes=1), ROWS),
            (odd, ROWS // 2),
            (odd.shuffle(1), ROWS // 2),
            (ds.take(50), 50),
        ):
            assert sum(map(check, rows.batch(64))) == count
        assert check(ds.sample(20)) == 20
        assert ds.batch(64).element_spec["row"].dtype == "int64"
    numbers = dataset("a", features="row", label=None, paths=paths).shuffle(1).batch(64)
    assert sorted(np.concatenate(list(numbers))) == list(range(ROWS))


@pytest.mark.parametrize("shuffle", [False, True])
def test_origins_say_where_each_row_lies(shuffle: bool, paths: Paths, cache: str) -> None:
    spec = Catalog(paths).get(cache)
    files = [
        Partition(paths.partition("node-0", "a", 1, p.index), spec.columns, p.rows, spec.block_rows)
        for p in spec.partitions
    ]
    ds = dataset(cache, context=context(paths, num_shards=2))
    ds = (ds.shuffle() if shuffle else ds).batch(64)
    for shard in range(2):
        for batch in ds.shard_batches(shard, 1):
            if not batch.rows:
                assert batch.data is None and batch.origins == ()
                continue
            features, label = batch.data
            assert set(features) == {"x", "id", "name"}
            for name, got in {**features, "label": label}.items():
                expected = [files[p].values[name].slice(0, files[p].rows)[rows] for p, rows in batch.origins]
                np.testing.assert_array_equal(got, np.concatenate(expected))
            assert {p for p, _ in batch.origins} <= set(ds.shard_map.shards[shard])
            assert all(rows.dtype == np.int64 for _, rows in batch.origins)


def test_the_order_depends_on_seed_epoch_and_shard_alone(paths: Paths, cache: str) -> None:
    def order(shuffle_seed: int | None, epoch: int, **more: Any) -> list[list[int]]:
        ds = dataset(cache, features="id", label=None, context=context(paths, num_shards=2, **more))
        return ids(ds.shuffle(shuffle_seed).batch(50), 0, epoch)

    assert order(1, 0) == order(1, 0) == order(None, 0, seed=1) == order(1, 0, shards=(1,))
    assert order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0)


def test_a_shard_goes_on_from_any_step(paths: Paths, cache: str) -> None:
    ds = dataset(cache, features="id", label=None, context=context(paths, num_shards=3)).shuffle(1).batch(30)
    for shard in range(3):
        whole = ids(ds, shard, 2)
        for start in (0, 1, ds.num_steps - 1, ds.num_steps, ds.num_steps + 5):
            assert ids(ds, shard, 2, start) == whole[start:]


def test_iterating_gives_one_epoch_after_another(paths: Paths, cache: str) -> None:
    ds = dataset(cache, features="id", label=None, context=context(paths)).shuffle(3).batch(100)
    assert [b.tolist() for b in ds] == ids(ds, 0, 0)
    assert [b.tolist() for b in ds] == ids(ds, 0, 1)
    assert [b.tolist() for b in ds.map(lambda x: x)] == ids(ds, 0, 0)


def test_a_task_with_two_shards_gets_them_joined(paths: Paths, cache: str) -> None:
    ds = dataset(cache, context=context(paths, (0, 2), 3)).batch(90)
    zero, two = list(ds.shard_batches(0, 0)), list(ds.shard_batches(2, 0))
    steps = list(ds)
    assert len(steps) == sum(bool(a.rows or b.rows) for a, b in zip(zero, two, strict=True))
    features, label = steps[0]
    np.testing.assert_array_equal(features["x"], np.concatenate([zero[0].data[0]["x"], two[0].data[0]["x"]]))
    np.testing.assert_array_equal(label, np.concatenate([zero[0].data[1], two[0].data[1]]))
    assert sum(len(label) for _, label in steps) == ds.rows_of_shard(0) + ds.rows_of_shard(2)


def test_a_task_without_shards_gets_nothing_unless_it_asks(paths: Paths, cache: str) -> None:
    without = context(paths, (), 2)
    assert list(dataset(cache, context=without).batch(10)) == []
    every = dataset(cache, features="id", label=None, context=without, shards=range(2)).batch(10)
    assert sorted(i for b in every for i in b.tolist()) == list(range(ROWS))


def test_an_evaluator_has_all_rows_in_one_shard(paths: Paths, cache: str) -> None:
    here = context(paths, (), 2, task=TaskId("evaluator", 0))
    ds = dataset(cache, features="id", label=None, context=here).batch(10)
    assert sorted(i for b in ds.shard_batches(0, 0) for i in b.data.tolist()) == list(range(ROWS))
    assert sorted(i for b in ds for i in b.tolist()) == list(range(ROWS))


def test_features_and_label(paths: Paths, cache: str) -> None:
    def spec(**options: Any) -> Any:
        return dataset(cache, context=context(paths), **options).element_spec

    x, label = ArraySpec((None, 3, 2), np.dtype(np.uint8)), ArraySpec((None,), np.dtype(np.int32))
    number, text = ArraySpec((None,), np.dtype(np.int64)), ArraySpec((None,), np.dtype(object))
    assert spec() == ({"x": x, "id": number, "name": text}, label)
    assert spec(features="x") == (x, label) == spec(features=["x"])
    assert spec(features="x", label=None) == x and spec(features="x", label="id") == (x, number)
    assert spec(features=("id", "x")) == ({"id": number, "x": x}, label)
    assert spec(label=None) == {"x": x, "id": number, "name": text, "label": label}


def test_a_cache_without_label_has_features_alone(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "b.npy", np.zeros((5, 2)))
    import_cache(paths, "b", [str(tmp_path / "b.npy")])
    (batch,) = dataset("b", context=context(paths)).batch(5)
    assert isinstance(batch, np.ndarray) and batch.shape == (5, 2)


def test_maps_compose_on_whole_batches(paths: Paths, cache: str) -> None:
    calls = []

    def scale(x: Any, y: Any) -> Any:
        calls.append(len(x))
        return x.astype("float32") / 255, y

    ds = dataset(cache, features="x", context=context(paths)).map(scale).batch(64)
    weighted = ds.map(lambda x, y: (x, y, np.ones(len(y), "float32")))
    assert weighted.element_spec == (
        ArraySpec((None, 3, 2), np.dtype(np.float32)),
        ArraySpec((None,), np.dtype(np.int32)),
        ArraySpec((None,), np.dtype(np.float32)),
    )
    assert calls == [2] and weighted.element_spec and calls == [2]
    x, y, w = next(iter(weighted))
    assert x.max() <= 1 and len(x) == len(y) == len(w) == 64 and calls == [2, 64]


@pytest.mark.parametrize("fn", [lambda x, y: (x[:-1], y), lambda x, y: (x, y.sum())])
def test_a_map_that_changes_the_number_of_rows_is_refused(fn: Any, paths: Paths, cache: str) -> None:
    ds = dataset(cache, features="x", context=context(paths)).map(fn).batch(64)
    with pytest.raises(InputError, match=r"one entry per row.*<lambda>"):
        next(iter(ds))


def test_a_version_that_goes_while_it_is_read_is_told(paths: Paths, cache: str, source: Path) -> None:
    ds = dataset(cache, context=context(paths)).batch(64)
    import_cache(paths, "a", [str(source)], overwrite=True)
    with pytest.raises(UnknownCache, match="Version 1 of cache a was replaced"):
        next(iter(ds))


def test_unshuffled_batches_are_views_of_the_file(paths: Paths, cache: str) -> None:
    ds = dataset(cache, features="x", label=None, context=context(paths)).batch(10)
    views = [b for b in ds.shard_batches(0, 0) if not b.data.flags.owndata]
    assert len(views) >= len(ds) - 6 and not any(b.data.flags.writeable for b in views)
    assert all(b.data.flags.writeable for b in ds.shuffle().shard_batches(0, 0))


def test_mistakes_are_told(paths: Paths, cache: str) -> None:
    alone = context(paths)
    with pytest.raises(UnknownCache, match="Did you mean a"):
        dataset("aa", context=alone)
    with pytest.raises(InputError, match=r"no column 'y'.*x, id, name, label"):
        dataset(cache, label="y", context=alone)
    with pytest.raises(InputError, match=r"must be columns out of .*Received: \['z'\]"):
        dataset(cache, features=["z"], context=alone)
    with pytest.raises(InputError, match="must be columns"):
        dataset(cache, features=[], context=alone)
    ds = dataset(cache, context=alone)
    with pytest.raises(InputError, match=r"isn't batched.*\.batch\(global size\)"):
        next(iter(ds))
    with pytest.raises(InputError, match="isn't batched"):
        len(ds)
    for size in (0, -1, 2.5, True):
        with pytest.raises(InputError):
            ds.batch(size)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="seed"):
        ds.shuffle(-1)
    with pytest.raises(InputError, match="function"):
        ds.map(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="A shard is in"):
        ds.batch(5).shard_batches(1, 0)
    with pytest.raises(InputError, match="count from 0"):
        ds.batch(5).shard_batches(0, -1)
    with pytest.raises(InputError, match="Shards are in"):
        dataset(cache, context=alone, shards=[3])


def test_its_repr_tells_what_it_is(paths: Paths, cache: str) -> None:
    ds = dataset(cache, features="x", context=context(paths, (0,), 2)).shuffle(7).batch(32).map(max)
    text = repr(ds)
    for part in ("'a'", "shuffle(7)", "batch(32)", "map(max)", "x: uint8[3, 2]", "1,000 rows in 2 shards"):
        assert part in text


def test_a_backup_on_the_own_node_is_read_rather_than_a_primary_elsewhere(paths: Paths, source: Path) -> None:
    bring_up(paths, 2)
    import_cache(paths, "a", [str(source)], partitions=2, backups=1)
    write_own_map(paths, ("node-0",), ((0, 1),))
    before = READS.reads
    for _ in dataset("a", features="x", context=job_context(paths)).batch(64):
        pass
    assert READS.reads.local_rows - before.local_rows == ROWS
    assert READS.reads.remote_rows == before.remote_rows


def test_outside_a_job_nothing_is_written(paths: Paths, cache: str) -> None:
    for _ in dataset(cache, context=context(paths)).batch(64):
        pass
    assert not paths.jobs.exists() and os.environ["INSITU_HOME"] == str(paths.home)


@pytest.fixture
def blocks(paths: Paths, source: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a cache with several blocks in each of its 3 partitions, on two nodes with a backup."""
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 0)
    bring_up(paths, 2)
    import_cache(paths, "blocks", [str(source)], partitions=3, backups=1)
    return "blocks"


@pytest.mark.parametrize("shards", [1, 2])
def test_windows_hold_each_row_once_in_an_order_that_can_be_entered_anywhere(
    shards: int, paths: Paths, blocks: str
) -> None:
    ds = dataset(blocks, context=context(paths, num_shards=shards)).shuffle(3, exact=False, window_bytes=9000)
    ds = ds.batch(50)
    assert "windows of 2 blocks" in repr(ds) and ds.cache.block_rows < 200
    seen: list[int] = []
    for shard in range(shards):
        for epoch in (0, 1):
            batches = list(ds.shard_batches(shard, epoch))
            for start in (1, 5):
                for left, right in zip(ds.shard_batches(shard, epoch, start), batches[start:], strict=True):
                    assert left.rows == right.rows
                    if left.rows:
                        np.testing.assert_array_equal(left.data[0]["x"], right.data[0]["x"])
            origins = [pair for batch in batches[:4] for pair in batch.origins]
            rows = sorted((k, row) for k, found in origins for row in found.tolist())
            found = ds.shard_origins(shard, epoch, 4)
            assert rows == sorted((k, row) for k, taken in found for row in taken.tolist())
        seen += [i for batch in batches if batch.rows for i in batch.data[0]["id"].tolist()]
        first = [batch.data[0]["id"].tolist() for batch in ds.shard_batches(shard, 0) if batch.rows]
        assert first != [batch.data[0]["id"].tolist() for batch in batches if batch.rows]
    assert sorted(seen) == list(range(ROWS))


def test_small_caches_are_shuffled_as_a_whole_and_large_ones_in_windows(
    paths: Paths, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(blocks, context=Context(paths=paths))
    assert "windows" not in repr(ds.shuffle(1))
    monkeypatch.setattr("insitu.grid.reading.datasets.EXACT_BYTES", 1000)
    assert "windows" in repr(ds.shuffle(1)) and "windows" not in repr(ds.shuffle(1, exact=True))
    with pytest.raises(InputError, match=r"window_bytes must be positive\. Received: 0"):
        ds.shuffle(1, exact=False, window_bytes=0)


def test_a_window_of_small_rows_is_limited_by_their_number(
    paths: Paths, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(blocks, context=Context(paths=paths))
    rows = ds.cache.block_rows
    monkeypatch.setattr("insitu.grid.reading.datasets.WINDOW_ROWS", 4 * rows + 1)
    assert "windows of 4 blocks" in repr(ds.shuffle(1, exact=False))
    assert "windows of 2 blocks" in repr(ds.shuffle(1, exact=False, window_bytes=9000))
    assert "windows of 4 blocks" not in repr(ds.shuffle(1, exact=False, window_bytes=1 << 20))
    monkeypatch.setattr("insitu.grid.reading.datasets.WINDOW_ROWS", 1)
    assert "windows of 1 block" in repr(ds.shuffle(1, exact=False))


def test_a_bad_block_is_read_from_a_backup(
    paths: Paths, blocks: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = Catalog(paths).get(blocks)
    info = spec.partitions[1]
    good = Partition(paths.partition(info.owners[0], blocks, 1, 1), spec.columns, info.rows, spec.block_rows)
    place = good.places[1]
    with good.path.open("r+b") as file:
        file.seek(int(place["offset"] + place["metadata_bytes"]) + 20)
        file.write(b"damage")
    ds = dataset(blocks, context=Context(paths=paths)).shuffle(3, exact=False).batch(100)
    seen = [i for features, _ in ds for i in features["id"].tolist()]
    assert sorted(seen) == list(range(ROWS))
    assert caplog.text.count("of its block 1 is damaged") == 1
    assert f"That on {info.owners[1]} is read instead" in caplog.text
    wait_for_repairs()
    for node in info.owners:
        with paths.partition(node, blocks, 1, 1).open("r+b") as file:
            file.seek(int(place["offset"] + place["metadata_bytes"]) + 20)
            file.write(b"damage")
    paths.partition(info.owners[1], blocks, 1, 1).unlink()
    ds = dataset(blocks, context=Context(paths=paths)).shuffle(3, exact=False).batch(100)
    with pytest.raises(CorruptPartition, match=r"block 1 is damaged.*can't be found"):
        list(ds)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mapped_file_that_was_cut_short_is_named_at_the_next_epoch(
    shuffle: bool, paths: Paths, blocks: str, caplog: pytest.LogCaptureFixture
) -> None:
    infos = Catalog(paths).get(blocks).partitions
    ds = dataset(blocks, features="id", label=None, context=Context(paths=paths))
    ds = ds.shuffle(3).batch(50) if shuffle else ds.batch(50)
    expected = [sorted(i for batch in ds.shard_batches(0, 0) for i in batch.data.tolist())]
    first, second = infos[1].owners
    os.truncate(paths.partition(first, blocks, 1, 1), 5000)
    expected.append(sorted(i for batch in ds.shard_batches(0, 1) for i in batch.data.tolist()))
    assert expected == [list(range(ROWS))] * 2 and f"That on {second} is read instead" in caplog.text
    wait_for_repairs()
    assert first != second
    os.truncate(paths.partition(first, blocks, 1, 1), 5000)
    paths.partition(second, blocks, 1, 1).write_bytes(b"ARROW1")
    with pytest.raises(CorruptPartition, match=r"None of the 2 copies.*it has 5000 bytes.*it has 6 bytes"):
        list(ds.shard_batches(0, 2))


def test_orders_of_many_rows_are_not_sorted(
    paths: Paths, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(blocks, features="id", label=None, context=context(paths, num_shards=2))
    sorted_orders = [[batch.data.tolist() for batch in ds.shuffle(3).batch(40).shard_batches(0, 0)]]
    monkeypatch.setattr("insitu.grid.layout.order.MOST_SORTED", 100)
    monkeypatch.setattr("insitu.grid.reading.datasets._ORIGIN_ROWS", 64)
    chosen = ds.filter(lambda ids: ids % 2 == 0).shuffle(3).batch(40)
    for chain, expected in ((ds.shuffle(3).batch(40), range(ROWS)), (chosen, range(0, ROWS, 2))):
        seen = []
        for shard in range(2):
            batches = [batch for batch in chain.shard_batches(shard, 0) if batch.rows]
            assert [b.data.tolist() for b in batches] not in sorted_orders
            seen += [i for batch in batches for i in batch.data.tolist()]
            rows = sorted((k, row) for b in batches[:3] for k, found in b.origins for row in found.tolist())
            found = chain.shard_origins(shard, 0, 3)
            assert rows == sorted((k, row) for k, taken in found for row in taken.tolist())
            later = chain.shard_batches(shard, 0, 2)
            assert next(later).data.tolist() == batches[2].data.tolist()
        assert sorted(seen) == list(expected)


@pytest.mark.parametrize("backup", [True, False])
@pytest.mark.parametrize("harm", ["damaged", "cut short", "unreadable"])
def test_harm_while_training_is_made_good_by_a_backup_or_named(
    harm: str, backup: bool, paths: Paths, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.grid.reading.cache_reader.memory_bytes", lambda: 0)  # direct reads
    spec = Catalog(paths).get(blocks)
    infos = spec.partitions
    paths_of = [paths.partition(info.owners[0], blocks, 1, info.index) for info in infos]
    places = Partition(paths_of[1], spec.columns, infos[1].rows, spec.block_rows).places
    ds = dataset(blocks, context=Context(paths=paths)).shuffle(3, exact=False, window_bytes=1).batch(20)
    batches = ds.shard_batches(0, 0)
    seen = next(batches).data[0]["id"].tolist()  # the files are open
    if not backup:
        paths.partition(infos[1].owners[1], blocks, 1, 1).unlink()
    if harm == "cut short":
        os.truncate(paths_of[1], int(places[1]["offset"]))
    elif harm == "damaged":
        with paths_of[1].open("r+b") as file:
            for place in places:
                file.seek(int(place["offset"] + place["metadata_bytes"]))
                file.write(b"damage")
    else:
        preadv, inode = os.preadv, paths_of[1].stat().st_ino

        def fail(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if descriptor < 0 or os.fstat(descriptor).st_ino == inode:
                raise OSError(5, "Input/output error")
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr("insitu.grid.partitions.block_reader.os.preadv", fail)
        monkeypatch.setattr(
            "insitu.grid.partitions.verification.file_checksum", lambda *rest: fail(-1, [], 0)
        )
    if backup:
        seen += [i for batch in batches for i in batch.data[0]["id"].tolist()]
        assert sorted(seen) == list(range(ROWS))
        return
    why = {"damaged": "damaged", "cut short": "ends within its block", "unreadable": "Input/output error"}
    with pytest.raises(CorruptPartition, match=rf"{infos[1].owners[0]}.*part-00001.*block \d.*") as caught:
        list(batches)
    assert why[harm] in str(caught.value)


def test_large_caches_are_read_in_order_in_windows_too(
    paths: Paths, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = dataset(blocks, context=Context(paths=paths)).batch(70)
    plain = list(ds.shard_batches(0, 0))
    monkeypatch.setattr("insitu.grid.reading.datasets.EXACT_BYTES", 1000)
    monkeypatch.setattr("insitu.grid.reading.datasets.WINDOW_BYTES", 9000)
    for start in (0, 6):
        found = list(ds.shard_batches(0, 0, start))
        for left, right in zip(found, plain[start:], strict=True):
            np.testing.assert_array_equal(left.data[0]["id"], right.data[0]["id"])
            assert left.data[0]["name"].tolist() == right.data[0]["name"].tolist()
            origins = [[(k, row) for k, rows in b.origins for row in rows.tolist()] for b in (left, right)]
            assert origins[0] == origins[1]


def test_a_sample_has_each_row_at_most_once_and_reads_little(paths: Paths, blocks: str) -> None:
    ds = dataset(blocks, context=context(paths, num_shards=2))
    features, label = ds.sample(30, seed=1)
    found = features["id"].tolist()
    assert len(set(found)) == 30 and (label == features["id"] % 10).all()
    assert features["name"].tolist() == [f"row {i}" for i in found]
    assert ds.sample(40, seed=1)[0]["id"].tolist()[:30] == found
    assert sorted(ds.sample(5000)[0]["id"].tolist()) == list(range(ROWS))
    kept = ds.filter(lambda features, label: label == 3).map(lambda features, label: features["id"])
    assert (kept.sample(7) % 10 == 3).all()
    with pytest.raises(InputError, match=r"1 or more\. Received: 0"):
        ds.sample(0)
    with pytest.raises(InputError, match=r"The seed of sample must be in .*Received: -1"):
        ds.sample(1, seed=-1)


def tokens_of(row: int) -> list[int]:
    return list(range(row, row + row % 5))


@pytest.fixture
def ragged(paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a cache with columns of lists, in several blocks in each of its 3 partitions."""
    monkeypatch.setattr("insitu.grid.intake.import_plan.BUFFER_BYTES", 0)
    tokens = pa.array([tokens_of(row) for row in range(ROWS)], pa.list_(pa.int32()))
    marks = pa.array([[row % 3 == 0] * (row % 2) for row in range(ROWS)])
    names = pa.array([f"row {row}" for row in range(ROWS)])
    table = pa.table({"tokens": tokens, "id": range(ROWS), "name": names, "marks": marks})
    pq.write_table(table, tmp_path / "lists.parquet", row_group_size=300)
    import_cache(paths, "lists", [str(tmp_path)], partitions=3, ragged=["tokens", "marks"])
    return "lists"


@pytest.mark.parametrize("order", ["as they are", "whole", "windows"])
def test_rows_may_be_lists_of_any_length(order: str, paths: Paths, ragged: str) -> None:
    ds = dataset(ragged, context=context(paths, num_shards=2))
    assert "tokens: int32[*]" in repr(ds) and ds.cache.block_rows < ROWS // 3
    if order != "as they are":
        ds = ds.shuffle(3, exact=order == "whole", window_bytes=9000)
    seen = []
    for shard in range(2):
        for batch in ds.batch(70).shard_batches(shard, 0):
            for row in range(batch.rows):
                tokens, number, name, marks = (batch.data[c][row] for c in ("tokens", "id", "name", "marks"))
                seen.append(int(number))
                assert tokens.dtype == np.int32 and tokens.tolist() == tokens_of(number)
                assert marks.dtype == np.bool_ and marks.tolist() == [number % 3 == 0] * (number % 2)
                assert name == f"row {number}"
    assert sorted(seen) == list(range(ROWS))


def test_lists_are_drawn_at_random(paths: Paths, ragged: str) -> None:
    drawn = dataset(ragged, context=context(paths)).sample(30, seed=1)
    assert len(set(drawn["id"].tolist())) == 30
    for number, tokens in zip(drawn["id"].tolist(), drawn["tokens"], strict=True):
        assert tokens.dtype == np.int32 and tokens.tolist() == tokens_of(number)


def test_lists_are_filled_up_chosen_and_refused_where_a_tensor_is_needed(paths: Paths, ragged: str) -> None:
    ds = dataset(ragged, features="tokens", context=context(paths))
    padded = ds.filter(lambda tokens: np.array([len(row) > 1 for row in tokens])).shuffle(1)
    batches = list(padded.batch(64, pad=-1, length=4))
    assert {batch.dtype for batch in batches} == {np.dtype("int32")}
    wanted = [tokens_of(row) + [-1] * (4 - row % 5) for row in range(ROWS) if row % 5 > 1]
    assert sorted(np.concatenate(batches).tolist()) == sorted(wanted)
    padded.batch(64, pad=-1, length=4).refuse_lists()
    with pytest.raises(InputError, match=r"rows are lists\..*\.batch\(64, pad=0, length=128\)"):
        ds.batch(64).refuse_lists()
    with pytest.raises(InputError, match="at most length=3 values"):
        list(ds.batch(64, pad=0, length=3))


def test_a_list_that_ends_within_a_value_is_corruption(paths: Paths, ragged: str) -> None:
    spec = Catalog(paths).get(ragged)
    info = spec.partitions[0]
    path = paths.partition(info.owners[0], ragged, 1, 0)
    wider = tuple(replace(c, dtype=c.dtype.replace("int32[", "int64[")) for c in spec.columns)
    values = Partition(path, wider, info.rows, spec.block_rows).values["tokens"]
    with pytest.raises(CorruptPartition, match="lists of column 'tokens' end within a value"):
        values.slice(0, 5)
