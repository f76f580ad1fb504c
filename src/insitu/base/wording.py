"""Words that depend on a number, in what users read."""

from __future__ import annotations

import re


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number and what it counts: `1 node`, `1,200 nodes`. `plural` is for nouns that take no `s`."""
    return f"{count:,} {inflect(count, noun, plural or f'{noun}s')}"


def inflect(count: int, one: str, many: str) -> str:
    """Return the form of a word that goes with a number of things."""
    return one if count == 1 else many


def hide_password(address: str) -> str:
    """Return a URL with *** in the place of passwords."""
    # Up to the last @: a password that isn't encoded may have some, and slashes.
    hidden = re.sub(r"(://[^:@/?#]*:).*@", r"\1***@", address, flags=re.DOTALL)
    return re.sub(r"((?:^|[?&])(?:ssl)?password=)[^&]*", r"\1***", hidden)
