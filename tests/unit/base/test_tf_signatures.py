"""Functions with names of TensorFlow take the same arguments by place, and tell of those that aren't here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from insitu import estimator as est
from insitu import feature_column as fc
from insitu.base.errors import InputError
from insitu.base.tf_signatures import takes_old

_SAVES = "save_summary_steps save_checkpoints_steps save_checkpoints_secs"
_REST = "session_config keep_checkpoint_max keep_checkpoint_every_n_hours log_step_count_steps"
_DNN = "optimizer activation_fn dropout config warm_start_from loss_reduction batch_norm"
_LINEAR = "optimizer config warm_start_from loss_reduction sparse_combiner"
_WIDE = "model_dir linear_feature_columns linear_optimizer dnn_feature_columns dnn_optimizer dnn_hidden_units"
_DEEP = f"{_WIDE} dnn_activation_fn dnn_dropout"
_TAIL = "config warm_start_from loss_reduction batch_norm linear_sparse_combiner"
_STOP = "eval_dir min_steps run_every_secs run_every_steps"
_TABLE = "ckpt_to_load_from tensor_name_in_ckpt max_norm trainable use_safe_embedding_lookup"
_HOOKS = "training_chief_hooks training_hooks"
_CLASSES = "n_classes weight_column label_vocabulary"
_LIST = "key vocabulary_list dtype default_value num_oov_buckets"
_EXPORT = "serving_input_receiver_fn assets_extra as_text exports_to_keep"
OLD = {
    "RunConfig": f"model_dir tf_random_seed {_SAVES} {_REST}",
    "Estimator": "model_fn model_dir config params warm_start_from",
    "Estimator.train": "input_fn hooks steps max_steps saving_listeners",
    "Estimator.evaluate": "input_fn steps hooks checkpoint_path name",
    "Estimator.predict": "input_fn predict_keys hooks checkpoint_path yield_single_examples",
    "Estimator.get_variable_value": "name",
    "WarmStartSettings": "ckpt_to_initialize_from vars_to_warm_start var_name_to_vocab_info",
    "EstimatorSpec": f"mode predictions loss train_op eval_metric_ops export_outputs {_HOOKS}",
    "TrainSpec": "input_fn max_steps hooks saving_listeners",
    "EvalSpec": "input_fn steps name hooks exporters start_delay_secs throttle_secs",
    "train_and_evaluate": "estimator train_spec eval_spec",
    "BestExporter": "name serving_input_receiver_fn event_file_pattern compare_fn assets_extra",
    "FinalExporter": "name serving_input_receiver_fn assets_extra as_text",
    "LatestExporter": f"name {_EXPORT}",
    "DNNClassifier": f"hidden_units feature_columns model_dir {_CLASSES} {_DNN}",
    "DNNRegressor": f"hidden_units feature_columns model_dir label_dimension weight_column {_DNN}",
    "LinearClassifier": f"feature_columns model_dir n_classes weight_column label_vocabulary {_LINEAR}",
    "LinearRegressor": f"feature_columns model_dir label_dimension weight_column {_LINEAR}",
    "DNNLinearCombinedClassifier": f"{_DEEP} n_classes weight_column label_vocabulary {_TAIL}",
    "DNNLinearCombinedRegressor": f"{_DEEP} label_dimension weight_column {_TAIL}",
    "model_to_estimator": "keras_model keras_model_path custom_objects model_dir config",
    "LoggingTensorHook": "tensors every_n_iter every_n_secs at_end formatter",
    "StopAtStepHook": "num_steps last_step",
    "StepCounterHook": "every_n_steps every_n_secs output_dir summary_writer",
    "NanTensorHook": "loss_tensor fail_on_nan_loss",
    "SessionRunArgs": "fetches feed_dict options",
    "SessionRunHook.before_run": "run_context",
    "SessionRunHook.after_run": "run_context run_values",
    # Their first argument is left out, which an estimator in its place is told.
    "stop_if_higher_hook": f"metric_name threshold {_STOP}",
    "stop_if_lower_hook": f"metric_name threshold {_STOP}",
    "stop_if_no_increase_hook": f"metric_name max_steps_without_increase {_STOP}",
    "stop_if_no_decrease_hook": f"metric_name max_steps_without_decrease {_STOP}",
}
"""Arguments by place of tensorflow_estimator 2.15.0 and of the hooks of TensorFlow 2.21."""
_FILE = "key vocabulary_file vocabulary_size"
_SHARED = "categorical_columns dimension combiner initializer shared_embedding_collection_name"
OLD_COLUMNS = {
    "numeric_column": "key shape default_value dtype normalizer_fn",
    "bucketized_column": "source_column boundaries",
    "categorical_column_with_identity": "key num_buckets default_value",
    "categorical_column_with_hash_bucket": "key hash_bucket_size dtype",
    "categorical_column_with_vocabulary_list": "key vocabulary_list dtype default_value num_oov_buckets",
    # The arguments behind these have one order in TensorFlow 1, another in 2.
    "categorical_column_with_vocabulary_file": _FILE,
    "weighted_categorical_column": "categorical_column weight_feature_key dtype",
    "crossed_column": "keys hash_bucket_size hash_key",
    "indicator_column": "categorical_column",
    "embedding_column": f"categorical_column dimension combiner initializer {_TABLE}",
    "shared_embeddings": f"{_SHARED} {_TABLE}",
    "shared_embedding_columns": f"{_SHARED} {_TABLE}",
    "sequence_numeric_column": "key shape default_value dtype normalizer_fn",
    "sequence_categorical_column_with_identity": "key num_buckets default_value",
    "sequence_categorical_column_with_hash_bucket": "key hash_bucket_size dtype",
    "sequence_categorical_column_with_vocabulary_list": _LIST,
    "sequence_categorical_column_with_vocabulary_file": f"{_FILE} num_oov_buckets default_value dtype",
    "input_layer": "features feature_columns weight_collections trainable cols_to_vars",
    "DenseFeatures": "feature_columns trainable name",
    "SequenceFeatures": "feature_columns trainable name",
}
"""Those of tf.feature_column and the layers of TensorFlow 2.21."""
NEW = {"TrainOp", "SessionRunValues", "SessionRunContext", "Exporter"}
"""Names that scripts written for TensorFlow don't call, or that have no arguments beyond those above."""


