"""What the shell completes. The tasks of a job are in test_jobs.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import CliRunner

from insitu.base.paths import Paths
from insitu.cli import completion
from insitu.grid import bring_up


def test_the_shell_completes_a_dash_for_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        completion, "complete_cache", lambda incomplete: ["a"] if "a".startswith(incomplete) else []
    )
    assert completion.complete_start("") == ["a", "-"] and completion.complete_start("-") == ["-"]
    assert completion.complete_start("a") == ["a"]


@pytest.mark.parametrize(
    "words",
    ["quota", "drain", "start --node", "fs memory"],
)
def test_the_shell_completes_nodes(words: str, home: Path) -> None:
    bring_up(Paths(home), 2)
    given = f"insitu {words} no"
    result = CliRunner().run(
        [],
        env={
            "COMP_WORDS": given,
            "COMP_CWORD": str(len(given.split()) - 1),
            "_INSITU_COMPLETE": "complete_bash",
        },
        prog_name="insitu",
    )
    assert result.output.split() == ["node-0", "node-1"]
