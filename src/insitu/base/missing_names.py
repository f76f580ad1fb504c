"""Substitutes for names of `tf.distribute`, `tf.estimator` and `tf.feature_column` that aren't here: they
couldn't keep their meaning."""

from __future__ import annotations

_START = "`insitu start` starts the tasks of a job, and gives each its TF_CONFIG."
_SCOPE = "Open `with strategy.scope():`."
_RUN = "Use strategy.run, with strategy.reduce behind it."
_SAVE = (
    "insitu.BackupAndRestore saves in the middle of an epoch, and a job replaces a task that dies, also one "
    "that is preempted."
)
_LOGICAL = "insitu.ModelParallelStrategy divides variables over devices."
_DATA = "Use strategy.distribute_dataset or strategy.distribute_datasets_from_function."

_MODEL_FN = "Write a model_fn, or compile a Keras model, for insitu.estimator.Estimator."
_BY_CONFIG = "RunConfig(save_checkpoints_steps, keep_checkpoint_max) says when to save."

ADVICE: dict[str, dict[str, str]] = {
    "insitu": {
        "CrossDeviceOps": "Leave cross_device_ops out: sums over devices follow from the strategy.",
        "StrategyExtended": "The methods of strategies are those of the object itself.",
        "experimental_set_strategy": _SCOPE,
        "experimental_local_results": "It is a method: strategy.experimental_local_results(value).",
    },
    "insitu.experimental": {
        "PreemptionCheckpointHandler": _SAVE,
        "PreemptionWatcher": _SAVE,
        "TerminationConfig": _SAVE,
        "rpc": "Tasks exchange arrays by strategy.reduce, strategy.gather and strategy.group().",
    },
    "insitu.cluster_resolver": {
        "GCEClusterResolver": _START,
        "KubernetesClusterResolver": _START,
        "KubernetesExecutableLocation": _START,
        "SlurmClusterResolver": _START,
        "UnionResolver": _START,
    },
    "insitu.estimator": {
        "CheckpointSaverHook": _BY_CONFIG,
        "CheckpointSaverListener": "Pass a Keras callback: its on_epoch_end is called at each checkpoint.",
        "SecondOrStepTimer": "Hooks count steps: self.global_step.",
        "SummarySaverHook": "Pass insitu.TensorBoard() in the hooks of a training.",
        "ProfilerHook": "Pass keras.callbacks.TensorBoard(profile_batch) in the hooks of a training.",
        "FeedFnHook": "There are no sessions: input_fn returns the data.",
        "FinalOpsHook": "There are no sessions: read self.model in a hook's end.",
        "GlobalStepWaiterHook": "Workers begin together.",
        "make_early_stopping_hook": "Use stop_if_no_decrease_hook, or a hook that calls request_stop.",
        "add_metrics": "Add them to eval_metric_ops in model_fn.",
        "classifier_parse_example_spec": "insitu import --features reads records.",
        "regressor_parse_example_spec": "insitu import --features reads records.",
        "export": "Estimator.export and exporters take the model's inputs, without a serving input receiver.",
        "experimental": _MODEL_FN,
        "inputs": "Return arrays from input_fn.",
        **dict.fromkeys(
            (
                *("BaselineClassifier", "BaselineEstimator", "BaselineRegressor", "BinaryClassHead"),
                *("BoostedTreesClassifier", "BoostedTreesEstimator", "BoostedTreesRegressor", "DNNEstimator"),
                *("DNNLinearCombinedEstimator", "Head", "LinearEstimator", "LogisticRegressionHead"),
                *("MultiClassHead", "MultiHead", "MultiLabelHead", "PoissonRegressionHead", "RegressionHead"),
                "VocabInfo",
            ),
            _MODEL_FN,
        ),
    },
    "Estimator": {
        "eval_dir": "`insitu tensorboard JOB` shows the event files of a job's evaluations.",
        "experimental_export_all_saved_models": "Use export(folder, format='tf_saved_model').",
        "export_saved_model": "Use export(folder, format='tf_saved_model').",
        "export_savedmodel": "Use export(folder, format='tf_saved_model').",
        "model_fn": "Keep the function that you pass to the estimator.",
    },
    "insitu.feature_column": {
        "linear_model": "Use insitu.estimator.LinearRegressor, or keras.layers.Dense over DenseFeatures.",
        "make_parse_example_spec": "insitu import --features reads records.",
    },
    "Strategy": {
        "extended": "Its methods are those of the strategy: run, reduce, gather, scope.",
        "colocate_vars_with": "Variables are where the strategy places them.",
        "configure": "Settings are arguments of the strategy; TF_CONFIG is that of the job.",
        "experimental_run": _RUN,
        "make_dataset_iterator": _DATA,
        "make_input_fn_iterator": _DATA,
        "update_config_proto": "There are no sessions; insitu.config sets up devices.",
        "experimental_assign_to_logical_device": _LOGICAL,
        "experimental_replicate_to_logical_devices": _LOGICAL,
        "experimental_split_to_logical_devices": _LOGICAL,
    },
    "ReplicaContext": {"devices": "strategy.devices has those of a strategy over devices."},
    "DistributedDataset": {"reduce": "Loop over the data, and add up by strategy.reduce."},
}
"""By the module or class in which a script looks, and the name."""
_OLD_MODULES = {
    "Estimator": "tf.estimator.Estimator",
    "insitu.estimator": "tf.estimator",
    "insitu.feature_column": "tf.feature_column",
}
"""By the module or class, what had the names. Others were those of tf.distribute."""


def missing_name(owner: str, name: str, *, of: str = "") -> AttributeError:
    """Return the error for a name that `owner`, a module or a class, doesn't have. `of` is the name of a
    subclass of `owner`."""
    kind = f"module {owner!r}" if owner.startswith("insitu") else f"{(of or owner)!r} object"
    advice = ADVICE.get(owner, {}).get(name)
    if advice is None:
        return AttributeError(f"{kind} has no attribute {name!r}")
    return AttributeError(
        f"{kind} has no attribute {name!r}, which {_OLD_MODULES.get(owner, 'tf.distribute')} has. {advice}"
    )
