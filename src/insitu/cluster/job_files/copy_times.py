"""When partitions were brought to the hosts that read them, for the account of a job's time.

A line of JSON for each time. The supervisor appends."""

from __future__ import annotations

import contextlib
import json
import math
import os

from insitu.base.paths import JobPaths


def append_copy(job: JobPaths, began: float, ended: float) -> None:
    """Note that partitions were brought between two times, in seconds since 1970.

    A job doesn't depend on it: if there is no room, times are missing."""
    line = json.dumps({"began": round(began, 3), "ended": round(ended, 3)}).encode() + b"\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(job.copies, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(line)


def read_copies(job: JobPaths) -> list[tuple[float, float]]:
    """Return from when to when, in the order of the ends. A line that was cut off is passed over."""
    try:
        lines = job.copies.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entry = json.loads(line)
            began, ended = float(entry["began"]), float(entry["ended"])
            if math.isfinite(began) and began <= ended:
                found.append((began, ended))
    return found
