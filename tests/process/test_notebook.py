"""The notebook of examples/notebook runs from its first cell to its last. By `make test-notebook`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "examples" / "notebook" / "digits.ipynb"


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each cell has printed and shown, by its first line."""
    import nbclient
    import nbformat

    monkeypatch.setenv("KERAS_BACKEND", "jax")
    notebook = nbformat.read(FILE, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=200, kernel_name="python3")
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source.splitlines()[0]: "".join(map(_read_output, cell.outputs)) for cell in cells}


def _read_output(output: Any) -> str:
    return str(output["text"] if "text" in output else output["data"]["text/plain"])


@pytest.mark.notebook
def test_the_notebook_trains_on_two_workers_and_shows_the_history(outputs: dict[str, str]) -> None:
    (run,) = [text for line, text in outputs.items() if "insitu.run" in line]
    assert re.search(r"^train-\w{6}$", run, re.MULTILINE) and "[insitu] job finished" in run
    (table,) = [text for line, text in outputs.items() if line.startswith("print(f\"{'epoch'")]
    losses = [float(line.split()[1]) for line in table.splitlines()[1:]]
    assert len(losses) == 5 and losses[-1] < losses[0] / 2
    (same,) = [text for line, text in outputs.items() if "array_equal" in line]
    assert same == "[True, True, True, True]"
    guessed, written = outputs["model = make_model()"].splitlines()
    matches = [a == b for a, b in zip(guessed.split()[1:], written.split()[1:], strict=True)]
    assert sum(matches) >= 6
