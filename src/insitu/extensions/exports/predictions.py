"""Requests and answers of TensorFlow Serving's REST interface as arrays. Pure.

Rows come as `instances`, a list of rows, or as `inputs`, columns by name. The answer has the same form.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from insitu.base.errors import InputError

Array = npt.NDArray[Any]
SIGNATURE = "serving_default"
_TYPES = {
    "float16": "DT_HALF",
    "bfloat16": "DT_BFLOAT16",
    "float32": "DT_FLOAT",
    "float64": "DT_DOUBLE",
    "int8": "DT_INT8",
    "int16": "DT_INT16",
    "int32": "DT_INT32",
    "int64": "DT_INT64",
    "uint8": "DT_UINT8",
    "uint16": "DT_UINT16",
    "uint32": "DT_UINT32",
    "uint64": "DT_UINT64",
    "bool": "DT_BOOL",
    "string": "DT_STRING",
    "any": "DT_STRING",
}
"""TensorFlow's names of dtypes."""


class Value(Protocol):
    """An input or output of a model, with its name."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """NumPy's name of its dtype; "string" for texts, "any" for texts or whole numbers."""

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """Its axes, rows first; None if it isn't known."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request for predictions."""

    #: The arrays by the names of the model's inputs, all with as many rows.
    inputs: dict[str, Array]
    #: Rows of each.
    rows: int
    #: Whether the answer is a list of rows; else columns.
    by_rows: bool


def read_question(body: bytes, inputs: Sequence[Value]) -> Question:
    """Return what a request asks. Raises InputError that says what was expected."""
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InputError(f"A request is JSON. Received: {error}") from None
    if not isinstance(data, dict) or ("instances" in data) == ("inputs" in data):
        raise InputError(
            'A request has "instances", a list of rows, or "inputs", columns by name. Received: '
            f"{_shorten(sorted(data) if isinstance(data, dict) else data)}"
        )
    unknown = data.keys() - {"instances", "inputs", "signature_name"}
    if unknown:
        raise InputError(f"A request has signature_name, instances or inputs. Received: {min(unknown)!r}")
    signature = data.get("signature_name", SIGNATURE)
    if signature not in (SIGNATURE, ""):
        raise InputError(f"The model's signature is {SIGNATURE!r}. Received: {_shorten(signature)}")
    by_rows = "instances" in data
    columns = _transpose(data["instances"], inputs) if by_rows else _name(data["inputs"], inputs)
    arrays = {value.name: _to_array(columns[value.name], value) for value in inputs}
    counts = {name: len(array) for name, array in arrays.items()}
    rows = next(iter(counts.values()))
    if len(set(counts.values())) != 1 or not rows:
        raise InputError(f"All inputs have the same number of rows, 1 or more. Received: {counts}")
    return Question(arrays, rows, by_rows)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, where numbers are finite")


def _transpose(instances: Any, inputs: Sequence[Value]) -> dict[str, list[Any]]:
    """Return columns by name, of a list of rows: each a dict by name, or the value of the one input."""
    if not isinstance(instances, list) or not instances:
        raise InputError(f'"instances" is a list of rows, 1 or more. Received: {_shorten(instances)}')
    named = [isinstance(row, dict) and row.keys() != {"b64"} for row in instances]
    if not any(named) and len(inputs) == 1:
        return {inputs[0].name: instances}
    for number, row in enumerate(instances):
        _check_names(row, inputs, f"row {number}")
    return {value.name: [row[value.name] for row in instances] for value in inputs}


def _name(columns: Any, inputs: Sequence[Value]) -> dict[str, Any]:
    is_named = isinstance(columns, dict) and columns.keys() != {"b64"}
    if not is_named and len(inputs) == 1:
        return {inputs[0].name: columns}
    _check_names(columns, inputs, '"inputs"')
    return dict(columns)


def _check_names(given: Any, inputs: Sequence[Value], what: str) -> None:
    names = {value.name for value in inputs}
    if not isinstance(given, dict) or given.keys() != names:
        raise InputError(
            f"The model's inputs are {', '.join(sorted(names))}. Received: "
            f"{_shorten(sorted(given) if isinstance(given, dict) else given)} in {what}"
        )


def _to_array(rows: Any, value: Value) -> Array:
    """Return the rows of one input as an array of its dtype. Raises InputError."""
    expected = describe_value(value)
    if value.shape is None and _has_lists(rows) and len({len(row) for row in rows}) > 1:
        return _to_lists(rows, value)
    try:
        decoded = _decode(rows)
        found = np.asarray(decoded, object if value.dtype == "string" else None)
        if found.dtype.kind == "U":  # NumPy makes texts of numbers beside texts
            found = np.asarray(decoded, object)
    except (ValueError, OverflowError):
        raise InputError(f"{expected}. Received: rows of different shapes") from None
    kind, wanted = found.dtype.kind, value.dtype
    texts = kind in "U" or (kind == "O" and all(isinstance(each, str) for each in found.reshape(-1)))
    if wanted in ("string", "any"):
        if not texts and (wanted == "string" or kind not in "iu"):
            raise InputError(f"{expected}. Received: {_shorten(rows)}")
        found = found.astype(object) if texts else found.astype(np.int64)
    else:
        found = _to_numbers(found, rows, wanted, expected)
    if value.shape is not None and not _has_shape(found.shape, value.shape):
        raise InputError(f"{expected}. Received: shape {list(found.shape)}")
    if found.ndim == 0:
        raise InputError(f"{expected}. Received: {_shorten(rows)}, which isn't a list of rows")
    return found


