"""Records in which order functions of a module are called with which paths."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def record_calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, calls: list[str], *names: str) -> None:
    """Have each call of functions of a module be added to `calls`, as "FUNCTION NAME_OF_ITS_FIRST_PATH"."""

    def record(name: str) -> None:
        called = getattr(module, name)

        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            calls.append(f"{name} {Path(path).name}")
            return called(path, *arguments, **options)

        monkeypatch.setattr(module, name, call)

    for name in names:
        record(name)
