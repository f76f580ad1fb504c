"""Small trainings come out under any strategy as in plain Keras, or are refused.

`KNOWN` lists the cases that are refused. Each entry is checked too: a case that becomes right, or fails in
another way, must be changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from keras_case_tools import BACKENDS, STRATEGIES
from keras_cases import CASES
from keras_comparison import Comparer
from keras_known import KNOWN

pytestmark = pytest.mark.timeout(400)

QUICK = ("loss_lambda_that_sums", "metric_that_keeps_the_largest", "validation_steps")
"""Cases that run with two devices on TensorFlow each time; all others are slow."""


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    comparer = Comparer()
    yield comparer
    comparer.close()


def marks_of(case: str, strategy: str, backend: str) -> list[Any]:
    is_quick = (strategy, backend) == ("mirrored", "tensorflow") and case in QUICK
    return [pytest.mark.torch] * (backend == "torch") + [pytest.mark.slow] * (not is_quick)


def cells() -> list[Any]:
    """Return (case, strategy, backend) of all cases. To change the backend ends all processes that train."""
    found = [
        (case.name, strategy, backend)
        for backend in BACKENDS
        for strategy in STRATEGIES
        for case in CASES.values()
        if backend in case.backends and strategy in case.strategies
    ]
    return [pytest.param(*cell, id="-".join(reversed(cell)), marks=marks_of(*cell)) for cell in found]


@pytest.mark.parametrize(("case", "strategy", "backend"), cells())
def test_a_case_comes_out_as_in_plain_keras(
    comparer: Comparer, case: str, strategy: str, backend: str
) -> None:
    pytest.importorskip(backend)
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
