"""Work that rooms register for standbys."""

from __future__ import annotations

import pytest

from insitu.base.process import preload_hooks


def test_each_function_runs_once_and_a_failure_stops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload_hooks, "_functions", [])
    calls: list[str] = []

    def fails() -> None:
        calls.append("fails")
        raise RuntimeError

    def works() -> None:
        calls.append("works")

    for function in (fails, works, works):
        preload_hooks.register_preload(function)
    preload_hooks.run_preloads()
    assert calls == ["fails", "works"]
