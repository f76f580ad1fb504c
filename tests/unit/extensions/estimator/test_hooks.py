"""Hooks hear of each step once, by global steps."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from models import image_model, in_shards

from insitu.base.errors import InputError, TrainingError
from insitu.extensions.estimator import hooks
from insitu.extensions.estimator.hooks import (
    LoggingTensorHook,
    NanLossDuringTrainingError,
    NanTensorHook,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StepCounterHook,
    StopAtStepHook,
)
from insitu.train import MultiWorkerMirroredStrategy, OneDeviceStrategy

# Keras, as it counts steps on PyTorch
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def fit(*callbacks: Any, epochs: int = 2, rows: int = 40, scale: float = 1.0, **options: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **options)
    x = np.arange(rows * 3, dtype="float32").reshape(rows, 3) / rows * scale
    model.fit(x, x[:, :1], batch_size=10, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


class Asking(SessionRunHook):
    """A user's own: asks for values in each structure, and stops."""

    def __init__(self, fetches: Any, stop_at: int) -> None:
        super().__init__()
        self.fetches, self.stop_at = fetches, stop_at
        self.heard: list[Any] = []
        self.events: list[str] = []

    def begin(self) -> None:
        self.events.append(f"begin {self.global_step}")

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        return SessionRunArgs(self.fetches)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        assert run_context.model is self.model and not run_context.stop_requested
        self.heard.append((self.global_step, run_values.results))
        if self.global_step == self.stop_at:
            run_context.request_stop()

    def end(self) -> None:
        self.events.append(f"end {self.global_step}")


def test_a_users_hook_gets_the_values_that_it_names() -> None:
    names = {"a": "loss", "b": ["mae", "loss"], "c": None}
    hook = Asking(names, stop_at=6)
    fit(hook)
    assert hook.events == ["begin 0", "end 6"] and [step for step, _ in hook.heard] == [1, 2, 3, 4, 5, 6]
    for _, values in hook.heard:
        assert values["a"] == values["b"][1] > 0 and values["c"] is None
    with pytest.raises(InputError, match=r"by name: loss, mae. Received: 'accuracy'"):
        fit(Asking("accuracy", 3))


class Order(SessionRunHook):
    """Notes what comes before what, and how many updates the model has had by then."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def before_run(self, run_context: SessionRunContext) -> None:
        self.events.append(("before", hooks.read_global_step(run_context.model)))

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        self.events.append(("after", hooks.read_global_step(run_context.model)))
        assert run_values.results is None


@pytest.mark.parametrize("strategy", [None, MultiWorkerMirroredStrategy])
def test_before_run_comes_before_the_step(strategy: Any) -> None:
    order = Order()
    with strategy(context=in_shards((0, 1), 2)).scope() if strategy else contextlib.nullcontext():
        fit(order, epochs=1)
    expected = [each for step in range(4) for each in (("before", step), ("after", step + 1))]
    assert order.events == expected


def test_a_hook_of_tensorflow_needs_no_init_and_has_no_session() -> None:
    class Plain(SessionRunHook):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
            return SessionRunArgs("loss")

        def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
            self.losses.append(run_values.results)

    hook = Plain()
    fit(hook)
    assert len(hook.losses) == hook.global_step == 8
    with pytest.raises(InputError, match=r"Received: end\(self, session\) in Ends"):
        type("Ends", (SessionRunHook,), {"end": lambda self, session: None})
    with pytest.raises(InputError, match="Received: after_create_session in Makes"):
        type("Makes", (SessionRunHook,), {"after_create_session": lambda self, session, coord: None})
    type("Both", (SessionRunHook,), {"end": lambda self, session=None: None})


@pytest.mark.parametrize("every", [0, -1, 2.5, True])
def test_numbers_of_steps_are_checked(every: Any) -> None:
    with pytest.raises(InputError, match=r"LoggingTensorHook\.every_n_iter is a number of steps"):
        LoggingTensorHook(["loss"], every)
    with pytest.raises(InputError, match=r"StepCounterHook\.every_n_steps is a number of steps"):
        StepCounterHook(every)


def test_training_stops_at_a_step_over_several_fits() -> None:
    assert hooks.read_global_step(fit(StopAtStepHook(num_steps=3))) == 3
    assert hooks.read_global_step(fit(StopAtStepHook(last_step=5))) == 5
    with pytest.raises(InputError, match="one of num_steps and last_step"):
        StopAtStepHook()
    with pytest.raises(InputError, match="one of num_steps and last_step"):
        StopAtStepHook(1, 2)


def test_values_are_printed_every_so_many_steps(capsys: pytest.CaptureFixture[str]) -> None:
    fit(LoggingTensorHook(["loss"], 3), LoggingTensorHook({"error": "mae"}, 100, at_end=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["step 3: loss", "step 6: loss", "step 8: error"]
    fit(LoggingTensorHook(["loss"], 8, formatter=lambda values: f"<{sorted(values)}>"))
    assert capsys.readouterr().out == "step 8: <['loss']>\n"


@pytest.mark.parametrize("every", [0, -1, True, 1.5])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    LoggingTensorHook(["loss"], 1)
    with pytest.raises(InputError, match="is a number of steps, 1 or more"):
        LoggingTensorHook(["loss"], every)


def test_steps_are_counted_by_time(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(hooks, "_stopwatch", lambda: lambda: 2.0)
    fit(StepCounterHook(4))
    assert capsys.readouterr().out == "step 4: 2 steps/s\nstep 8: 2 steps/s\n"


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(NanLossDuringTrainingError, match=r"Received: loss = (nan|inf) at step"):
        fit(NanTensorHook(), scale=1e30)
    model = fit(NanTensorHook(fail_on_nan_loss=False), scale=1e30)
    assert hooks.read_global_step(model) < 8
    assert hooks.read_global_step(fit(NanTensorHook())) == 8


def test_what_has_no_steps_to_count_is_refused() -> None:
    if keras.backend.backend() != "torch":  # there Keras itself has no such steps
        with pytest.raises(InputError, match="steps_per_execution=2"):
            fit(NanTensorHook(), steps_per_execution=2)
    with pytest.raises(TrainingError, match="Compile it with an optimizer"):
        hooks.read_global_step(keras.Sequential([keras.layers.Dense(1)]))


def test_a_task_that_enters_behind_a_steps_beginning_asks_for_its_values() -> None:
    """It takes the place of one that was lost while its hooks heard of the step's end."""
    hook = NanTensorHook()
    with OneDeviceStrategy().scope():
        hook.set_model(image_model())
    hook.on_train_begin()
    hook.on_train_batch_end(0, {"loss": 1.0})
    with pytest.raises(NanLossDuringTrainingError):
        hook.on_train_batch_end(1, {"loss": float("nan")})
