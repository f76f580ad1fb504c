"""Folders of `save_to_disk`: their own files alone, with the names of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_files import encode, make_image, scale

from insitu.base.errors import SizeNeeded, SourceError
from insitu.base.spec import Column
from insitu.grid.sources import find_sources, labels_of, open_sources
from insitu.grid.sources.base import Source, SourceOptions

SHAPE = (6, 8, 3)
FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    "x": {"dtype": "float32", "_type": "Value"},
}


def make_table(rows: int, features: Any = FEATURES, metadata: bool = True) -> pa.Table:
    images = [{"bytes": encode(make_image(i)), "path": None} for i in range(rows)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "image": pa.array(images, kind),
            "label": pa.array([i % 2 for i in range(rows)]),
            "x": pa.array([i / 2 for i in range(rows)], pa.float32()),
        }
    )
    if not metadata:
        return table
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def save(folder: Path, rows: int = 10, shards: int = 2, **changes: Any) -> Path:
    """Write what `save_to_disk` of the package `datasets` 4 writes, with a file of its cache."""
    folder.mkdir(parents=True)
    metadata = changes.pop("metadata", True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    table = make_table(rows, metadata=metadata)
    for number, name in enumerate([*names, "cache-0123.arrow"]):
        part = table.slice(number * rows // shards, rows // shards) if number < shards else table
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, **changes}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
    return folder


def opened(source: Path, **options: Any) -> list[Source]:
    return open_sources(find_sources([str(source)], None), SourceOptions(**{"images": SHAPE, **options}))


def read(sources: list[Source], name: str) -> np.ndarray:
    return np.concatenate([block.columns[name] for each in sources for block in each.blocks(1000)])


@pytest.mark.parametrize("metadata", [True, False])
def test_a_saved_data_set_is_read_without_files_of_its_cache(tmp_path: Path, metadata: bool) -> None:
    sources = opened(save(tmp_path / "a", metadata=metadata))
    assert [source.path.name for source in sources] == [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    assert sources[0].columns == (
        *(Column("image", "uint8", SHAPE), Column("label", "int64"), Column("x", "float32")),
    )
    assert labels_of(sources[1]) == ("cat", "dog")
    np.testing.assert_array_equal(read(sources, "x"), np.arange(10) / 2)
    expected = np.stack([scale(make_image(i), SHAPE) for i in range(10)])
    np.testing.assert_array_equal(read(sources, "image"), expected)


def test_parquet_files_of_the_hub_have_images_and_classes(tmp_path: Path) -> None:
    pq.write_table(make_table(10), tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(SizeNeeded, match="most often of 12x20"):
        opened(tmp_path, images=None)
    sources = opened(tmp_path)
    assert labels_of(sources[0]) == ("cat", "dog")
    expected = np.stack([scale(make_image(i), SHAPE) for i in range(10)])
    np.testing.assert_array_equal(read(sources, "image"), expected)
    later = np.concatenate([block.columns["image"] for block in sources[0].blocks(1000, 7)])
    np.testing.assert_array_equal(later, expected[7:])


def test_splits_are_imported_one_at_a_time(tmp_path: Path) -> None:
    save(tmp_path / "d" / "train")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(opened(tmp_path / "d")) == 2
    save(tmp_path / "d" / "test")
    with pytest.raises(SourceError, match=r"one at a time.*/d with test, train\. Name the folder of one"):
        opened(tmp_path / "d")
    assert len(opened(tmp_path / "d" / "test")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"_data_files": [{"filename": "data-7.arrow"}]},
            r"state\.json, which names data-7\.arrow, without that",
        ),
        ({"_data_files": None}, r"state\.json must say which files a data set has"),
        ({"_data_files": [{}]}, r"state\.json must say which files a data set has"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, r"flatten_indices"),
    ],
)
def test_a_data_set_that_is_not_whole_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        opened(save(tmp_path / "a", **changes))
    (tmp_path / "a" / "state.json").write_text("{")
    with pytest.raises(SourceError, match=r"state\.json must say which files"):
        opened(tmp_path / "a")


def test_files_of_other_classes_are_refused_together(tmp_path: Path) -> None:
    pq.write_table(make_table(2), tmp_path / "a.parquet")
    other = {**FEATURES, "label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    pq.write_table(make_table(2, other), tmp_path / "b.parquet")
    with pytest.raises(
        SourceError, match=r"classes of column 'label' must be the same.* cat, dog .* dog, cat of"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("label", [{"dtype": "int64", "_type": "Value"}, {"_type": "ClassLabel"}, "x", None])
def test_other_features_name_no_classes(tmp_path: Path, label: Any) -> None:
    pq.write_table(make_table(2, {**FEATURES, "label": label}), tmp_path / "a.parquet")
    assert labels_of(opened(tmp_path)[0]) == ()
