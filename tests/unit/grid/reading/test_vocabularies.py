"""Texts and times of a dataset as numbers: those of Keras' layers, the same in all tasks of a job."""

from __future__ import annotations

import datetime
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from insitu.base.context import Context, context
from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.grid import Dataset, dataset, import_cache
from insitu.grid.reading import partition_statistics
from insitu.grid.reading.reads import READS

ROWS = 600
RNG = np.random.default_rng(3)
CITIES = np.array(["Rome", "Oslo", "", "Bonn", "[UNK]", "Ål", "São Paulo"], object)[RNG.poisson(2, ROWS) % 7]
CODES = RNG.poisson(3, ROWS).astype("int64") - 1
SINCE = RNG.integers(0, 2**31, ROWS) * 1_000_000
KINDS = np.array(["cat", "dog", "[UNK]"], object)[RNG.integers(0, 3, ROWS)]


@pytest.fixture
def people(paths: Paths, tmp_path: Path) -> str:
    columns = {
        "city": CITIES,
        "code": CODES,
        "age": RNG.normal(size=ROWS).astype("f4"),
        "since": pa.array(SINCE, pa.timestamp("us", "Europe/Rome")),
        "day": pa.array(SINCE // 86_400_000_000, pa.int32()).cast(pa.date32()),
        "kind": KINDS,
        "label": RNG.integers(0, 2, ROWS),
    }
    pq.write_table(pa.table(columns), tmp_path / "people.parquet")
    import_cache(paths, "people", [str(tmp_path / "people.parquet")], partitions=5)
    return "people"


def all_rows(data: Dataset) -> Any:
    (batch,) = data.batch(ROWS)
    return batch


def test_ids_are_those_of_the_layers_of_keras(people: str) -> None:
    import keras

    data = dataset(people).lookup("city", "code")
    features, _ = all_rows(data)
    rows, _ = all_rows(dataset(people))
    for name, layer in (("city", keras.layers.StringLookup()), ("code", keras.layers.IntegerLookup())):
        layer.adapt(rows[name].astype(str) if name == "city" else rows[name])
        assert data.vocabulary(name) == layer.get_vocabulary() == dataset(people).vocabulary(name)
        np.testing.assert_array_equal(features[name], layer(rows[name].tolist()))
        assert features[name].dtype == np.int64
    assert (features["city"] == 0).any()  # the text "[UNK]" itself


def test_a_vocabulary_is_given_or_cut_as_to_a_layer_of_keras(people: str) -> None:
    import keras

    texts = all_rows(dataset(people, features="city", label=None))
    for given in (["Oslo", "Rome"], ["[UNK]", "Oslo", "Rome"], np.array(["Oslo", "Rome"])):
        data = dataset(people, features="city", label=None).lookup("city", vocabulary=given)
        layer = keras.layers.StringLookup(vocabulary=["Oslo", "Rome"])
        np.testing.assert_array_equal(all_rows(data), layer(texts.tolist()))
        assert data.vocabulary("city") == layer.get_vocabulary() == ["[UNK]", "Oslo", "Rome"]
    cut = keras.layers.StringLookup(max_tokens=3)
    cut.adapt(texts.astype(str))
    assert dataset(people).lookup("city", max_tokens=3).vocabulary("city") == cut.get_vocabulary()


def test_hashes_are_those_of_keras(people: str) -> None:
    import keras

    rows, _ = all_rows(dataset(people))
    features, _ = all_rows(dataset(people).hash("city", "code", bins=17))
    for name in ("city", "code"):
        np.testing.assert_array_equal(features[name], keras.layers.Hashing(17)(rows[name].tolist()))


WORDS = [
    "the",
    "The",
    "cat,",
    "sat",
    "on",
    "mat.",
    "[UNK]",
    "Ärger",
    "ÄRGER",
    "it's",
    "a\u00a0b",
    "-",
    "x_y",
    "",
]
TEXTS = np.array(
    [" ".join(RNG.choice(WORDS, n)) + "\t\n" * (n % 2) for n in RNG.integers(0, 9, ROWS)], object
)


def import_texts(paths: Paths, folder: Path) -> str:
    table = pa.table({"text": TEXTS, "label": np.arange(ROWS) % 2})
    pq.write_table(table, folder / "texts.parquet")
    import_cache(paths, "texts", [str(folder / "texts.parquet")], partitions=3)
    return "texts"


def test_ids_of_words_are_those_of_the_layer_of_keras(paths: Paths, tmp_path: Path) -> None:
    import keras

    name = import_texts(paths, tmp_path)
    rows, _ = all_rows(dataset(name))
    for most, length in ((None, 5), (4, 12)):
        data = dataset(name).tokenize("text", length=length, max_tokens=most)
        layer = keras.layers.TextVectorization(max_tokens=most, output_sequence_length=length)
        layer.adapt(rows.astype(str))
        assert data.vocabulary("text") == layer.get_vocabulary()
        ids, _ = all_rows(data)
        assert ids.dtype == np.int64 and ids.shape == (ROWS, length)
        np.testing.assert_array_equal(ids, np.asarray(layer(rows.astype(str))))
        # Other data gets the same ids, however its vocabulary is written.
        for given in (layer.get_vocabulary(), layer.get_vocabulary(include_special_tokens=False)):
            again, _ = all_rows(dataset(name).tokenize("text", length=length, vocabulary=given))
            np.testing.assert_array_equal(again, ids)
    assert "tokenize('text', length=12)" in repr(data)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"column": "label", "length": 3}, "takes a feature. Received: the label"),
        ({"column": "text", "length": 0}, "a length of 1 id or more"),
        ({"column": "text", "length": 2, "max_tokens": 2}, "max_tokens is 3 or more"),
        ({"column": "text", "length": 2, "max_tokens": 9, "vocabulary": ["a"]}, "9 and a vocabulary"),
        ({"column": "text", "length": 2, "vocabulary": ["a", "b", "a"]}, "'a' again for 'text'"),
        ({"column": "text", "length": 2, "vocabulary": "abc"}, "Received: 'abc'"),
        ({"column": "text", "length": 2, "vocabulary": ["a", 1]}, "Received: 1 for"),
        ({"column": "word", "length": 2}, "takes a column of the batch"),
    ],
)
def test_what_has_no_words_is_refused(paths: Paths, tmp_path: Path, options: Any, message: str) -> None:
    data = dataset(import_texts(paths, tmp_path))
    with pytest.raises(InputError, match=re.escape(message)):
        data.tokenize(options.pop("column"), **options)


