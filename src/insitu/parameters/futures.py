"""Results of requests that are under way. The thread that waits for one does the I/O for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Drive = Callable[["Future[Any]", "float | None"], None]
"""Does the client's I/O until the future is done; see `ServerRequests.run_until_done`."""


class Future(Generic[T]):
    """The result of one request. A `Client` makes it; it can't be waited for once the client is closed."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[Any]], None]] = []

    def done(self) -> bool:
        """Return whether the request has succeeded or failed. Doesn't wait."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it.

        Raises the error that the request failed with, or ServerStalled after `timeout` seconds (None: the
        client's stall timeout).
        """
        if not self._done:
            self._drive(self, timeout)
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def set_result(self, value: Any) -> None:
        """Complete the future. Does nothing if it is already done."""
        if not self._done:
            self._done, self._value = True, value
            self._run_callbacks()

    def set_exception(self, error: BaseException) -> None:
        """Fail the future. Does nothing if it is already done."""
        if not self._done:
            self._done, self._error = True, error
            self._run_callbacks()

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call `callback(self)` once the future is done, or at once if it is."""
        if self._done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    @property
    def error(self) -> BaseException | None:
        """The error that the request failed with; None if it hasn't failed."""
        return self._error

    @property
    def value(self) -> Any:
        """The result of a future that is done and hasn't failed."""
        return self._value


def gather(futures: list[Future[Any]], drive: Drive, combine: Callable[[list[Any]], Any]) -> Future[Any]:
    """Return one future for several: `combine(values)` once all are done, or the first error among them."""
    combined: Future[Any] = Future(drive)

    def combine_if_done(_: Future[Any]) -> None:
        if not all(future.done() for future in futures):
            return
        error = next((future.error for future in futures if future.error is not None), None)
        if error is not None:
            combined.set_exception(error)
            return
        try:
            value = combine([future.value for future in futures])
        except Exception as failure:
            combined.set_exception(failure)
        else:
            combined.set_result(value)

    for future in futures:
        future.add_done_callback(combine_if_done)
    if not futures:
        combine_if_done(combined)
    return combined


def chain_future(source: Future[Any], target: Future[Any]) -> None:
    """Complete or fail `target` as `source` does."""

    def copy_outcome(done: Future[Any]) -> None:
        if done.error is None:
            target.set_result(done.value)
        else:
            target.set_exception(done.error)

    source.add_done_callback(copy_outcome)
