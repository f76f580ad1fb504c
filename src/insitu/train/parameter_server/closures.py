"""Functions that a coordinator schedules, their arguments of each worker, and what comes of them."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from insitu import errors
from insitu.errors import InputError, TrainingError
from insitu.train.collectives import NotSerializable, from_bytes, to_bytes
from insitu.train.custom_loop import leave_graph, out_of_range_error


class PerWorkerValues:
    """A value that each worker has its own of. A scheduled function gets that of the worker that runs it.

    A process holds only its own.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __next__(self) -> Any:
        """Raise TrainingError: only a function on a worker reads its data."""
        raise TrainingError(
            "Data of each worker are read in scheduled functions. Received: next() of the iterators of all "
            "workers. Pass the iterator to ClusterCoordinator.schedule, and call next() in the function."
        )


class WorkerIterator:
    """Iterates over a worker's data, and can take back what was read: a trial run uses up no row."""

    def __init__(self, items: Iterator[Any], element_spec: Any = None) -> None:
        self._items = items
        #: Items that were read in a trial run; None while there is none.
        self._read: list[Any] | None = None
        #: Shapes and dtypes of an item, where the data knows them.
        self.element_spec = element_spec

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        leave_graph("The iterator of a per-worker dataset")
        item = next(self._items)
        if self._read is not None:
            self._read.append(item)
        return item

    def get_next(self) -> Any:
        """Return the next item. Raises `tf.errors.OutOfRangeError` at the end on TensorFlow, StopIteration on
        other backends."""
        try:
            return next(self)
        except StopIteration:
            raise out_of_range_error() from None

    def begin_trial(self) -> None:
        """Remember what is read from now on."""
        self._read = []

    def end_trial(self) -> None:
        """Take back what was read since the trial began."""
        read, self._read = self._read or [], None
        self._items = itertools.chain(read, self._items)


class PerWorkerDataset:
    """The data of each worker. `iter` makes an iterator on each, to be passed to `schedule`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def element_spec(self) -> Any:
        """Shapes and dtypes of an item, where the data knows them."""
        return getattr(self._dataset, "element_spec", None)

    def __iter__(self) -> PerWorkerValues:
        return PerWorkerValues(WorkerIterator(iter(self._dataset), self.element_spec))


@dataclass(frozen=True, slots=True)
class Closure:
    """A scheduled function and its arguments."""

    #: The function, as it was passed to `schedule`.
    fn: Callable[..., Any]
    #: Its positional arguments.
    args: tuple[Any, ...]
    #: Its arguments by name.
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        fn = getattr(self.fn, "python_function", self.fn)
        return f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__name__)}"

    @property
    def code(self) -> Any:
        """Equal for functions of the same code."""
        fn = getattr(self.fn, "python_function", self.fn)
        return getattr(fn, "__code__", fn)

    def iterators(self) -> list[WorkerIterator]:
        """Return the iterators of this worker among the arguments."""
        leaves = keras.tree.flatten((self.args, dict(self.kwargs)))
        values = [leaf.value for leaf in leaves if isinstance(leaf, PerWorkerValues)]
        return [value for value in values if isinstance(value, WorkerIterator)]

    def run(self) -> Any:
        """Call the function with this worker's values. Returns its result as NumPy arrays."""

        def resolve(leaf: Any) -> Any:
            return leaf.value if isinstance(leaf, PerWorkerValues) else leaf

        args, kwargs = keras.tree.map_structure(resolve, (self.args, dict(self.kwargs)))
        try:
            returned = self.fn(*args, **kwargs)
        except StopIteration:
            raise out_of_range_error() from None
        return keras.tree.map_structure(_to_plain, returned)


_workers: list[int] = []


@contextlib.contextmanager
def worker_scope(index: int) -> Iterator[None]:
    """While open, a scheduled function runs on the worker of this index."""
    _workers.append(index)
    try:
        yield
    finally:
        _workers.pop()


def current_worker() -> int | None:
    """Return the index of the worker that runs a scheduled function; None outside of one."""
    return _workers[-1] if _workers else None


def describe_closures(closures: Sequence[Closure]) -> str:
    """Return 16 hex digits, equal for the same functions in the same order."""
    digest = hashlib.sha256()
    for closure in closures:
        digest.update(closure.name.encode() + b"\n")
    return digest.hexdigest()[:16]


def _to_plain(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, bool | int | float | str | bytes | np.ndarray | np.generic):
        return leaf
    return np.asarray(keras.ops.convert_to_numpy(leaf)) if hasattr(leaf, "dtype") else leaf


def encode_result(closure: Closure, result: Any) -> bytes:
    """Return the bytes of a result. Raises TrainingError for one that can't be sent."""
    try:
        return to_bytes(result)
    except NotSerializable as error:
        raise TrainingError(
            "A scheduled function returns tensors, arrays, numbers, text, or lists, tuples and dicts of "
            f"them, since every worker gets it. Received: {type(result).__name__} from {closure.name} "
            f"({error}). Return what is needed of it as arrays."
        ) from None


def decode_result(data: bytes) -> Any:
    """Return the value of `encode_result`."""
    return from_bytes(data)


def encode_failure(error: Exception, worker: int) -> bytes:
    """Return the bytes that describe an error to other workers."""
    kind = type(error)
    return to_bytes(
        {"module": kind.__module__, "name": kind.__qualname__, "text": str(error), "worker": worker}
    )


def rebuild_failure(data: bytes, name: str) -> Exception:
    """Return an error like that of `encode_failure`: of the same type, where that is one of Python's,
    TensorFlow's or insitu's, so that all workers handle it alike. Others become TrainingErrors."""
    described = from_bytes(data)
    text = f"{described['text']} (in {name}, on worker:{described['worker']})"
    module, kind = described["module"], described["name"]
    if module == "builtins":
        found = getattr(builtins, kind, None)
    elif module == "insitu.errors":
        found = getattr(errors, kind, None)
    elif module.startswith("tensorflow."):
        return _rebuild_tensorflow_error(kind, text)
    else:
        found = None
    if isinstance(found, type) and issubclass(found, Exception):
        try:
            return found(text)
        except TypeError:  # one that takes other arguments
            pass
    return TrainingError(f"A scheduled function failed with {kind}. Received: {text}")


def _rebuild_tensorflow_error(kind: str, text: str) -> Exception:
    import tensorflow as tf

    found = getattr(tf.errors, kind, None)
    if isinstance(found, type) and issubclass(found, tf.errors.OpError) and found is not tf.errors.OpError:
        made: Exception = found(None, None, text)
        return made
    return TrainingError(f"A scheduled function failed with {kind}. Received: {text}")


class RemoteValue:
    """What a scheduled function returns, once a worker has run it."""

    def __init__(self, fetch: Callable[[int], Any], number: int) -> None:
        self._fetch = fetch
        self._number = number

    def fetch(self) -> Any:
        """Wait for the result, and return it as NumPy arrays; the same in each worker. Raises what the
        function raised."""
        return self._fetch(self._number)

    def get(self) -> Any:
        """Wait for the result, and return it as tensors of the backend."""

        def convert(leaf: Any) -> Any:
            return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf

        return keras.tree.map_structure(convert, self.fetch())


def refuse_remote_values(structure: Any) -> None:
    """Raise InputError where arguments of a scheduled function are results of others."""
    if any(isinstance(leaf, RemoteValue) for leaf in keras.tree.flatten(structure)):
        raise InputError(
            "A scheduled function doesn't take results of others. Received: a RemoteValue as an argument. "
            "Pass what its fetch() returns."
        )
