"""Words that depend on a number, in what users read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number and what it counts: `1 node`, `1,200 nodes`. `plural` is for nouns that take no `s`."""
    return f"{count:,} {inflect(count, noun, plural or f'{noun}s')}"


def inflect(count: int, one: str, many: str) -> str:
    """Return the form of a word that goes with a number of things."""
    return one if count == 1 else many


def list_first(lines: Sequence[str], most: int = 10) -> list[str]:
    """Return the first lines, and one that says how many more there are."""
    left = len(lines) - most
    return [*lines[:most], *([f"and so for {left} more"] if left > 0 else [])]


def suggest_name(name: object, known: Iterable[str]) -> str:
    """Return the end of a message that names what is close to a name, or nothing."""
    import difflib

    close = difflib.get_close_matches(str(name), list(known), 1)
    return f". Did you mean {close[0]!r}?" if close else ""


def hide_password(address: str) -> str:
    """Return a URL with *** in the place of passwords."""
    # Up to the last @: a password that isn't encoded may have some, and slashes.
    hidden = re.sub(r"(://[^:@/?#]*:).*@", r"\1***@", address, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])(?:ssl)?password=)[^&]*", r"\1***", hidden)
