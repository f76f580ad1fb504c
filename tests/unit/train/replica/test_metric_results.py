"""Logs that are results of metrics are told from other numbers."""

from __future__ import annotations

import keras
import numpy as np

from insitu.train.replica.metric_results import find_metric_results, flatten_logs, nest_logs, read_result


def compiled() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    f1 = keras.metrics.F1Score(threshold=0.5)
    model.compile("sgd", "mse", metrics=["mae", f1])
    model.train_on_batch(np.ones((2, 2), "float32"), np.ones((2, 2), "float32"))
    return model


def test_results_are_found_by_what_they_are_and_not_by_name() -> None:
    model = compiled()
    with find_metric_results(model) as results:
        logs = {**model.get_metrics_result(), "other": keras.ops.convert_to_tensor(1.0)}
        logs["again"] = logs["mae"]
        sources = {name: results.find(value) for name, value in logs.items()}
    assert sources["other"] is None
    assert sources["again"] == sources["mae"]
    for name in ("loss", "mae", "f1_score"):
        assert np.array_equal(np.asarray(read_result(sources[name])), np.asarray(logs[name]))
    assert "result" not in vars(model._loss_tracker)


def test_a_metric_with_several_results() -> None:
    class Pair(keras.metrics.Metric):
        def update_state(self, y, p, sample_weight=None):
            """Keep nothing."""

        def result(self):
            return {"one": keras.ops.convert_to_tensor(1.0), "two": keras.ops.convert_to_tensor(2.0)}

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.pair = Pair()
    model.compile("sgd", "mse")
    with find_metric_results(model) as results:
        source = results.find(model.get_metrics_result()["two"])
    assert source == (model.pair, "two")
    assert float(read_result(source)) == 2


def test_logs_are_taken_apart_and_put_together() -> None:
    logs = {"loss": 1, "compile_metrics": {"mae": 2, "inner": {"mse": 3}}}
    flat = flatten_logs(logs)
    assert flat == {("loss",): 1, ("compile_metrics", "mae"): 2, ("compile_metrics", "inner", "mse"): 3}
    assert nest_logs(flat) == logs
    assert flatten_logs(None) == {}
