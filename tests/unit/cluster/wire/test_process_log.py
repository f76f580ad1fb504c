"""The log of a process that runs for months."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from insitu.cluster.wire.process_log import rotate_long_log
log = Path(sys.argv[1])
print("before", flush=True)
print(rotate_long_log(log, 1), file=sys.stderr, flush=True)
print(rotate_long_log(log, 100), file=sys.stderr, flush=True)
print("after", flush=True)
"""


def run_program(log: Path, output: Path) -> None:
    with output.open("ab") as file:
        subprocess.run([sys.executable, "-c", PROGRAM, str(log)], stdout=file, stderr=file, check=True)


def test_a_long_log_is_put_aside_and_a_new_one_begun(tmp_path: Path) -> None:
    log, older = tmp_path / "agent.log", tmp_path / "agent.log.1"
    older.write_text("the part before")
    run_program(log, log)
    assert older.read_text() == "before\n"
    assert log.read_text() == "True\nFalse\nafter\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_what_a_scheduler_keeps_stays_where_it_is(tmp_path: Path) -> None:
    log, other = tmp_path / "agent.log", tmp_path / "slurm.out"
    log.write_text("of an agent before")
    run_program(log, other)
    assert other.read_text() == "before\nFalse\nFalse\nafter\n"
    assert os.listdir(tmp_path) and log.read_text() == "of an agent before"


def test_a_log_that_others_have_replaced_isnt_written_to(tmp_path: Path) -> None:
    victim, log = tmp_path / "victim", tmp_path / "agent.log"
    victim.write_text("mine")
    log.symlink_to(victim)
    run_program(log, tmp_path / "output")
    assert victim.read_text() == "mine" and log.is_symlink()
