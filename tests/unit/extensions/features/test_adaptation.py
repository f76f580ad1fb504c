"""`insitu.adapt` gives layers what Keras' adapt gives them, on any number of nodes and tasks."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import insitu
from insitu.base.context import context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import import_cache
from insitu.grid.reading import partition_statistics

# Keras, as it makes arrays
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

ROWS = 3000
RNG = np.random.default_rng(5)
WIDE = RNG.normal(3, 2, size=(ROWS, 3)).astype("float32")
AGES = RNG.exponential(size=ROWS).astype("float32")
CODES = RNG.poisson(4, ROWS).astype("int64")
WORDS = np.array([f"w{code}" for code in RNG.poisson(5, ROWS)], object)


@pytest.fixture
def cache(home: Path, tmp_path: Path) -> str:
    columns = {
        "wide": pa.FixedSizeListArray.from_arrays(WIDE.reshape(-1), 3),
        "age": AGES,
        "code": CODES,
        "word": WORDS,
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    import_cache(Paths.default(), "people", [str(tmp_path / "rows.parquet")], partitions=8)
    return "people"


def layers() -> dict[str, Any]:
    return {
        "wide": keras.layers.Normalization(),
        "age": keras.layers.Discretization(num_bins=10),
        "code": keras.layers.IntegerLookup(max_tokens=6),
        "word": keras.layers.StringLookup(),
    }


def numbers(made: dict[str, Any]) -> list[Any]:
    mean, variance = (
        keras.ops.convert_to_numpy(value) for value in (made["wide"].mean, made["wide"].variance)
    )
    vocabularies = [made[name].get_vocabulary() for name in ("code", "word")]
    return [mean.tolist(), variance.tolist(), made["age"].bin_boundaries, *vocabularies]


def test_layers_are_as_after_adapt_of_keras(cache: str) -> None:
    made, plain = layers(), layers()
    insitu.adapt(made, cache)
    for name, rows in (("wide", WIDE), ("code", CODES), ("word", WORDS.astype(str))):
        plain[name].adapt(rows)
    np.testing.assert_allclose(numbers(made)[0], numbers(plain)[0], rtol=1e-5)
    np.testing.assert_allclose(numbers(made)[1], numbers(plain)[1], rtol=1e-5)
    assert numbers(made)[3:] == numbers(plain)[3:]
    assert len(made["age"].bin_boundaries) == 9
    ranks = np.searchsorted(np.sort(AGES), made["age"].bin_boundaries) / ROWS
    np.testing.assert_allclose(ranks, np.arange(1, 10) / 10, atol=1e-3)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(made["wide"](WIDE)), (WIDE - WIDE.mean(0)) / WIDE.std(0), atol=1e-4
    )


def test_few_rows_give_the_boundaries_of_keras(home: Path, tmp_path: Path) -> None:
    few = np.arange(60, dtype="float32")
    pq.write_table(pa.table({"age": few}), tmp_path / "few.parquet")
    import_cache(Paths.default(), "few", [str(tmp_path / "few.parquet")], partitions=4)
    made, plain = (keras.layers.Discretization(num_bins=5) for _ in range(2))
    insitu.adapt(made, insitu.dataset("few", features="age", label=None))
    plain.adapt(few)
    assert made.bin_boundaries == plain.bin_boundaries


def test_maps_come_before_and_a_dataset_of_one_feature_takes_one_layer(cache: str) -> None:
    data = insitu.dataset(cache, features="age", label=None).map(lambda age: 2 * age[:, None])
    layer = keras.layers.Normalization()
    insitu.adapt(layer, data)
    mean = keras.ops.convert_to_numpy(layer.mean)
    np.testing.assert_allclose(mean, [[2 * AGES.mean(dtype=np.float64)]], rtol=1e-6)


def test_texts_are_counted_as_a_map_has_made_them(cache: str) -> None:
    def change(word: Any) -> Any:
        word[word == "w5"] = "five"  # in place
        return word

    data, layer = insitu.dataset(cache, features="word", label=None), keras.layers.StringLookup()
    insitu.adapt(layer, data.map(change))
    words = Counter("five" if word == "w5" else word for word in WORDS.tolist())
    assert layer.get_vocabulary()[1:] == sorted(words, key=lambda word: (words[word], word), reverse=True)


def test_all_tasks_of_a_job_get_the_bits_of_one_process(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = layers()
    insitu.adapt(alone, cache)
    here = replace(context(), job_id="job-1")
    monkeypatch.setattr(partition_statistics, "read_context", lambda: here)
    monkeypatch.setattr(partition_statistics, "_calls", iter([0, 0, 1]))
    names = list(alone)
    first = insitu.dataset(cache, features=names, label=None)
    monkeypatch.setattr(partition_statistics, "_TAKE_OVER_SECONDS", 0.2)
    one, two, three = layers(), layers(), layers()
    # This task reads half of the partitions; nobody reads the others, so that it does after a while.
    held = first.shard_map.shards[0]
    halves = replace(first.shard_map, shards=(held[::2], held[1::2]))
    first._reader.shard_map, first._reader.shards = halves, (1,)
    thread = threading.Thread(target=insitu.adapt, args=(one, first))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    # Another finds all that was left.
    monkeypatch.setattr(
        partition_statistics.PartitionStatistics, "_read", lambda self, index: pytest.fail("it reads again")
    )
    insitu.adapt(two, insitu.dataset(cache, features=names, label=None))
    assert numbers(one) == numbers(two) == numbers(alone)
    with pytest.raises(pytest.fail.Exception, match="reads again"):  # another call has its own
        insitu.adapt(three, insitu.dataset(cache, features=names, label=None))


def test_what_cannot_be_adapted_is_refused(cache: str) -> None:
    for layer, data, message in (
        (keras.layers.Normalization(), cache, "Pass a dict of layers"),
        (keras.layers.Normalization(), AGES, "For arrays there is layer.adapt"),
        (keras.layers.Normalization(), insitu.dataset(cache, label=None), "adapts to one feature"),
        ({"wide": keras.layers.Normalization(mean=0.0, variance=1.0)}, cache, "or has its mean"),
        ({"age": keras.layers.Discretization([1.0])}, cache, "or has its bin_boundaries"),
        ({"word": keras.layers.StringLookup(vocabulary=["a"])}, cache, "with a vocabulary"),
        ({"age": keras.layers.Dense(1)}, cache, "Received: Dense"),
        (
            {"code": keras.layers.StringLookup()},
            cache,
            "numbers .* This is the feature .* partition",
        ),
        ({"age": keras.layers.Normalization()}, cache, "Pass axis=None"),
        (
            {"age": keras.layers.Discretization(num_bins=2)},
            insitu.dataset(cache, label=None).take(5),
            "read whole",
        ),
    ):
        with pytest.raises(InputError, match=message):
            insitu.adapt(layer, data)


@pytest.mark.parametrize("features", ["age", ["age", "size"], None])
@pytest.mark.parametrize("label", ["label", None])
def test_advice_about_missing_numbers_runs_as_it_is_written(
    home: Path, tmp_path: Path, features: Any, label: str | None
) -> None:
    columns = {
        "age": np.array([1, np.nan, 3, 4], "float32"),
        "size": np.ones(4, "float32"),
        "label": CODES[:4],
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    import_cache(Paths.default(), "gaps", [str(tmp_path / "rows.parquet")], partitions=1)
    dataset: Any = insitu.dataset("gaps", features=features, label=label) if features else "gaps"
    layer = keras.layers.Normalization(axis=None)
    layers = layer if features == "age" else {"age": layer}
    with pytest.raises(InputError, match=r"the feature 'age' in partition 0 of gaps") as refused:
        insitu.adapt(layers, dataset)
    filled = eval(
        str(refused.value).partition("such as ")[2], {"dataset": dataset, "numpy": np, "insitu": insitu}
    )
    insitu.adapt(layers, filled)
    assert float(np.asarray(layer.mean).reshape(-1)[0]) == 2.0
