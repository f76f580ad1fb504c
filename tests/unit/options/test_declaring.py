"""What is declared of an option, and how values that it can't have are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import InputError, JobSpecError
from insitu.base.spec import CODECS
from insitu.grid.ray_data import READERS
from insitu.grid.sources import FORMATS
from insitu.options import ImportOptions, JobOptions, options_of

JOB = {option.name: option for option in options_of(JobOptions)}
IMPORT = {option.name: option for option in options_of(ImportOptions)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1. Received: 0"),
        ({"max_restarts": 100_001}, "--max-restarts must be at most 100000. Received: 100001"),
        ({"stall_timeout": float("inf")}, "--stall-timeout must be positive and finite. Received: inf"),
        ({"stall_timeout": 0.0}, "--stall-timeout must be positive and finite. Received: 0"),
        ({"evaluator_grace": float("nan")}, "--evaluator-grace must be finite. Received: nan"),
        ({"on_loss": "weep"}, "--on-loss must be replace, adopt or restart. Received: weep"),
        ({"on_rebalance": "run"}, "--on-rebalance must be follow or stay. Received: run"),
        ({"engine": "server"}, "--engine must be local, hosts or k8s. Received: server"),
        ({"engine": "k9"}, "--engine must be local, hosts or k8s. Received: k9"),
        ({"cores_per_worker": -1}, "--cores-per-worker must be at least 0. Received: -1"),
        ({"seed": -1}, "--seed must be at least 0. Received: -1"),
        ({"seed": 1 << 31}, "--seed must be at most 2147483647. Received: 2147483648"),
    ],
)
def test_a_value_that_a_job_can_not_have_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        JobOptions("a", Path("job"), ("train.py",), **given)


def test_a_value_that_an_import_can_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"--compress must be lz4 or zstd. Received: gzip"):
        ImportOptions("a", (), compress="gzip")  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "every"), [("never", 0), ("epoch", 1), ("1", 1), ("12", 12)])
def test_a_word_stands_for_a_number(text: str, every: int) -> None:
    assert JOB["refresh"].read(text) == every
    assert JOB["ps"].read("auto") is None and JOB["ps"].read("2") == JOB["ps"].read(2) == 2


def test_a_number_that_is_too_large_is_refused_by_its_bound() -> None:
    with pytest.raises(JobSpecError, match=r"--ps must be at most 100000. Received: 200000"):
        JobOptions("a", Path("job"), ("train.py",), ps=JOB["ps"].read("200000"))


@pytest.mark.parametrize("text", ["0", "-1", "often", "1.5", "", "٣"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--refresh must be never, epoch, or a number, at least 1"):
        JOB["refresh"].read(text)


def test_choices_are_those_of_what_takes_them() -> None:
    assert IMPORT["compress"].choices == CODECS
    assert set(IMPORT["format"].choices) == set(FORMATS)
    assert all(f"{name}" in IMPORT["reader"].help for name in READERS)