def test_numbers_have_no_words(people: str) -> None:
    with pytest.raises(InputError, match=r"tokenize takes columns of texts. Received: int64 in 'code'"):
        dataset(people).tokenize("code", length=3)
    with pytest.raises(InputError, match="here of texts"):
        dataset(people).tokenize("code", length=3, vocabulary=["a"])


def test_labels_count_from_0_and_unknown_ones_are_refused(people: str) -> None:
    data = dataset(people, features="age", label="kind").lookup("kind")
    names = data.vocabulary("kind")
    assert sorted(names) == ["[UNK]", "cat", "dog"]
    _, ids = all_rows(data)
    assert [names[i] for i in ids] == all_rows(dataset(people, features="age", label="kind"))[1].tolist()
    with pytest.raises(InputError, match=r"its vocabulary. Received: '\[UNK\]' in 'kind'"):
        list(dataset(people, label="kind").lookup("kind", vocabulary=["cat", "dog"]).batch(ROWS))


def test_a_vocabulary_reads_its_columns_alone_unless_a_map_came_before(people: str) -> None:
    def bytes_read(data: Dataset) -> int:
        before = READS.reads.local_bytes + READS.reads.remote_bytes
        assert data.vocabulary("code")
        return READS.reads.local_bytes + READS.reads.remote_bytes - before

    assert bytes_read(dataset(people)) == ROWS * 8
    assert bytes_read(dataset(people).times("since", "hour")) == ROWS * 8
    mapped = dataset(people, features=["code", "age"]).map(lambda x, y: ({**x, "code": x["code"] % 2}, y))
    assert bytes_read(mapped) == ROWS * (8 + 4 + 8)
    assert mapped.vocabulary("code") == [-1, *sorted({0, 1}, key=lambda v: -(v == CODES % 2).sum())]


def test_only_the_columns_that_are_chosen_are_read(people: str) -> None:
    sizes = {"code": 8, "age": 4, "label": 8}
    for features in (["age"], ["code", "age"]):
        before = READS.reads.remote_bytes + READS.reads.local_bytes
        list(dataset(people, features=features).batch(50))
        read = READS.reads.remote_bytes + READS.reads.local_bytes - before
        assert read == ROWS * sum(sizes[name] for name in (*features, "label"))


