"""Lists what this process has open."""

from __future__ import annotations

import contextlib
import gc
import os


def list_descriptors() -> dict[int, str]:
    """Return what each open descriptor leads to, such as a path or `socket:[17]`, by its number.

    Those of objects that nobody can reach any more are closed before: tests before this one may have left
    such objects.
    """
    gc.collect()
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def find_new_descriptors(before: dict[int, str], *kinds: str) -> list[str]:
    """Return what descriptors lead to that weren't there in `before`, in order.

    `kinds`: how names begin that count, such as "socket:". Threads that other tests have left may close or
    open others meanwhile, so a number of all descriptors says nothing.
    """
    now = list_descriptors()
    return sorted(
        name for number, name in now.items() if before.get(number) != name and name.startswith(kinds or "")
    )
