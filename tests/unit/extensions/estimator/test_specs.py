from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import InputError
from insitu.extensions.estimator.exporters import FinalExporter
from insitu.extensions.estimator.hooks import NanTensorHook
from insitu.extensions.estimator.specs import EvalSpec, RunConfig, TrainSpec, bind_input, check_data


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TrainSpec([1]), r"TrainSpec.input_fn must be a function .* Received: list"),
        (lambda: TrainSpec(lambda: 0, max_steps=0), "TrainSpec.max_steps .* Received: 0"),
        (lambda: TrainSpec(lambda: 0, max_steps=1.5), "Received: 1.5"),
        (lambda: EvalSpec(3), "EvalSpec.input_fn"),
        (lambda: EvalSpec(lambda: 0, steps=-1), "EvalSpec.steps"),
        (lambda: EvalSpec(lambda: 0, throttle_secs=-1), "throttle_secs .* Received: -1"),
        (lambda: EvalSpec(lambda: 0, start_delay_secs=float("nan")), "start_delay_secs"),
        (lambda: EvalSpec(lambda: 0, hooks=[NanTensorHook()]), "Received: NanTensorHook in EvalSpec.hooks"),
        (lambda: EvalSpec(lambda: 0, 100, hooks="name"), "Received: str in EvalSpec.hooks"),
        (lambda: EvalSpec(lambda: 0, 100, "a/b"), "EvalSpec.name is the name of a folder"),
        (lambda: TrainSpec(lambda features: 0), r"needs 'features'. Write `lambda: input_fn\(features\)`"),
        (lambda: RunConfig(save_checkpoints_steps=0), "save_checkpoints_steps"),
        (lambda: RunConfig(keep_checkpoint_max=True), "keep_checkpoint_max"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        make()


@pytest.mark.parametrize("data", [None, np.zeros((0, 2)), ({"x": np.zeros((0, 2))}, np.zeros(0))])
def test_data_without_a_row_is_refused(data: Any) -> None:
    with pytest.raises(InputError, match=r"input_fn of training .* Received: (None|arrays without rows)"):
        check_data("training", data)
    assert check_data("training", np.ones((1, 2))).shape == (1, 2)


def test_one_exporter_may_stand_alone() -> None:
    one = FinalExporter()
    assert EvalSpec(lambda: 0, exporters=one).all_exporters == (one,)
    assert EvalSpec(lambda: 0, exporters=[one]).all_exporters == (one,)
    assert EvalSpec(lambda: 0).all_exporters == EvalSpec(lambda: 0, exporters=None).all_exporters == ()


def test_none_stands_for_no_hooks() -> None:
    assert TrainSpec(lambda: 0, hooks=None).hooks == EvalSpec(lambda: 0, hooks=None).hooks == ()  # type: ignore[arg-type]


def test_an_input_fn_gets_by_name_what_it_has() -> None:
    def bound(function: Any) -> Any:
        return bind_input(function, "train", {"batch_size": 8}, config)()

    class Data:
        def read(self, params: Any, *, mode: str) -> Any:
            return mode, params

    config = RunConfig("m")
    assert bound(lambda: 1) == 1 and bound(lambda features=3: features) == 3
    assert bound(lambda mode, params, config: (mode, params, config)) == ("train", {"batch_size": 8}, config)
    assert bound(Data().read) == ("train", {"batch_size": 8})
    assert bound(functools.partial(lambda mode, params: (mode, params), mode="mine"))[0] == "mine"
    # Data is of global batches, which insitu divides.
    context = bound(lambda input_context=None: input_context)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(64) == 64
    assert bound(lambda **kwargs: kwargs) == {}
