"""`insitu.estimator`: train and evaluate by global steps, with the names of tf.estimator.

Begin reading with `training.py`.
"""

from __future__ import annotations

from insitu.train.estimator.early_stopping import (
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from insitu.train.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from insitu.train.estimator.hooks import (
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
from insitu.train.estimator.specs import EvalSpec, RunConfig, TrainSpec
from insitu.train.estimator.training import train_and_evaluate

__all__ = [
    "BestExporter",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "RunConfig",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "TrainSpec",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "train_and_evaluate",
]
