"""What a request comes to. Whoever waits for a future moves the client's connections meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Future(Generic[T]):
    """The result of a request that is under way. Made by a `Client`; not to be waited for after its end."""

    def __init__(self, pump: Callable[[Future[Any], float | None], None]) -> None:
        self._pump = pump
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._after: list[Callable[[Future[Any]], None]] = []

    def done(self) -> bool:
        """Whether it is known, without waiting."""
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """The result, waited for; raises what the request failed with, ServerStalled after `timeout` seconds
        (None: the client's stall timeout)."""
        if not self._done:
            self._pump(self, timeout)
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value

    def resolve(self, value: Any) -> None:
        if not self._done:
            self._done, self._value = True, value
            self._run()

    def fail(self, error: BaseException) -> None:
        if not self._done:
            self._done, self._error = True, error
            self._run()

    def then(self, call: Callable[[Future[Any]], None]) -> None:
        """`call(self)` once it is known; at once where it is."""
        if self._done:
            call(self)
        else:
            self._after.append(call)

    def _run(self) -> None:
        after, self._after = self._after, []
        for call in after:
            call(self)

    @property
    def error(self) -> BaseException | None:
        return self._error

    @property
    def value(self) -> Any:
        """Of one that is done and hasn't failed."""
        return self._value


def gathered(
    parts: list[Future[Any]],
    pump: Callable[[Future[Any], float | None], None],
    combine: Callable[[list[Any]], Any],
) -> Future[Any]:
    """One future of several: `combine(values)` once all are known; the first error where one fails."""
    whole: Future[Any] = Future(pump)

    def look(_: Future[Any]) -> None:
        if all(part.done() for part in parts):
            failed = next((part.error for part in parts if part.error is not None), None)
            if failed is not None:
                whole.fail(failed)
                return
            try:
                value = combine([part.value for part in parts])
            except Exception as error:
                whole.fail(error)
            else:
                whole.resolve(value)

    for part in parts:
        part.then(look)
    return whole


def pass_on(future: Future[Any], whole: Future[Any]) -> None:
    """`whole` comes to what `future` comes to."""
    future.then(lambda done: whole.resolve(done.value) if done.error is None else whole.fail(done.error))
