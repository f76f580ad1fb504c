"""The examples of estimators in docs/how-to/estimators.md run as written, one after another. Those that need
a job are run by process/test_evaluator.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "estimators.md").read_text()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras, as it saves
def test_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = re.findall(r"```python estimator\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/how-to/estimators.md", "exec"), names)
    assert (tmp_path / "served" / "00000100.keras").exists()
    assert "accuracy_baseline" in capsys.readouterr().out
