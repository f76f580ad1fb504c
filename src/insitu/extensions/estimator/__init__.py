"""`insitu.estimator`: train and evaluate by global steps, with the names of tf.estimator.

Begin reading with `training.py`.

Example:
    >>> column = insitu.feature_column.numeric_column("image", shape=(64,))
    >>> classifier = insitu.estimator.LinearClassifier([column], n_classes=10)
"""

from __future__ import annotations

from typing import Any

from insitu.base.missing_names import missing_name
from insitu.extensions.estimator.canned import (
    DNNClassifier,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedRegressor,
    DNNRegressor,
    LinearClassifier,
    LinearRegressor,
)
from insitu.extensions.estimator.early_stopping import (
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from insitu.extensions.estimator.estimator import Estimator, WarmStartSettings, model_to_estimator
from insitu.extensions.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
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
from insitu.extensions.estimator.model_function import EstimatorSpec, ModeKeys, TrainOp
from insitu.extensions.estimator.specs import EvalSpec, RunConfig, TrainSpec
from insitu.extensions.estimator.training import train_and_evaluate

__all__ = [name for name, each in globals().items() if getattr(each, "__module__", "").startswith(__name__)]


def __getattr__(name: str) -> Any:
    raise missing_name("insitu.estimator", name)
