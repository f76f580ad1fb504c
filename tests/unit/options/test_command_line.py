"""The command line of a request starts the same job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import insitu.cluster
from insitu.options import JobOptions, format_options
from insitu.ui.forms import write_fields

WORDS = st.text("abc -'\"$\\é", min_size=1, max_size=6).filter(lambda text: not text.startswith("-"))
COUNTS = st.none() | st.integers(1, 9)
REQUESTS = st.builds(
    JobOptions,
    cache=st.sampled_from(["-", "a/b"]),
    job_dir=WORDS.map(Path),
    command=st.tuples(WORDS, st.sampled_from(["--epochs", "-x", "3"])),
    workers=COUNTS,
    shards=COUNTS,
    ps=st.none() | st.integers(0, 3),
    ps_backups=st.integers(0, 2),
    chief=st.booleans(),
    evaluator=st.booleans(),
    name=st.none() | st.sampled_from(["nightly", "v1.0"]),
    max_restarts=st.integers(0, 9),
    seed=st.integers(0, 2**31 - 1),
    threads=COUNTS,
    stall_timeout=st.sampled_from([0.5, 600.0, 12345678.0]),
    on_loss=st.sampled_from(["replace", "adopt", "restart"]),
    on_rebalance=st.sampled_from(["follow", "stay"]),
    standby=st.none() | st.integers(0, 3),
    memory_checkpoint=st.booleans(),
    gpus_per_worker=st.integers(0, 4),
    memory_per_worker=st.integers(0, 1 << 20),
    cores_per_worker=st.integers(0, 4),
    env=st.sampled_from([(), ("RATE",), ("RATE", "DEPTH")]),
    nodes=st.sampled_from([(), ("node-1",), ("node-0", "node-2")]),
    memory_limit=st.none() | st.integers(1, 9999),
    refresh=st.integers(0, 3),
    virtual_devices=st.none() | st.just(("cpu", 2)),
)


@settings(max_examples=6, deadline=None)
@given(REQUESTS)
def test_the_command_line_gives_the_same_request(request: JobOptions) -> None:
    parsed: list[JobOptions] = []
    arguments = request.format_command()

    def submit(paths: Any, given: JobOptions) -> str:
        parsed.append(given)
        return "job-1"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(insitu.cluster, "submit", submit, raising=False)
        done = CliRunner().run(arguments[1:])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    assert parsed == [replace(request, detach=True)]


def test_defaults_are_left_out() -> None:
    request = JobOptions("digits", Path("job"), ("train.py",))
    assert request.format_command() == ["insitu", "start", "--detach", "digits", "job", "train.py"]


def test_texts_stay_as_they_are_and_whole_numbers_lose_their_point() -> None:
    given = JobOptions("digits", Path("job"), ("train.py",), name="v1.0", env=("A.0",), stall_timeout=90.0)
    assert format_options(given) == ["--name", "v1.0", "--stall-timeout", "90", "--env", "A.0"]
    assert write_fields(given) == {"name": "v1.0", "stall_timeout": "90", "env": "A.0"}
