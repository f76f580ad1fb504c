from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from insitu.cluster.agents.records import change_head, read_head
from insitu.cluster.agents.succession import Succession, note_successor
from insitu.errors import ClusterError
from insitu.paths import Paths

TAKEN = {"node": "b", "from": "10.0.0.1:7000", "at": 1.8e9, "why": "2 of 3 agents had been without a head"}
PROGRAM = "import pathlib, sys; open(pathlib.Path(sys.argv[1]) / 'began', 'a').write('x')"


def test_the_process_runs_where_the_head_has_taken_over_and_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = change_head(Paths(tmp_path), taken_over=TAKEN)
    began = tmp_path / "began"
    with closing(Succession(Paths(tmp_path), record, (sys.executable, "-c", PROGRAM))) as succession:
        assert "b has taken over from the head at 10.0.0.1:7000, 2027-" in caplog.text
        assert "2 of 3 agents had been without a head" in caplog.text
        now, deadline = 100.0, time.monotonic() + 60
        while not began.exists() or len(began.read_text()) < 2:
            succession.advance(now)
            now += 1.0
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert now > 130  # not at once


def test_a_head_that_somebody_has_brought_up_has_nothing_to_succeed_in(tmp_path: Path) -> None:
    record = change_head(Paths(tmp_path), epoch=1)
    with closing(Succession(Paths(tmp_path), record, ("false",))) as succession:
        succession.advance(1e9)
        assert succession._process is None


def test_a_head_ends_for_one_of_its_cluster_with_a_higher_epoch_alone(tmp_path: Path) -> None:
    record = change_head(Paths(tmp_path), epoch=7)
    message = {"cluster": record.cluster, "epoch": 1 << 20, "address": "10.0.0.2:7000"}
    for wrong in ({"cluster": "c" * 32}, {"epoch": 7}, {"epoch": "8"}, {"address": None}):
        with pytest.raises(ClusterError, match="A head is replaced by"):
            note_successor(Paths(tmp_path), record, {**message, **wrong})
    found = read_head(Paths(tmp_path))
    assert found is not None and found.successor == ""
    note_successor(Paths(tmp_path), record, message)
    found = read_head(Paths(tmp_path))
    assert found is not None and found.successor == "10.0.0.2:7000"