def _has_lists(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, list) for row in rows)


def _to_lists(rows: list[list[Any]], value: Value) -> Array:
    """Return rows of different lengths, which feature columns read, as an array of arrays. Raises
    InputError."""
    flat = [each for row in rows for each in row]
    array = _to_array(flat, value) if flat else np.empty(0, object)
    found = np.empty(len(rows), object)
    ends = np.cumsum([len(row) for row in rows])
    found[:] = np.split(array, ends[:-1])
    return found


def _to_numbers(found: Array, rows: Any, wanted: str, expected: str) -> Array:
    """Return numbers in the dtype of their input, into which all must fit."""
    kind = found.dtype.kind
    is_float = "float" in wanted
    if kind not in ("iufb" if is_float else "b" if wanted == "bool" else "iu"):
        raise InputError(f"{expected}. Received: {_shorten(rows)}")
    # bfloat16 is none of NumPy's: the model casts to it.
    dtype: npt.DTypeLike = np.float32 if wanted == "bfloat16" else wanted
    with np.errstate(over="ignore"):
        cast = found.astype(dtype)
    if is_float and not np.isfinite(cast).all():
        raise InputError(f"{expected}. Received: a number that isn't finite, or too large for {wanted}")
    if not is_float and not np.array_equal(cast, found):
        raise InputError(f"{expected}. Received: a number beyond {wanted}")
    return cast


def _has_shape(found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(found) == len(wanted) and all(w in (None, f) for f, w in zip(found, wanted, strict=True))


def _decode(value: Any) -> Any:
    """Return a JSON value with texts in place of {"b64": ...}. Raises ValueError."""
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if isinstance(value, dict) and value.keys() == {"b64"}:
        try:
            return base64.b64decode(value["b64"], validate=True).decode()
        except (binascii.Error, TypeError, UnicodeDecodeError) as error:
            raise InputError(f'"b64" is UTF-8 in base64. Received: {error}') from None
    return value


def describe_value(value: Value) -> str:
    """Return what an input takes, for messages."""
    kind = {"any": "texts or whole numbers", "string": "texts"}.get(value.dtype, value.dtype)
    if value.shape is None:
        return f"Input {value.name!r} takes rows of {kind}, or of lists of them"
    shape = ["rows", *("any" if n is None else str(n) for n in value.shape[1:])]
    return f"Input {value.name!r} takes {kind} of the shape [{', '.join(shape)}]"


def make_answer(outputs: Mapping[str, Array], question: Question) -> bytes:
    """Return the body of an answer. Raises ValueError for predictions that aren't finite."""
    lists = {name: np.asarray(array).astype(_json_type(array)).tolist() for name, array in outputs.items()}
    single = next(iter(lists.values())) if len(lists) == 1 else None
    answer: dict[str, Any]
    if not question.by_rows:
        answer = {"outputs": lists if single is None else single}
    elif single is not None:
        answer = {"predictions": single}
    else:
        answer = {"predictions": [{n: v[row] for n, v in lists.items()} for row in range(question.rows)]}
    return json.dumps(answer, allow_nan=False).encode()


def _json_type(array: Array) -> Any:
    if array.dtype.kind == "S" or array.dtype == object:
        return str
    return array.dtype if array.dtype.kind in "iufbU" else np.float32


def describe_model(name: str, version: int, inputs: Sequence[Value], outputs: Sequence[Value]) -> Any:
    """Return the metadata of a model, in TensorFlow Serving's form."""

    def describe(value: Value) -> Any:
        dims = [{"size": str(-1 if n is None else n), "name": ""} for n in value.shape or ()]
        shape = {"dim": dims, "unknown_rank": value.shape is None}
        return {"dtype": _TYPES.get(value.dtype, "DT_INVALID"), "tensor_shape": shape, "name": value.name}

    signature = {
        "inputs": {value.name: describe(value) for value in inputs},
        "outputs": {value.name: describe(value) for value in outputs},
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": str(version)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def describe_state(version: int) -> Any:
    """Return the state of a model that answers, in TensorFlow Serving's form."""
    status = {"error_code": "OK", "error_message": ""}
    return {"model_version_status": [{"version": str(version), "state": "AVAILABLE", "status": status}]}


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
