"""`insitu.estimator`: train and evaluate by global steps, with the names of tf.estimator.

Begin reading with `training.py`.
"""

from __future__ import annotations

from typing import Any

from insitu.base.missing_names import missing_name
from insitu.train.estimator.canned import (
    DNNClassifier,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    LinearClassifier,
    LinearRegressor,
)
from insitu.train.estimator.early_stopping import (
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from insitu.train.estimator.estimator import Estimator, WarmStartSettings
from insitu.train.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
from insitu.train.estimator.from_keras import model_to_estimator
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
from insitu.train.estimator.model_function import EstimatorSpec, ModeKeys, TrainOp
from insitu.train.estimator.specs import EvalSpec, RunConfig, TrainSpec
from insitu.train.estimator.training import train_and_evaluate

__all__ = [
    "BestExporter",
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "LatestExporter",
    "LinearClassifier",
    "LinearRegressor",
    "LoggingTensorHook",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "RunConfig",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "TrainOp",
    "TrainSpec",
    "WarmStartSettings",
    "model_to_estimator",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "train_and_evaluate",
]


def __getattr__(name: str) -> Any:
    raise missing_name("insitu.estimator", name)
