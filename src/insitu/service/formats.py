"""Numbers and times as users read them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence


def format_duration(seconds: float) -> str:
    """Return such as `42s`, `3m10s`, `2h05m`, `4d3h`."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def format_position(progress: Mapping[str, int] | None) -> str:
    """Return such as `epoch 2 step 17`, counted from 1 as Keras prints them; `-` before training."""
    if not progress or progress["epoch"] < 0:
        return "-"
    return f"epoch {progress['epoch'] + 1} step {progress['step'] + 1}"


def format_time(at: float) -> str:
    """Return the local date and time of `at`, in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def format_size(size: int) -> str:
    """Return a number of bytes in the largest fitting unit, such as 24.9 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def format_split(split: Mapping[str, float], step: float | None, most: int = 4) -> str:
    """Return what a step's seconds went to, such as `gradient 71 %, wait 20 %`: the `most` longest parts
    of at least 1 %. Empty if the time of a step isn't known."""
    if not step:
        return ""
    largest = sorted(split.items(), key=lambda item: -item[1])[:most]
    return ", ".join(
        f"{name} {100 * seconds / step:.0f} %" for name, seconds in largest if seconds / step >= 0.01
    )


def format_staleness(histogram: Mapping[str, Sequence[int]]) -> str:
    """Return how many gradients had a number of updates between their pull and their push, such as
    `0: 12, 1: 30, 2-3: 2`."""
    parts = []
    for digits, count in enumerate(histogram["counts"]):
        low, high = (1 << digits - 1, (1 << digits) - 1) if digits else (0, 0)
        if count:
            parts.append(f"{low if low == high else f'{low}-{high}'}: {count:,}")
    return ", ".join(parts) or "none yet"
