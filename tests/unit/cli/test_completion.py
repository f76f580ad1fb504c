"""What the shell completes. The tasks of a job are in test_jobs.py."""

from __future__ import annotations

import pytest

from insitu.cli import completion


def test_the_shell_completes_a_dash_for_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        completion, "complete_cache", lambda incomplete: ["a"] if "a".startswith(incomplete) else []
    )
    assert completion.complete_start("") == ["a", "-"] and completion.complete_start("-") == ["-"]
    assert completion.complete_start("a") == ["a"]
