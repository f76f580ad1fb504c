"""What is read for many viewers is kept within bounds."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from insitu.ui import state as module
from insitu.ui.state import Snapshots


def test_what_is_kept_is_bounded_by_number_and_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer of 512 pages of long lines filled the memory."""
    monkeypatch.setattr(module, "_MOST", 5)
    monkeypatch.setattr(module, "_MOST_CHARACTERS", 1000)

    async def read() -> None:
        kept = Snapshots()
        for number in range(9):
            await kept.get(number, lambda: {"a": ["x" * 10, ("y",)]})
        assert list(kept._values) == [4, 5, 6, 7, 8] and kept._characters == 55
        for _ in range(2):
            await kept.get("long", lambda: {"log": "x" * 990}, fresh=-1)
        assert list(kept._values) == ["long"] and kept._characters == 990
        await kept.get("longer", lambda: b"x" * 5000)
        assert list(kept._values) == ["longer"] and kept._characters == 5000

    asyncio.run(read())


def test_one_reads_for_all_and_what_fails_leaves_nothing() -> None:
    async def read() -> None:
        kept, calls = Snapshots(), list[int]()

        def count() -> int:
            calls.append(1)
            return len(calls)

        def fail() -> None:
            raise OSError("gone")

        found = await asyncio.gather(*(kept.get("x", count) for _ in range(5)))
        assert found == [1] * 5 and calls == [1]
        failed = await asyncio.gather(*(kept.get("y", fail) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(each, OSError) for each in failed)
        assert list(kept._values) == ["x"] and not kept._locks

    asyncio.run(read())
