"""A training ends by its scores, in all its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import image_model, image_rows

from insitu.base.errors import InputError
from insitu.base.evaluations import Evaluation
from insitu.extensions.estimator import (
    EvalSpec,
    RunConfig,
    TrainSpec,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
    train_and_evaluate,
)
from insitu.extensions.estimator.early_stopping import find_scores, has_stagnated
from insitu.extensions.estimator.hooks import read_global_step
from insitu.train import OneDeviceStrategy

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 40))
def test_stagnation_is_counted_from_the_best(values: list[int], max_steps: int) -> None:
    scores = [(10 * (index + 1), float(value)) for index, value in enumerate(values)]
    expected = False
    for index in range(len(values)):
        best = values.index(min(values[: index + 1]))
        expected = expected or (best < index and 10 * (index - best) >= max_steps)
    assert has_stagnated(scores, max_steps) == expected


@pytest.mark.parametrize(
    ("hook", "scores", "ends"),
    [
        (stop_if_higher_hook("loss", 2.0), [1.0, 2.0], False),
        (stop_if_higher_hook("loss", 2.0), [1.0, 2.1, 1.0], True),
        (stop_if_lower_hook("loss", 1.0), [2.0, 1.0], False),
        (stop_if_lower_hook("loss", 1.0), [2.0, 0.9, 2.0], True),
        (stop_if_no_increase_hook("loss", 10), [1.0, 2.0, 3.0], False),
        (stop_if_no_increase_hook("loss", 10), [1.0, 2.0, 1.5], True),
        (stop_if_no_decrease_hook("loss", 10), [3.0, 2.0, 1.0], False),
        (stop_if_no_decrease_hook("loss", 10), [3.0, 2.0, 2.5], True),
    ],
)
def test_each_rule_looks_in_its_direction(hook: Any, scores: list[float], ends: bool) -> None:
    assert hook._rule([(10 * (step + 1), score) for step, score in enumerate(scores)]) is ends


def test_what_is_no_number_is_never_the_best() -> None:
    nan = float("nan")
    assert not has_stagnated([(10, nan), (20, 3.0), (30, 2.0)], 10)
    assert has_stagnated([(10, 3.0), (20, nan), (30, nan)], 20)


def test_scores_are_found_by_name_and_step() -> None:
    found = [Evaluation("a", None, None, step, {"loss": 1.0 / step}, 0.0, 0.0) for step in (1, 2, 4)]
    assert find_scores(found, "loss", 2) == [(2, 0.5), (4, 0.25)]
    with pytest.raises(InputError, match=r"evaluations: loss. Received: 'accuracy'"):
        find_scores(found, "accuracy", 0)


def test_an_estimator_is_no_name_of_a_metric() -> None:
    with pytest.raises(InputError, match=r"name of a metric, such as 'loss'. Received: object"):
        stop_if_no_decrease_hook(object(), 1000)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="takes metric_name, max_steps_without_decrease by place"):
        stop_if_no_decrease_hook(object(), "loss", 1000)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        (lambda: stop_if_higher_hook("loss", 0.0), 4),
        (lambda: stop_if_higher_hook("loss", 0.0, min_steps=3), 6),
        (lambda: stop_if_higher_hook("loss", 1e9), 9),
        (lambda: stop_if_lower_hook("loss", 1e9), 4),
        (lambda: stop_if_no_increase_hook("constant", 4), 8),
        (lambda: stop_if_no_decrease_hook("constant", 4), 8),
    ],
)
def test_a_training_ends_at_the_checkpoint_behind_a_score(tmp_path: Path, hook: Any, steps: int) -> None:
    def constant(truth: Any, predicted: Any) -> Any:
        return keras.ops.zeros_like(predicted[:, 0])

    with OneDeviceStrategy().scope():
        model = image_model(metrics=[constant])
    data = image_rows()
    train_and_evaluate(
        model,
        TrainSpec(lambda: data, 9, [hook()]),
        EvalSpec(lambda: data, start_delay_secs=0, throttle_secs=0),
        config=RunConfig(tmp_path, save_checkpoints_steps=2),
    )
    assert read_global_step(model) == steps


def test_fit_alone_has_no_scores_to_stop_by() -> None:
    model = image_model()
    with pytest.raises(InputError, match=r"keras.callbacks.EarlyStopping"):
        model.fit(*image_rows(), verbose=0, callbacks=[stop_if_lower_hook("loss", 1.0)])