def test_tasks_of_a_job_find_what_others_have_left(people: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = dataset(people).vocabulary("city")
    monkeypatch.setattr(partition_statistics, "read_context", lambda: replace(context(), job_id="job-1"))
    monkeypatch.setattr(partition_statistics, "_calls", iter([0, 0]))
    assert dataset(people).vocabulary("city") == alone
    again = lambda self, index: pytest.fail("it reads again")  # noqa: E731
    monkeypatch.setattr(partition_statistics.PartitionStatistics, "_read", again)
    assert dataset(people).lookup("city").vocabulary("city") == alone


def test_parts_of_times_are_those_of_the_zone(people: str) -> None:
    parts = ("year", "month", "day", "weekday", "hour", "minute", "second")
    features, _ = all_rows(dataset(people).times("since", *parts).times("day", "year", "weekday"))
    rows, _ = all_rows(dataset(people))
    assert "since" not in features and features["since_hour"].dtype == np.int32
    for n, micros in enumerate(rows["since"].tolist()):
        time = datetime.datetime.fromtimestamp(micros // 1_000_000, ZoneInfo("Europe/Rome"))
        date = datetime.date(1970, 1, 1) + datetime.timedelta(days=int(rows["day"][n]))
        expected = (time.year, time.month, time.day, time.weekday(), time.hour, time.minute, time.second)
        assert tuple(features[f"since_{part}"][n] for part in parts) == expected
        assert (features["day_year"][n], features["day_weekday"][n]) == (date.year, date.weekday())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d.lookup("cty"), "there are age, city, code, day, .* Did you mean 'city'"),
        (lambda d: d.lookup(), "lookup takes columns"),
        (lambda d: d.lookup("city", "code", vocabulary=["a"]), "and a vocabulary. Call it for each"),
        (lambda d: d.lookup("city", max_tokens=1), "2 or more"),
        (lambda d: d.lookup("city", vocabulary="Rome"), "a list of texts"),
        (lambda d: d.lookup("city", vocabulary=["a", 1]), "a list of texts"),
        (lambda d: d.lookup("city", vocabulary=[1.5]), "Received: float"),
        (lambda d: d.lookup("city", vocabulary=["a", "b", "a"]), "Received: 'a' again"),
        (
            lambda d: d.lookup("city", vocabulary=[1, 2]),
            "here of whole numbers. Received: values of type str",
        ),
        (lambda d: d.lookup("city").lookup("city", vocabulary=["a"]), "here of texts"),
        (lambda d: d.lookup("age"), "Received: float32 in 'age'"),
        (lambda d: d.filter(lambda x, y: x["age"] > 0).lookup("city"), "Call lookup before them"),
        (lambda d: d.hash("city", bins=0), "bins of 1 or more"),
        (lambda d: d.hash("age", bins=3), "values of type float in 'age'"),
        (lambda d: d.times("age", "hour"), "--dtype age=timestamp"),
        (lambda d: d.times("since", "hours"), "Did you mean 'hour'"),
        (lambda d: d.times("day", "hour"), "times takes parts of date32"),
        (lambda d: d.map(lambda x, y: (x, y)).times("since", "hour"), "before map"),
        (lambda d: d.map(lambda x, y: (x["city"], y)).lookup("city"), "there are label"),
    ],
)
def test_what_has_no_numbers_is_refused_at_its_line(people: str, make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(dataset(people))


def test_a_dataset_shows_its_calls(people: str, alone: Context) -> None:
    data = dataset(people, context=alone).hash("city", bins=5).times("since", "hour")
    assert ".hash('city', bins=5).times('since', 'hour')" in repr(data)


@pytest.mark.parametrize(("given", "near"), [({"label": "lable"}, "label"), ({"features": "cit"}, "city")])
def test_a_wrong_column_is_refused_with_those_that_there_are(
    people: str, given: dict[str, str], near: str
) -> None:
    with pytest.raises(InputError, match=f"city, code, age, .*Did you mean '{near}'"):
        dataset(people, **given)
    with pytest.raises(TypeError, match="features= names the columns"):
        dataset(people, columns=["age"])
