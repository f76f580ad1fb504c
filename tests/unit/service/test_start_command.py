"""The command line of a request starts the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import given, settings
from hypothesis import strategies as st

import insitu.cluster
from insitu.cli import build_app
from insitu.cluster import Request
from insitu.config import DeviceSettings
from insitu.service import format_start_command

APP: Any = build_app()
WORDS = st.text("abc -'\"$\\é", min_size=1, max_size=6).filter(lambda text: not text.startswith("-"))
COUNTS = st.none() | st.integers(1, 9)
REQUESTS = st.builds(
    Request,
    cache=st.sampled_from(["-", "a/b"]),
    job_dir=WORDS.map(Path),
    command=st.tuples(WORDS, st.sampled_from(["--epochs", "-x", "3"])),
    workers=COUNTS,
    shards=COUNTS,
    ps=st.none() | st.integers(0, 3),
    ps_backups=st.integers(0, 2),
    chief=st.booleans(),
    evaluator=st.booleans(),
    name=st.none() | st.just("nightly"),
    max_restarts=st.integers(0, 9),
    seed=st.integers(0, 2**63 - 1),
    threads=COUNTS,
    stall_timeout=st.sampled_from([0.5, 600.0, 12345678.0]),
    on_loss=st.sampled_from(["replace", "adopt", "restart"]),
    on_rebalance=st.sampled_from(["follow", "stay"]),
    standby=st.none() | st.integers(0, 3),
    memory_checkpoint=st.booleans(),
    gpus_per_worker=st.integers(0, 4),
    memory_per_worker=st.integers(0, 1 << 20),
    cores_per_worker=st.integers(0, 4),
    on_take_over=st.sampled_from(["wait", "resume"]),
    env=st.sampled_from([(), ("RATE",), ("RATE", "DEPTH")]),
    nodes=st.sampled_from([(), ("node-1",), ("node-0", "node-2")]),
    settings=st.builds(DeviceSettings, memory_limit=st.none() | st.integers(1, 9999)),
)


@settings(max_examples=15, deadline=None)
@given(REQUESTS)
def test_the_command_line_gives_the_same_request(request: Request) -> None:
    parsed: list[Request] = []
    arguments = format_start_command(request)

    def submit(paths: Any, given: Request) -> str:
        parsed.append(given)
        return "job-1"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(insitu.cluster, "submit", submit, raising=False)
        done = typer.testing.CliRunner().invoke(APP, arguments[1:])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    assert parsed == [request]


def test_defaults_are_left_out() -> None:
    request = Request("digits", Path("job"), ("train.py",))
    assert format_start_command(request) == ["insitu", "start", "--detach", "digits", "job", "train.py"]
