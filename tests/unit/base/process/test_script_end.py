"""What is done once the script of a task has ended."""

from __future__ import annotations

import os

import pytest

from insitu.base.process import script_end


def test_the_last_one_comes_first_and_an_error_is_that_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_end, "_process", [])
    assert not script_end.runs_script()
    script_end.begin_script()
    assert script_end.runs_script()
    child = os.fork()
    if child == 0:
        os._exit(7 if not script_end.runs_script() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    done: list[str] = []
    script_end.call_at_script_end(lambda: done.append("first"))
    script_end.call_at_script_end(lambda: done.append("second"))
    script_end.end_script()
    assert done == ["second", "first"]
    script_end.end_script()
    assert len(done) == 2
    script_end.call_at_script_end(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        script_end.end_script()
