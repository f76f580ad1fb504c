"""Files that clients use at the same time stay right while nodes, the head and answers fail."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import pytest
from file_histories import Trial, hurry
from linearizability import LOST

SEEDS = int(os.environ.get("TEST_HISTORIES", "20"))


@pytest.mark.long
def test_nothing_acknowledged_is_lost_and_answers_agree(tmp_path: Path) -> None:
    faults, lost, done = Counter[str](), 0, 0
    with hurry():
        for seed in range(SEEDS):
            trial = Trial(tmp_path / str(seed), seed)
            with contextlib.closing(trial.lab):
                trial.play(clients=3, operations=6)
            assert trial.explain(), (seed, trial.calls)
            faults += Counter(trial.faults)
            lost += sum(call.result is LOST for call in trial.calls)
            done += len(trial.calls)
    print(
        f"{SEEDS} histories: {done} calls, {lost} without an answer, {faults.total()} faults: {dict(faults)}"
    )
    assert len(faults) == 7, "each kind of fault was there"
    assert 0 < lost < done, "some answers were lost"
