"""Small trainings, each of which must come out under any strategy as it does in plain Keras.

`CASES` has them by name. A case is a function of a `Run`; `keras_comparison.py` compares them.
"""

from __future__ import annotations

import keras_cases_callbacks
import keras_cases_data
import keras_cases_fit
import keras_cases_found_data
import keras_cases_found_state
import keras_cases_found_training
import keras_cases_loops
import keras_cases_metrics
import keras_cases_models
import keras_cases_steps
import keras_cases_streams
import keras_cases_training
from keras_case_tools import BACKENDS, CASES, STRATEGIES, Case, Run

MODULES = (
    keras_cases_data,
    keras_cases_streams,
    keras_cases_fit,
    keras_cases_callbacks,
    keras_cases_models,
    keras_cases_training,
    keras_cases_steps,
    keras_cases_metrics,
    keras_cases_found_training,
    keras_cases_found_state,
    keras_cases_found_data,
    keras_cases_loops,
)

__all__ = ["BACKENDS", "CASES", "MODULES", "STRATEGIES", "Case", "Run"]
