"""Faults on purpose: what `insitu chaos` and the tests do to running jobs.

It may import every other room of `cluster`. Begin reading with `injector.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.doors import lazy_door

if TYPE_CHECKING:
    from insitu.cluster.chaos.injector import (
        Disturber,
        Injected,
        chaos_faults,
        leftovers,
        results_of,
        wait_until_over,
    )

__getattr__, __dir__ = lazy_door(
    __name__,
    {
        "injector": ("Disturber", "Injected", "chaos_faults", "leftovers", "results_of", "wait_until_over"),
    },
)

__all__ = [
    "Disturber",
    "Injected",
    "chaos_faults",
    "leftovers",
    "results_of",
    "wait_until_over",
]
