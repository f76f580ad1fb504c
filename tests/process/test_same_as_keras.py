"""Small trainings come out under any strategy as in plain Keras, or are refused.

`KNOWN` lists the cases that don't yet. Each entry is checked too: a case that becomes right, or fails in
another way, must be changed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from keras_cases import BACKENDS, CASES, STRATEGIES
from keras_comparison import Comparer
from keras_known import KNOWN

pytest.importorskip("tensorflow", reason="the cases run on TensorFlow first: pip install tensorflow")
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    comparer = Comparer()
    yield comparer
    comparer.close()


def cells() -> list[Any]:
    """(case, strategy, backend) of all cases. Two workers and other backends than TensorFlow are slow."""
    found = []
    for backend in BACKENDS:
        for strategy in STRATEGIES:
            marks = [pytest.mark.slow] if strategy == "workers" or backend != "tensorflow" else []
            marks += [pytest.mark.torch] if backend == "torch" else []
            found += [
                pytest.param(
                    case.name, strategy, backend, marks=marks, id=f"{backend}-{strategy}-{case.name}"
                )
                for case in CASES.values()
                if backend in case.backends and strategy in case.strategies
            ]
    return found


@pytest.mark.parametrize(("case", "strategy", "backend"), cells())
def test_a_case_comes_out_as_in_plain_keras(
    comparer: Comparer, case: str, strategy: str, backend: str
) -> None:
    verdict = comparer.verdict(case, strategy, backend)
    wanted = KNOWN.get((backend, strategy), {}).get(case, "right")
    assert verdict.status == wanted, f"known as {wanted!r}; now {verdict.status!r}: {verdict.detail}"


def test_what_is_known_are_cases() -> None:
    """The table of known failures names nothing that isn't run."""
    run = {cell.values for cell in cells()}
    named = {(case, strategy, backend) for (backend, strategy), known in KNOWN.items() for case in known}
    assert named <= run
