"""Samples are read back, whatever happened while they were written, and stay few."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.measure import task_samples
from insitu.base.measure.task_samples import Sample, SampleWriter, read_last_samples, read_samples, thin


def sample(number: int, attempt: int = 1, steps: int | None = None) -> Sample:
    return Sample(at=1e9 + number, attempt=attempt, started=1e9, steps=number if steps is None else steps)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "task" / "samples.jsonl"
    written = Sample(
        at=1e9,
        attempt=2,
        started=9e8,
        epoch=1,
        step=3,
        call=1,
        updates=7,
        steps=5,
        rows=640,
        metrics={"loss": 0.5, "nothing": math.inf},
        place="gradient",
        seconds={"gradient": 0.25},
        last={"worker:1": 3},
        cpu=1.5,
        memory=1 << 30,
        gpus=[{"index": 0, "utilization": 0.5, "memory": 7}],
    )
    SampleWriter(path).write(written)
    SampleWriter(path).write(sample(2))
    assert read_samples(path) == [written, sample(2)] == read_last_samples(path)
    assert os.stat(path).st_mode & 0o077 == 0


def test_lines_that_were_cut_off_or_come_from_elsewhere_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    later = sample(1).to_line().replace(b'{"at"', b'{"of_a_later_version":[],"at"')
    path.write_bytes(b'[]\n{"at":1}\nnonsense\n\xff\n' + later + b'{"at":1e9,"attempt":1,"sta')
    SampleWriter(path).write(sample(2))
    assert read_samples(path) == [sample(1), sample(2)]


@pytest.mark.parametrize(
    "field",
    [
        {"at": "1"},
        {"at": math.nan},
        {"cpu": 10**400},
        {"steps": 1.5},
        {"steps": 10**400},
        {"rows": None},
        {"updates": "7"},
        {"metrics": {"loss": "low"}},
        {"metrics": {"\ud800": 1.0}},
        {"metrics": [1.0]},
        {"seconds": {"gradient": None}},
        {"last": {"worker:1": [1]}},
        {"place": 5},
        {"gpus": [{}]},
        {"gpus": [{"index": 0, "utilization": "much", "memory": 1}]},
        {"gpus": 5},
    ],
)
def test_what_no_task_has_measured_is_passed_over(field: dict[str, Any], tmp_path: Path) -> None:
    """A host can send any line: it ended `insitu top`, the page's charts, and the numbers of all jobs."""
    line = json.dumps({**asdict(sample(1)), **field}).encode()
    path = tmp_path / "samples.jsonl"
    path.write_bytes(sample(0).to_line() + line + b"\n" + b"[" * 100_000 + b"\n" + sample(2).to_line())
    assert [each.at for each in read_samples(path)] == [1e9, 1e9 + 2]


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "samples.jsonl") == [] == read_last_samples(tmp_path / "samples.jsonl")


def test_the_last_samples_of_a_long_file_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b"".join(sample(number).to_line() for number in range(2000)))
    last = read_last_samples(path)
    assert 100 < len(last) < 2000
    assert last == [sample(number) for number in range(2000 - len(last), 2000)]


def test_a_file_that_has_become_long_is_thinned_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_samples, "MOST", 40)
    monkeypatch.setattr(task_samples, "KEPT", 20)
    monkeypatch.setattr(task_samples, "_NEWEST", 5)
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path)
    for number in range(500):
        writer.write(sample(number))
        assert len(read_samples(path)) <= 40
    kept = [each.steps for each in read_samples(path)]
    assert kept == sorted(set(kept)) and kept[-1] == 499
    # None of the time is missing.
    assert kept[0] == 0 and max(b - a for a, b in pairwise(kept)) < 140


def test_a_full_disk_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "samples.jsonl"
    writer = SampleWriter(path)
    writer.write(sample(1))

    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(task_samples, "_append_line", refuse)
        writer.write(sample(2))
    writer.write(sample(3))
    assert read_samples(path) == [sample(1), sample(3)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.integers(0, 2)), max_size=120),
    st.integers(1, 60),
)
def test_thinning_keeps_ends_of_incarnations_and_order(
    deltas: list[tuple[int, float, int]], most: int
) -> None:
    samples, attempt, at, steps = [], 1, 0.0, 0
    for restarts, seconds, more in deltas:
        attempt, steps = (attempt + 1, 0) if restarts == 3 else (attempt, steps + more)
        at += seconds
        samples.append(Sample(at=at, attempt=attempt, started=0.0, steps=steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_samples, "_NEWEST", min(5, most))
        kept = thin(samples, most)
    assert len(kept) <= most
    assert kept[-1:] == samples[-1:]
    assert kept == sorted(kept, key=lambda each: each.at)
    if len(samples) <= most:
        assert kept == samples
