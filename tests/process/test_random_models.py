"""Random small models train under any strategy as in plain Keras, or are refused for a known reason.

INSITU_RANDOM_EXAMPLES is how many are drawn for each strategy, INSITU_RANDOM_SEED chooses which. Each failure
is printed with a command that repeats it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from keras_case_tools import STRATEGIES
from keras_comparison import Comparer, Verdict
from random_descriptions import Setting
from random_models import Hunt, descriptions

pytest.importorskip("tensorflow", reason="random models run on TensorFlow: pip install tensorflow")

EXAMPLES = int(os.environ.get("INSITU_RANDOM_EXAMPLES", "60"))
SEED = int(os.environ.get("INSITU_RANDOM_SEED", "1"))
BACKEND = os.environ.get("INSITU_RANDOM_BACKEND", "tensorflow")


@pytest.mark.slow
@pytest.mark.timeout(7200)  # for the thousands of examples of a long run
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_models_train_as_in_plain_keras(strategy: str) -> None:
    comparer = Comparer()
    try:
        hunt = Hunt(comparer, Setting(strategy, BACKEND), print)
        failures = hunt.run(EXAMPLES, SEED)
    finally:
        comparer.close()
    print(f"{strategy}: {hunt.counts}, {hunt.seconds:.0f} s")
    assert not failures, "\n" + "\n".join(map(str, failures))
    assert hunt.counts["right"] > EXAMPLES / 2


class ComparerByText:
    """Finds a difference wherever the description holds a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def verdict_of(self, description: dict[str, Any], strategy: str, backend: str) -> Verdict:
        differs = self.text in json.dumps(description)
        detail = "exact.calls[0]: [1] became [2]" if differs else ""
        return Verdict("random", strategy, backend, "different" if differs else "right", detail)


def hunt_for(text: str) -> Hunt:
    hunt = Hunt(ComparerByText(text), Setting("mirrored", "tensorflow"), lambda _: None, 200)  # type: ignore[arg-type]
    hunt.run(60, 1)
    return hunt


def test_a_difference_is_found_and_made_small() -> None:
    (failure,) = hunt_for('"mae"').found.values()
    heads = failure.description["model"]["heads"]
    assert [head["task"] for head in heads] == ["regression"]
    assert [call["call"] for call in failure.description["calls"]] == ["fit"]
    assert failure.description["model"]["towers"][0]["layers"][0][0] == "Dense"
    assert json.loads(str(failure).split("'")[1]) == failure.description


@pytest.mark.slow
def test_a_hunt_finds_the_same_again() -> None:
    first, second = hunt_for('"mae"'), hunt_for('"mae"')
    assert first.found == second.found
    assert first.counts == second.counts


class ComparerOfNumbers(Comparer):
    """Trainings of which each gives one number, by who trains."""

    def __init__(self, **numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def _run(self, command: dict[str, Any], strategy: str, backend: str) -> list[dict[str, Any]]:
        name = "nudged" if command["description"].get("nudged") else strategy
        result = {"exact": self.numbers[name], "shapes": "()", "chief": {}}
        return [{"status": "done", "result": result, "seconds": 0.0}]


@pytest.mark.parametrize(("nudged", "status"), [(1.000001, "different"), (1.00002, "unstable")])
def test_a_difference_tells_nothing_where_a_rounding_error_makes_one(nudged: float, status: str) -> None:
    comparer = ComparerOfNumbers(plain=1.0, mirrored=1.01, nudged=nudged)
    description = {"model": {"towers": []}}
    try:
        assert comparer.verdict_of(description, "mirrored", "tensorflow").status == status
    finally:
        comparer.close()


def test_a_hunt_ends_when_its_time_is_over() -> None:
    hunt = Hunt(ComparerByText("seed"), Setting("mirrored", "tensorflow"), lambda _: None)  # type: ignore[arg-type]
    hunt.limit = 0.0
    assert hunt.run(60, 1) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_descriptions_are_plain_data(strategy: str) -> None:
    @settings(max_examples=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(descriptions(Setting(strategy, "tensorflow")))
    def check(description: dict[str, Any]) -> None:
        assert json.loads(json.dumps(description)) == description

    check()
