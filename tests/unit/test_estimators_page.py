"""The examples of estimators.md in docs/how-to and docs/reference run as written, one after another.

Those that need a job are run by process/test_evaluator.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / folder / "estimators.md").read_text() for folder in ("how-to", "reference"))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = re.findall(r"```python estimator\n(.*?)```", PAGES, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/how-to/estimators.md", "exec"), names)
    assert (tmp_path / "served" / "00000100.keras").exists()
    assert "accuracy_baseline" in capsys.readouterr().out
