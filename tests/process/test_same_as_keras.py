"""Small trainings come out under any strategy as in plain Keras, or are refused.

`KNOWN` lists the cases that don't yet. Each entry is checked too: a case that becomes right, or fails in
another way, must be changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from keras_cases import CASES, STRATEGIES
from keras_comparison import Comparer
from keras_known import KNOWN

pytest.importorskip("tensorflow", reason="the cases run on TensorFlow first: pip install tensorflow")
# All cells of TensorFlow take a quarter of an hour.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RECORDED = ("tensorflow",)
"""Backends of which `KNOWN` records every case. The others are run by `tests/support/keras_comparison.py`."""


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    comparer = Comparer()
    yield comparer
    comparer.close()


def cells() -> list[Any]:
    """Return (case, strategy, backend) of all cases of the recorded backends."""
    return [
        pytest.param(case.name, strategy, backend, id=f"{backend}-{strategy}-{case.name}")
        for backend in RECORDED
        for strategy in STRATEGIES
        for case in CASES.values()
        if backend in case.backends and strategy in case.strategies
    ]


@pytest.mark.parametrize(("case", "strategy", "backend"), cells())
def test_a_case_comes_out_as_in_plain_keras(
    comparer: Comparer, case: str, strategy: str, backend: str
) -> None:
    verdict = comparer.verdict(case, strategy, backend)
    wanted = KNOWN.get((backend, strategy), {}).get(case, "right")
    assert verdict.status == wanted, f"known as {wanted!r}; now {verdict.status!r}: {verdict.detail}"


def test_what_is_known_are_cases() -> None:
    """The table of known failures names nothing that isn't run."""
    known = {(case, strategy, backend) for (backend, strategy), cases in KNOWN.items() for case in cases}
    run = {
        (case.name, strategy, backend)
        for case in CASES.values()
        for backend in case.backends
        for strategy in case.strategies
    }
    assert known <= run
