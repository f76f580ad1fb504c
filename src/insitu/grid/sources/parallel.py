"""Decodes parts of a file in several threads, and gives them back in their order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_THREADS = 8
"""Threads beyond which memory grows and the rest of an import doesn't keep pace."""


def count_threads(most: int = _MOST_THREADS) -> int:
    """Return how many threads of an import may compute at once: what the system gives this process."""
    return max(1, min(most, len(os.sched_getaffinity(0))))


def map_ordered(
    function: Callable[[Item], Result], items: Iterable[Item], most_threads: int = _MOST_THREADS
) -> Generator[Result, None, None]:
    """Yield `function` of each item, in their order, while threads compute the next ones.

    Items are taken one more than there are threads ahead. Errors of `function` are raised in its turn.
    """
    waiting: deque[Future[Result]] = deque()
    threads = count_threads(most_threads)
    with ThreadPoolExecutor(threads, thread_name_prefix="insitu-decode") as executor:
        try:
            for item in items:
                waiting.append(executor.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