def find(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def list_by_place(function: Any) -> list[str]:
    """The arguments that may be given by place, without `self`."""
    made = inspect.signature(function)
    found = [
        p.name for p in made.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return found[found[:1] == ["self"] :]


@pytest.mark.parametrize(
    ("module", "name", "old"),
    [(est, *row) for row in OLD.items()] + [(fc, *row) for row in OLD_COLUMNS.items()],
)
def test_arguments_by_place_are_those_of_tensorflow(module: Any, name: str, old: str) -> None:
    given = list_by_place(find(module, name))
    own = len(old.split())
    assert given[:own] == old.split()[: len(given)]
    # In places where TensorFlow has no arguments there may be insitu's own.
    assert given[own:] in ([], ["lengths"], ["cols_to_output_tensors"])


def test_each_public_name_is_compared() -> None:
    classes = {name for name in est.__all__ if callable(getattr(est, name))} - {"ModeKeys"}
    errors = {
        name
        for name in classes
        if isinstance(getattr(est, name), type) and issubclass(getattr(est, name), Exception)
    }
    missing = classes - errors - {name.split(".")[0] for name in OLD} - NEW
    assert not missing
    assert set(fc.__all__) - set(OLD_COLUMNS) == {"FeatureTransform", "make_inputs", "raw_keys"}


def test_more_by_place_is_refused_with_the_names() -> None:
    with pytest.raises(
        InputError, match=r"RunConfig takes model_dir by place, .*save_checkpoints_steps.*Received: 4 by"
    ):
        est.RunConfig("a", 42, 100, 500)  # type: ignore[misc]
    with pytest.raises(
        InputError, match=r"embedding_column takes .*initializer by place.*max_norm, trainable"
    ):
        column = fc.categorical_column_with_identity("a", 3)
        fc.embedding_column(column, 2, "mean", None, None, None, 1.0)  # type: ignore[misc]
    with pytest.raises(
        InputError, match=r"LinearRegressor takes feature_columns, .* by place.*sparse_combiner"
    ):
        columns = [fc.numeric_column("a")]
        est.LinearRegressor(columns, None, 1, None, "Ftrl", None, None, "sum", "mean")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: est.RunConfig(save_checkpoints_secs=60),
            "save_checkpoints_secs=60. Pass save_checkpoints_steps",
        ),  # type: ignore[call-arg]
        (lambda: est.RunConfig(tf_random_seed=1), "no tf_random_seed.*keras.utils.set_random_seed"),  # type: ignore[call-arg]
        (
            lambda: est.BestExporter(serving_input_receiver_fn=len),
            "BestExporter has no serving_input_receiver_fn",
        ),  # type: ignore[call-arg]
        (
            lambda: est.DNNRegressor([1], [fc.numeric_column("a")], loss_reduction="sum"),
            "loss_reduction='sum'",
        ),  # type: ignore[call-arg]
        (lambda: est.stop_if_lower_hook(estimator=3, metric_name="loss", threshold=1), "no estimator"),  # type: ignore[call-arg]
        (lambda: est.EstimatorSpec("train", prediction_hooks=[1]), "EstimatorSpec has no prediction_hooks"),  # type: ignore[call-arg]
    ],
)
def test_what_isnt_here_is_told(call: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        call()


def test_an_argument_that_asks_for_nothing_passes() -> None:
    assert est.RunConfig("a", session_config=None).model_dir == "a"  # type: ignore[call-arg]
    est.DNNRegressor([1], [fc.numeric_column("a")], "f", loss_reduction="sum_over_batch_size")  # type: ignore[call-arg]
    assert est.RunConfig("a").replace(keep_checkpoint_max=2) == est.RunConfig("a", keep_checkpoint_max=2)


def test_a_function_keeps_its_signature_and_name() -> None:
    @takes_old(b="Leave it out")
    def function(a: int, *, c: int = 2) -> tuple[int, int]:
        """Return both."""
        return a, c

    assert function(1, c=3) == (1, 3) == function(1, b=None, c=3)  # type: ignore[call-arg]
    assert function.__doc__ == "Return both." and list(inspect.signature(function).parameters) == ["a", "c"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'd'"):
        function(1, d=3)  # type: ignore[call-arg]
