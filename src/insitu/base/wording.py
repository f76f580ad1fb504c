"""Words that depend on a number, in what users read."""

from __future__ import annotations


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number and what it counts: `1 node`, `1,200 nodes`. `plural` is for nouns that take no `s`."""
    return f"{count:,} {inflect(count, noun, plural or f'{noun}s')}"


def inflect(count: int, one: str, many: str) -> str:
    """Return the form of a word that goes with a number of things."""
    return one if count == 1 else many
