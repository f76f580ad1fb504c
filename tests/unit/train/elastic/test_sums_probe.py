"""Hosts that round differently. There is one processor here: others are made of other notes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import keras
import pytest

from insitu.base.context import ALLOW_MIXED_ENV
from insitu.base.errors import NumericsMismatch
from insitu.train.elastic import lockstep
from insitu.train.elastic.lockstep import check_same_sums, describe_sums, probe_sums

TWO = ("10.0.0.1:20000", "10.0.0.2:20000")
PROGRAM = "from insitu.train.elastic.lockstep import probe_sums; print(probe_sums())"


def test_another_process_of_this_host_gives_the_same_hash() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100)
    assert done.stdout.split()[-1:] == [probe_sums()], done.stderr


@pytest.mark.parametrize("name", ["matmul", "conv", "sum", "exp", "tanh"])
def test_the_last_bit_of_any_operation_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = getattr(keras.ops, name)

    def round_differently(*given: Any, **options: Any) -> Any:
        return operation(*given, **options) * (1 + 2**-23)

    monkeypatch.setattr(keras.ops, name, round_differently)
    assert probe_sums.__wrapped__() != probe_sums()


def test_nothing_is_computed_on_one_host_or_where_hosts_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_MIXED_ENV, raising=False)
    assert describe_sums(TWO, "a") == {"sums": probe_sums(), "node": "a"}

    def fail() -> str:
        raise AssertionError

    monkeypatch.setattr(lockstep, "probe_sums", fail)
    assert describe_sums(("10.0.0.1:20000", "10.0.0.1:20001"), "a") == describe_sums((), "a") == {}
    monkeypatch.setenv(ALLOW_MIXED_ENV, "1")
    assert describe_sums(TWO, "a") == {}


def test_hosts_that_differ_are_named() -> None:
    same = [{"unit": 0, "sums": "f0", "node": node} for node in ("a", "b", "a")]
    check_same_sums([*same, {"unit": -1}])
    with pytest.raises(
        NumericsMismatch, match=r"same small sums; a, b: f0; c: 1e\. `insitu nodes`"
    ) as raised:
        check_same_sums([*same, {"sums": "1e", "node": "c"}])
    assert raised.value.is_final
