"""An export is published once it predicts as the model does, and never half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from insitu.base.errors import InputError, TrainingError
from insitu.extensions.estimator.exporters import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
    is_loss_smaller,
    publish,
)
from insitu.extensions.estimator.specs import EvalSpec

# Keras, as it saves
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EXAMPLE = np.arange(8, dtype="float32").reshape(4, 2)


def model_of(*more: Any) -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "tanh"), *more, keras.layers.Dense(1)])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@keras.saving.register_keras_serializable("insitu tests")
class Forgetting(keras.layers.Layer):
    """Computes by a number that it doesn't save."""

    def __init__(self, factor: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, x: Any) -> Any:
        return x * self.factor

    def get_config(self) -> dict[str, Any]:
        return super().get_config()


def test_the_latest_are_kept_and_predict_as_the_model(tmp_path: Path) -> None:
    exporter, model = LatestExporter(exports_to_keep=2), model_of()
    for step in (5, 10, 200):
        path = exporter.export(model, tmp_path, step, {}, EXAMPLE, is_final=False)
    assert names(tmp_path / "latest") == ["00000010.keras", "00000200.keras"]
    assert path == tmp_path / "latest" / "00000200.keras"
    loaded = keras.models.load_model(path)
    assert np.allclose(loaded.predict(EXAMPLE, verbose=0), model.predict(EXAMPLE, verbose=0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The `native_serialization` parameter:DeprecationWarning")  # Keras, on JAX
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras writes none of a PyTorch model")
def test_a_saved_model_predicts_as_the_model(tmp_path: Path) -> None:
    tf = pytest.importorskip("tensorflow")
    exporter, model = LatestExporter(exports_to_keep=2, format="tf_saved_model"), model_of()
    for step in (5, 10, 200, 200):
        path = exporter.export(model, tmp_path, step, {}, EXAMPLE, is_final=False)
    assert names(tmp_path / "latest") == ["00000010", "00000200"]
    loaded = tf.saved_model.load(path)
    found = np.asarray(loaded.serve(tf.constant(EXAMPLE)))
    assert np.allclose(found, model.predict(EXAMPLE, verbose=0), rtol=1e-5)
    best = BestExporter(format="tf_saved_model")
    assert best.export(model, tmp_path, 1, {"loss": 1.0}, EXAMPLE, is_final=False)
    assert best.export(model, tmp_path, 2, {"loss": 1.0}, EXAMPLE, is_final=False) is None
    with pytest.raises(InputError, match="one of keras, tf_saved_model"):
        FinalExporter(format="h5")


def test_the_final_one_comes_at_the_end_alone(tmp_path: Path) -> None:
    exporter = FinalExporter("last")
    assert exporter.export(model_of(), tmp_path, 5, {}, EXAMPLE, is_final=False) is None
    assert exporter.export(model_of(), tmp_path, 6, {}, EXAMPLE, is_final=True) is not None
    assert names(tmp_path / "last") == ["00000006.keras"]


def is_more_accurate(current_eval_result: Any, best_eval_result: Any) -> bool:
    """Compare as a function of TensorFlow's estimators may: its arguments have their names in any order."""
    assert current_eval_result["global_step"] == best_eval_result["global_step"] + 1
    return bool(current_eval_result["accuracy"] > best_eval_result["accuracy"])


def test_a_compare_function_of_tensorflow_gets_its_arguments_by_name(tmp_path: Path) -> None:
    exporter, model = BestExporter(compare_fn=is_more_accurate), model_of()
    exported = [
        exporter.export(model, tmp_path, step, {"accuracy": accuracy}, EXAMPLE, is_final=False) is not None
        for step, accuracy in ((1, 0.5), (2, 0.75))
    ]
    assert exported == [True, True] and len(names(tmp_path / "best")) == 3
    wrong = BestExporter("wrong", compare_fn=lambda best, newest: newest["auc"] > best["auc"])
    assert wrong.export(model, tmp_path, 1, {"loss": 1.0}, EXAMPLE, is_final=False) is not None
    with pytest.raises(InputError, match=r"Received: KeyError\('auc'\), of scores loss, global_step"):
        wrong.export(model, tmp_path, 2, {"loss": 0.5}, EXAMPLE, is_final=False)
    by_place = BestExporter("place", compare_fn=lambda best, newest: newest["a"] > best["a"])
    found = [by_place.export(model, tmp_path, 1, {"a": a}, EXAMPLE, is_final=False) for a in (1, 0)]
    assert found[0] is not None and found[1] is None


def test_the_best_is_known_again_after_a_restart(tmp_path: Path) -> None:
    def export(step: int, loss: float, **more: float) -> bool:
        scores = {"loss": loss, **more}
        return BestExporter().export(model_of(), tmp_path, step, scores, EXAMPLE, is_final=False) is not None

    assert [export(1, 3.0), export(2, 4.0), export(3, 2.0), export(4, float("nan"))] == [
        *(True, False, True, False)
    ]
    assert names(tmp_path / "best") == ["00000001.keras", "00000003.keras", "best.json"]
    (tmp_path / "best" / "best.json").write_text("{")  # cut off: the next is the best
    assert export(5, 9.0)
    with pytest.raises(InputError, match=r"compared by 'loss'. Received: mae"):
        is_loss_smaller({"loss": 1.0}, {"mae": 2.0})
    assert is_loss_smaller({"loss": float("nan")}, {"loss": 3.0})
    by_mae = BestExporter("mae", compare_fn=lambda best, newest: newest["mae"] < best["mae"])
    assert by_mae.export(model_of(), tmp_path, 1, {"mae": 2.0}, EXAMPLE, is_final=False)
    assert by_mae.export(model_of(), tmp_path, 2, {"mae": 2.0}, EXAMPLE, is_final=False) is None


def test_an_export_that_predicts_otherwise_is_not_published(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"differs by .* was not published"):
        publish(model_of(Forgetting(3.0)), tmp_path, 1, EXAMPLE)
    assert names(tmp_path) == []
    assert publish(model_of(Forgetting(1.0)), tmp_path, 1, EXAMPLE).exists()


def test_an_export_that_cannot_be_loaded_is_not_published(tmp_path: Path) -> None:
    class Unknown(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(TrainingError, match="register_keras_serializable; nothing was published"):
        publish(model_of(Unknown()), tmp_path, 1, EXAMPLE)
    assert names(tmp_path) == []


def test_values_that_are_not_numbers_must_be_the_same_ones(tmp_path: Path) -> None:
    example = EXAMPLE.copy()
    example[1] = np.nan
    assert publish(model_of(), tmp_path, 1, example).exists()


def test_names_and_numbers_that_cannot_be_are_refused() -> None:
    for name in ("", "a/b", "..", ".hidden"):
        with pytest.raises(InputError, match="name is that of a folder"):
            FinalExporter(name)
    with pytest.raises(InputError, match="exports_to_keep"):
        LatestExporter(exports_to_keep=0)


def test_an_exporter_written_for_tensorflow_is_told_where_it_is_written() -> None:
    with pytest.raises(InputError, match=r"Received: Old with \(self, estimator, .*Take a model"):

        class Old(Exporter):
            def export(  # type: ignore[override]
                self, estimator: Any, export_path: Any, checkpoint_path: Any, result: Any, is_the_final: Any
            ) -> None:
                """As in tf.estimator."""

    with pytest.raises(InputError, match=r"or another Exporter\. Received: 'best'"):
        EvalSpec(lambda: 0, exporters=["best"])
