"""A checker of histories after Wing and Gong (1993) with Lowe's memory of states that were seen.

A history is linearizable if its operations, each at one moment between its call and its return, give what
they returned in a sequential model. An operation whose answer was lost may have happened at any time after
its call, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

LOST = object()
"""The result of an operation whose answer was lost."""


@dataclass(frozen=True)
class Call:
    """One operation of a client."""

    #: What was asked: the model's argument.
    asked: Any
    #: What was answered, or LOST.
    result: Any
    #: When it was called, and when it returned, by one clock.
    begin: float
    end: float


def find_order(
    history: Sequence[Call], initial: Hashable, step: Callable[[Any, Any], tuple[Hashable, Any]]
) -> list[Call] | None:
    """Return an order that explains a history; None: there is none. `step` returns the state after an
    operation, and its result."""
    calls = sorted(history, key=lambda call: call.begin)
    needed = frozenset(i for i, call in enumerate(calls) if call.result is not LOST)
    seen: set[tuple[frozenset[int], Hashable]] = set()
    stack: list[tuple[frozenset[int], Hashable, tuple[int, ...]]] = [(frozenset(), initial, ())]
    while stack:
        done, state, order = stack.pop()
        if needed <= done:
            return [calls[i] for i in order]
        # What has returned first must come before all that was called after that.
        horizon = min(calls[i].end for i in needed - done)
        for i, call in enumerate(calls):
            if call.begin > horizon:
                break
            if i in done:
                continue
            after, result = step(state, call.asked)
            if call.result is LOST or result == call.result:
                reached = (done | {i}, after)
                if reached not in seen:
                    seen.add(reached)
                    stack.append((*reached, (*order, i)))
    return None
