"""Ray's tables as batches of Arrow's own types."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from insitu.base.errors import SourceError
from insitu.grid.ray_data.opening import cut_by_file, make_plain_batches
from insitu.grid.sources import columns_of_batch, values_of_batch


class RayTensor(pa.ExtensionType):
    """What Ray makes of arrays that have one shape."""

    def __init__(self, shape: tuple[int, ...], kind: Any) -> None:
        self.shape = shape
        super().__init__(pa.large_list(kind), "ray.data.arrow_tensor_v2")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps(self.shape).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> RayTensor:
        return cls(tuple(json.loads(data)), storage.value_type)


class RayVariableTensor(pa.ExtensionType):
    """What Ray makes of arrays that may have several shapes."""

    def __init__(self) -> None:
        storage = pa.struct([("data", pa.large_list(pa.uint8())), ("shape", pa.list_(pa.int64()))])
        super().__init__(storage, "ray.data.arrow_variable_shaped_tensor")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> RayVariableTensor:
        return cls()


class RayObject(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.large_binary(), "ray.data.arrow_pickled_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: Any, data: bytes) -> RayObject:
        return cls()


def tensors(values: np.ndarray[Any, Any]) -> Any:
    kind = RayTensor(values.shape[1:], pa.from_numpy_dtype(values.dtype))
    storage = pa.array([row.ravel() for row in values], kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)


def variable(images: list[np.ndarray[Any, Any]]) -> Any:
    rows = [{"data": image.ravel(), "shape": list(image.shape)} for image in images]
    kind = RayVariableTensor()
    return pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))


def read(table: Any, **options: Any) -> dict[str, Any]:
    (batch,) = make_plain_batches(table, "file", **{"without": (), **options})
    return values_of_batch(batch, columns_of_batch(batch, "file"), "file")


IMAGES = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)


@pytest.mark.parametrize("values", [IMAGES, IMAGES.astype("float32"), np.ones((4, 5), bool)])
def test_tensors_of_one_shape_are_columns(values: np.ndarray[Any, Any]) -> None:
    table = pa.table({"image": tensors(values), "label": pa.array([3, 1, 2, 0])})
    found = read(table)
    np.testing.assert_array_equal(found["image"], values)
    assert found["image"].dtype == values.dtype and found["label"].tolist() == [3, 1, 2, 0]
    # A slice has its own rows alone.
    np.testing.assert_array_equal(read(table.slice(1, 2))["image"], values[1:3])


def test_tensors_that_might_differ_and_do_not_are_columns_too() -> None:
    table = pa.table({"image": variable(list(IMAGES))})
    np.testing.assert_array_equal(read(table)["image"], IMAGES)
    np.testing.assert_array_equal(read(table.slice(2))["image"], IMAGES[2:])


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (
            variable([IMAGES[0], IMAGES[0].T]),
            {},
            r"mixed shapes: first \[2, 3\], then \[3, 2\].*size=224,224",
        ),
        (pa.ExtensionArray.from_storage(RayObject(), pa.array([b"."], pa.large_binary())), {}, "unpickled"),
        (pa.array([1]), {"without": ("x",)}, "no columns beside those that --without names"),
    ],
)
def test_what_can_not_be_a_column_is_refused(column: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        read(pa.table({"x": column}), **options)


def test_tables_are_cut_where_the_file_changes() -> None:
    table = pa.table({"x": [1, 2, 3, 4, 5], "path": ["f", "f", "g", "f", "f"]})
    found = [(name, rows.to_pydict()) for name, rows in cut_by_file(table)]
    assert found == [("f", {"x": [1, 2]}), ("g", {"x": [3]}), ("f", {"x": [4, 5]})]
    assert [rows.column_names for _, rows in cut_by_file(table, keeps_path=True)] == [["x", "path"]] * 3
    joined = pa.concat_tables([table, table])
    assert [name for name, _ in cut_by_file(joined)] == ["f", "g", "f", "g", "f"]
    assert list(cut_by_file(table.slice(0, 0))) == []
