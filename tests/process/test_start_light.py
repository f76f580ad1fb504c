"""The command line and the processes around a training load nothing heavy, which is what keeps them fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_runs import PATIENCE, Insitu, insitu_at

WEB = ("fastapi", "starlette", "uvicorn", "jinja2", "pydantic")
HEAVY = (
    *("keras", "tensorflow", "jax", "torch", "pyarrow", "rich", "psutil", "multiprocessing", "asyncio"),
    "msgspec",
    *WEB,
)
"""What `start` and `ps` do without."""
TASK_HEAVY = (*HEAVY, "numpy", "sqlite3", "typer", "subprocess")


def loaded_after(insitu: Insitu, program: str, heavy: tuple[str, ...], *arguments: str) -> list[str]:
    """Which of `heavy` are loaded once `program` has run with `arguments`."""
    program += f"\nfinally:\n    print('LOADED', [m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=insitu.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=insitu.folder,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("LOADED ")]
    return list(json.loads(line.removeprefix("LOADED ").replace("'", '"')))


@pytest.mark.parametrize(
    "arguments",
    [("ps",), ("ps", "--json"), ("start", "--workers", "1", "data/train", ".", "train.py"), ("logs", "t")],
)
def test_the_command_line_loads_nothing_heavy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script("print('hello')")
        if arguments[0] == "logs":
            insitu.start("--workers", "1")
        program = "import sys\nfrom insitu.cli import main\ntry:\n    main()"
        assert loaded_after(insitu, program, HEAVY, *arguments) == []


def test_a_task_loads_next_to_nothing_before_its_script(tmp_path: Path) -> None:
    with insitu_at(tmp_path) as insitu:
        insitu.script(f"import sys; print([m for m in {TASK_HEAVY!r} if m in sys.modules])")
        assert insitu.start("--workers", "1", "--no-prefix").out == "[]\n"
