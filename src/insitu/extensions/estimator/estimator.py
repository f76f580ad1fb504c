"""`Estimator`: trains, evaluates and predicts with what a model_fn says, from and to a model_dir."""

from __future__ import annotations

import logging
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from insitu.base.context import context as read_context
from insitu.base.errors import InputError, TrainingError
from insitu.base.export_formats import KERAS
from insitu.base.missing_names import missing_name
from insitu.base.tf_signatures import class_takes_old, takes_old
from insitu.extensions.estimator.evaluations import evaluate_model
from insitu.extensions.estimator.graph_model import make_graph_model, pick_inputs
from insitu.extensions.estimator.hooks import read_global_step
from insitu.extensions.estimator.model_function import ModeKeys, check_model_fn
from insitu.extensions.estimator.specs import (
    EvalSpec,
    RunConfig,
    TrainSpec,
    bind_input,
    check_data,
    check_input,
    check_positive,
)
from insitu.extensions.estimator.training import check_trained, choose_directory, train
from insitu.extensions.exports import check_format, make_example, publish
from insitu.train.checkpoint import checkpoint_key
from insitu.train.evaluation import BATCH_SIZE, assign_iterations, find_checkpoints, load_checkpoint
from insitu.train.fit import trainer_of
from insitu.train.replica import to_numpy
from insitu.train.strategies import MultiWorkerMirroredStrategy

InputFn = Callable[..., Any]
_TRAINS_IN_JOB: list[object] = []
"""The mark of the estimator that trains to the folder of the job, if one does. Written by `Estimator`."""
_DEFAULT_STRATEGY: list[Any] = []
"""What `_find_default_strategy` has made, behind the context that it is for."""
_LOG = logging.getLogger("insitu")


_NO_VOCABULARIES = "Name the variables in vars_to_warm_start, whose shapes are the same"


@class_takes_old(
    var_name_to_vocab_info=_NO_VOCABULARIES,
    var_name_to_prev_var_name="Give the layers the names that they had",
)
@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """Which weights a training begins with."""

    #: A model_dir, or a .keras file.
    ckpt_to_initialize_from: str | Path
    #: A regular expression: the variables to take, by their paths. Of a model_dir all are taken.
    vars_to_warm_start: str = ".*"

    def __post_init__(self) -> None:
        """Raises InputError if the expression is none, or would have no effect."""
        try:
            re.compile(self.vars_to_warm_start)
        except (re.error, TypeError) as error:
            raise InputError(
                f"vars_to_warm_start is a regular expression. Received: {self.vars_to_warm_start!r} ({error})"
            ) from None
        if self.vars_to_warm_start != ".*" and Path(self.ckpt_to_initialize_from).suffix != ".keras":
            raise InputError(
                "vars_to_warm_start chooses variables of a .keras file; of a model_dir all are taken. "
                f"Received: {self.vars_to_warm_start!r} for {os.fspath(self.ckpt_to_initialize_from)!r}. "
                "Export that estimator by export(FOLDER) and name its .keras file, or leave it out"
            )


class Estimator:
    """A model as a function of features, labels and mode, with its checkpoints in a folder.

    `model_fn(features, labels, mode, params, config)` is run once for each mode, on symbolic tensors. It
    makes Keras layers, calls them and `keras.ops`, and returns an `EstimatorSpec`. Layers of the same name,
    given or counted, share their weights in all modes.

    Args:
        model_fn: takes features, and any of the other arguments.
        model_dir: folder of the checkpoints; by default that of `config`.
        config: how often to save, and by which strategy to train.
        params: passed on to model_fn.
        warm_start_from: a model_dir, a .keras file, or WarmStartSettings: weights to begin with where
            model_dir has no checkpoint.

    Raises:
        InputError: for arguments that can't be. What model_fn returns is checked as it is first run.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | Path | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | Path | WarmStartSettings | None = None,
    ) -> None:
        check_model_fn(model_fn)
        config = config or RunConfig()
        if model_dir is not None and config.model_dir not in (None, model_dir):
            raise InputError(
                f"An estimator has one model_dir. Received: {str(model_dir)!r}, and "
                f"{str(config.model_dir)!r} in config. Leave one out"
            )
        config = replace(config, model_dir=model_dir or config.model_dir)
        self._context = read_context()
        self._config = replace(config, model_dir=choose_directory(config, self._context))
        self._model_fn = model_fn
        self._params = dict(params or {})
        self._warm_start = _read_settings(warm_start_from)
        #: Tells it from others.
        self._mark = object()
        #: The model, once a batch has been seen. Written by `_prepare`.
        self._made: Any = None
        #: Whether its weights are what was trained in this process. Written by `train` and `_load`.
        self._is_current = False
        #: Whether they are of an older checkpoint that was asked for. Written by `_load`.
        self._is_older = False

    def __getattr__(self, name: str) -> Any:
        raise missing_name("Estimator", name, of=type(self).__name__)

    @property
    def config(self) -> RunConfig:
        """How often it saves, and where."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of what is passed on to model_fn."""
        return dict(self._params)

    @property
    def model_dir(self) -> str | Path | None:
        """The folder of the checkpoints; None: that of the job."""
        return self._config.model_dir

    @property
    def model(self) -> Any:
        """The Keras model. Raises TrainingError before a batch was seen."""
        if self._made is None:
            raise TrainingError(
                "The model of an estimator is made for the shapes of its data. Received: an estimator that "
                "has seen none. Call train or evaluate first"
            )
        return self._made

    needs_labels = True
    """Whether the model is made of labels too."""

    # Train, evaluate, predict

    @takes_old(
        saving_listeners="Pass a hook, or a Keras callback, whose on_epoch_end is called at each checkpoint"
    )
    def train(
        self,
        input_fn: InputFn,
        hooks: Sequence[Any] = (),
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> Estimator:
        """Train for `steps` updates more, or until the model has had `max_steps`, counted over all workers.

        Data that ends is read again. It continues from the newest checkpoint in `model_dir`; a later call may
        begin in the middle of its data. Collective: call it in each worker of a job, where only `max_steps`
        is known to a run that is started again.

        Raises InputError, TrainingError, and NanLossDuringTrainingError from a hook.
        """
        if (steps is None) == (max_steps is None):
            raise InputError(
                "A training ends after `steps` more, or at `max_steps`. Received: "
                f"steps={steps}, max_steps={max_steps}. Give one of them"
            )
        if steps is not None:
            check_positive("Estimator.train", "steps", steps)
        if steps is not None and (self._context.job is not None or self._context.by_hand):
            raise InputError(
                "In a job a training ends at max_steps: `steps` counts from where a run begins, and each "
                f"recovery would begin again. Received: steps={steps}. Pass max_steps"
            )
        self._claim_folder()
        self._prepare(input_fn, ModeKeys.TRAIN)
        if self._is_older or (steps is not None and not self._is_current):
            self._load()
        if steps is not None:
            max_steps = read_global_step(self._made) + steps
        spec = self._adapt_training(TrainSpec(input_fn, max_steps, hooks))
        self._is_current = False  # of a training that fails the newest checkpoint counts
        train(check_trained(self._made), spec, self._config, None, series=0)
        self._is_current = True
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Sequence[Any] = (),
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """Return the loss, the metrics and `global_step` on `steps` batches (None: all), by the newest
        checkpoint or that at `checkpoint_path`. In a job with several workers it is collective, and scores
        what the call of `train` before it has trained. The scores are kept nowhere, so `name`
        names nothing.

        Raises TrainingError if nothing was trained.
        """
        spec = EvalSpec(input_fn, steps, name, hooks)
        self._prepare(input_fn, ModeKeys.EVAL)
        self._check_modes(ModeKeys.EVAL)
        spec = self._adapt_evaluation(spec)
        self._make_current(checkpoint_path)
        scores = evaluate_model(self._made, spec)
        return {**scores, "global_step": read_global_step(self._made)}

    @takes_old(hooks="Leave it out: predictions have no hooks")
    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | None = None,
        *,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of each row, in the order of the data, as NumPy arrays: a dict where model_fn
        gives one. In this process alone, by the newest checkpoint or that at `checkpoint_path`.

        Raises TrainingError if nothing was trained.
        """
        self._prepare(input_fn, ModeKeys.PREDICT, needs_labels=False)
        self._make_current(checkpoint_path)
        keys = None if predict_keys is None else list(predict_keys)
        _check_predict_keys(keys, self._known_keys())
        data = self._bind(input_fn, ModeKeys.PREDICT)()
        return self._predict(data, keys, yield_single_examples)

    def _predict(self, data: Any, keys: Any, single: bool) -> Iterator[Any]:
        for features in iterate_features(data):
            outputs = self._predict_batch(self._adapt_features(features))
            if keys is not None:
                outputs = {key: outputs[key] for key in keys}
            if not single:
                yield outputs
                continue
            for row in range(len(keras.tree.flatten(outputs)[0])):
                yield keras.tree.map_structure(lambda values, row=row: values[row], outputs)

    def _predict_batch(self, features: Any) -> Any:
        """Return the predictions of a batch as NumPy arrays."""
        model = self._made.predicting_model
        return keras.tree.map_structure(np.asarray, model.predict_on_batch(pick_inputs(model, features)))

    def _known_keys(self) -> list[str]:
        """Return the keys that predictions have; none where they are no dict."""
        output = self._made.predicting_model.output
        return list(output) if isinstance(output, dict) else []

    # What it holds

    def latest_checkpoint(self) -> str | None:
        """Return the newest checkpoint in `model_dir`, or None."""
        found = find_checkpoints(self._directory, self._key)
        return found[-1][0] if found else None

    def get_variable_names(self) -> list[str]:
        """Return the paths of the model's variables."""
        return [variable.path for variable in self.model.variables]

    def get_variable_value(self, name: str) -> NDArray[Any]:
        """Return the value of the variable of that path. Raises InputError."""
        found = {variable.path: variable for variable in self.model.variables}
        if name not in found:
            raise InputError(f"Variables are {', '.join(found)}. Received: {name!r}")
        return np.array(to_numpy(found[name]))

    def export(
        self, export_dir: str | Path, checkpoint_path: str | None = None, *, format: str = KERAS
    ) -> Path:
        """Publish what predicts as `EXPORT_DIR/STEP.keras`, or in the format "tf_saved_model", "onnx"
        or "stablehlo", once it is loaded again and predicts the same on made-up rows. Returns the
        path. Raises InputError and TrainingError."""
        check_format(format)
        model = self.model
        self._make_current(checkpoint_path)
        served = getattr(model, "served_model", model)
        return publish(served, Path(export_dir), read_global_step(model), make_example(served), format)

    # The model

    def make_trained(
        self, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> tuple[Any, TrainSpec, EvalSpec, RunConfig]:
        """Return what train_and_evaluate takes: the model, the specs with data as the model takes them, and
        the config."""
        in_evaluator = self._context.role == "evaluator"
        if not in_evaluator:
            self._claim_folder()
        if in_evaluator:
            self._prepare(eval_spec.input_fn, ModeKeys.EVAL)
        else:
            self._prepare(train_spec.input_fn, ModeKeys.TRAIN)
        self._check_modes(ModeKeys.EVAL, *([ModeKeys.PREDICT] if eval_spec.all_exporters else []))
        train_spec, eval_spec = self._adapt_training(train_spec), self._adapt_evaluation(eval_spec)
        if self._is_older:
            self._load()
        self._is_current = True
        return self._made, train_spec, eval_spec, self._config

    def _adapt_training(self, spec: TrainSpec) -> TrainSpec:
        """Return a spec with data as the model takes it, and the model's own hooks."""
        hooks = (*spec.hooks, *getattr(self._made, "training_hooks", ()))
        return replace(spec, input_fn=self._adapted(spec.input_fn, ModeKeys.TRAIN), hooks=hooks)

    def _adapt_evaluation(self, spec: EvalSpec) -> EvalSpec:
        hooks = (*spec.hooks, *getattr(self._made, "evaluation_hooks", ()))
        return replace(spec, input_fn=self._adapted(spec.input_fn, ModeKeys.EVAL), hooks=hooks)

    def _bind(self, input_fn: InputFn, mode: str) -> InputFn:
        check_input("Estimator", input_fn)
        return bind_input(input_fn, mode, self._params, self._config)

    def _adapted(self, input_fn: InputFn, mode: str) -> InputFn:
        """Return an input_fn without arguments whose data is as the model takes it. Raises InputError."""
        bound = self._bind(input_fn, mode)
        return lambda: self._adapt(check_data("an estimator", bound()))

    def _adapt(self, data: Any) -> Any:
        return data

    def _adapt_features(self, features: Any) -> Any:
        return features

    def _prepare(self, input_fn: InputFn, mode: str, needs_labels: bool = True) -> None:
        """Make the model, from the shapes of the data's first batch."""
        if self._made is not None:
            return
        features, labels = find_example(self._adapted(input_fn, mode)())
        if labels is None and not needs_labels and self.needs_labels:
            raise TrainingError(
                "The model of an estimator is made by features and labels. Received: an estimator that has "
                "seen no labels, in predict. Return (features, labels) from input_fn, or call evaluate first"
            )
        strategy = self._config.train_distribute or _find_default_strategy()
        with strategy.scope():
            self._made = self._make_model(features, labels)
        if self._warm_start is not None:
            self._start_warm(self._warm_start)

    def _claim_folder(self) -> None:
        """Raise InputError if another estimator trains to the same folder of the job."""
        if self._config.model_dir is not None or self._context.job is None:
            return
        if _TRAINS_IN_JOB and _TRAINS_IN_JOB[0] is not self._mark:
            raise InputError(
                "An estimator without model_dir saves to the folder of its job, and continues from what it "
                "finds there. Received: a second one that trains in this job. Pass a model_dir to each"
            )
        _TRAINS_IN_JOB[:] = [self._mark]

    def _check_modes(self, *modes: str) -> None:
        """Raise InputError if model_fn isn't made for one of the modes, before the work begins."""
        for mode in modes:
            self._made.check_mode(mode)

    def _make_model(self, features: Any, labels: Any) -> Any:
        return make_graph_model(self._model_fn, self._params, self._config, features, labels)

    @property
    def _directory(self) -> str | Path:
        return self._config.model_dir or self._context.checkpoint_dir or ""

    @property
    def _key(self) -> bytes | None:
        own = self._config.model_dir is None and self._context.job is not None
        return checkpoint_key(self._context) if own else None

    def _make_current(self, path: str | None) -> None:
        """Have the model's weights be those of a checkpoint: the newest, or that at `path`. Raises
        TrainingError."""
        if path is None and self._is_current:
            return
        if self._load(path):
            return
        what = f"the checkpoint {path}" if path else f"no checkpoint in {self._directory}"
        raise TrainingError(
            "Weights come from training, or from a checkpoint of this estimator. Received: "
            f"{what}{', which is none' if path else ''}. Call train first, with the same model_dir"
        )

    def _load(self, path: str | None = None) -> bool:
        """Load the newest checkpoint, or that at `path`. Returns False if there is none."""
        if self._context.role != "evaluator" and len(self._context.workers) > 1:
            raise TrainingError(
                "Several workers have the same weights once they have trained. Received: a call that reads a "
                "checkpoint in each of them. Call train before, or read it in a process without workers"
            )
        for found, candidate in reversed(find_checkpoints(self._directory, self._key)):
            if path in (None, found) and load_checkpoint(self._directory, self._key, candidate, self._made):
                # Another process may train on: what was read is read again by the next call.
                self._is_current, self._is_older = False, path is not None
                return True
        return False

    def _start_warm(self, settings: WarmStartSettings) -> None:
        """Take over weights, if there is no checkpoint to continue from. Raises InputError."""
        if find_checkpoints(self._directory, self._key):
            return
        source = Path(settings.ckpt_to_initialize_from)
        if source.suffix == ".keras":
            _take_variables(self._made, source, settings.vars_to_warm_start)
            return
        found = find_checkpoints(source, None)
        if not found or not load_checkpoint(source, None, found[-1][1], self._made):
            raise InputError(
                "warm_start_from is a folder with checkpoints of an estimator, or a .keras file. Received: "
                f"{os.fspath(source)!r}, which has none that can be read"
            )
        assign_iterations(self._made.optimizer, 0)


def _find_default_strategy() -> Any:
    """Return the strategy of all estimators that are given none: a task has one address."""
    context = read_context()
    if not _DEFAULT_STRATEGY or _DEFAULT_STRATEGY[0] != context:
        _DEFAULT_STRATEGY[:] = [context, MultiWorkerMirroredStrategy()]
    return _DEFAULT_STRATEGY[1]


def _read_settings(given: Any) -> WarmStartSettings | None:
    if given is None or isinstance(given, WarmStartSettings):
        return given
    if isinstance(given, (str, Path)):
        return WarmStartSettings(given)
    raise InputError(
        "warm_start_from is a model_dir, a .keras file, or WarmStartSettings. Received: "
        f"{type(given).__name__}"
    )


def _take_variables(model: Any, path: Path, pattern: str) -> None:
    """Assign to variables the values of those of the same path in a file. Raises InputError if one lacks,
    or has another shape."""
    try:
        given = {v.path: v for v in keras.models.load_model(path, compile=False).variables}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(
            f"warm_start_from is a .keras file. Received: {path}, which isn't: {error}"
        ) from error
    wanted = [v for v in model.weights if re.fullmatch(pattern, v.path)]
    for variable in wanted:
        other = given.get(variable.path)
        if other is None or tuple(other.shape) != tuple(variable.shape):
            has = "no such variable" if other is None else f"one of shape {tuple(other.shape)}"
            raise InputError(
                f"vars_to_warm_start are in the file, with their shapes. Received: {has} for "
                f"{variable.path!r} {tuple(variable.shape)}, in {path}. Leave it out by the pattern"
            )
    if not wanted:
        raise InputError(
            f"vars_to_warm_start matches paths of variables. Received: {pattern!r}, which matches none"
        )
    for variable in wanted:
        variable.assign(to_numpy(given[variable.path]))


def _check_predict_keys(keys: list[str] | None, known: list[str]) -> None:
    if keys is not None and (not keys or any(key not in known for key in keys)):
        raise InputError(
            f"predict_keys are keys of the predictions: {', '.join(known) or 'there are none'}. Received: "
            f"{keys!r}"
        )


# Find the first batch of an input_fn's data, and its features batch by batch


def find_example(data: Any) -> tuple[Any, Any]:
    """Return (features, labels) of a batch, or what has their shapes and dtypes. Raises TrainingError for a
    generator."""
    if isinstance(data, types.GeneratorType):
        raise TrainingError(
            "Data is read several times. Received: a generator. Return an insitu.Dataset, a tf.data.Dataset, "
            "a keras.utils.PyDataset or arrays from input_fn."
        )
    if hasattr(data, "element_spec"):
        data = data.element_spec
    elif isinstance(data, keras.utils.PyDataset):
        data = data[0]
    elif not isinstance(data, (tuple, dict, np.ndarray)):
        data = next(iter(data))
    if isinstance(data, list):
        data = tuple(data)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    return x, y


def iterate_features(data: Any) -> Iterator[Any]:
    """Yield the features of each batch, once."""
    if isinstance(data, (tuple, dict, np.ndarray)):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        for start in range(0, _count_rows(x), BATCH_SIZE):
            yield _cut_rows(x, start)
        return
    batches = (data[i] for i in range(len(data))) if isinstance(data, keras.utils.PyDataset) else iter(data)
    for batch in batches:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch) if isinstance(batch, list) else batch)
        yield keras.tree.map_structure(_as_array, x)


def _count_rows(x: Any) -> int:
    if not isinstance(x, Mapping):
        return len(keras.tree.flatten(x)[0])
    feature = next(iter(x.values()))
    return len(feature) if isinstance(feature, list) else _count_rows(feature)


def _cut_rows(x: Any, start: int) -> Any:
    """Return a batch of the rows. In a dict a list has rows, such as texts; elsewhere it has inputs."""
    if not isinstance(x, Mapping):
        return keras.tree.map_structure(lambda values: values[start : start + BATCH_SIZE], x)
    return {
        key: values[start : start + BATCH_SIZE] if isinstance(values, list) else _cut_rows(values, start)
        for key, values in x.items()
    }


def _as_array(values: Any) -> NDArray[Any]:
    return values if isinstance(values, np.ndarray) else np.asarray(keras.ops.convert_to_numpy(values))


@takes_old(
    keras_model_path="Pass keras.saving.load_model(PATH, custom_objects)",
    custom_objects="Pass keras.saving.load_model(PATH, custom_objects)",
    checkpoint_format="Leave it out: checkpoints are insitu's",
    metric_names_map="Give the metrics their names in compile",
    export_outputs="Leave it out: an export has the model's outputs",
)
def model_to_estimator(
    keras_model: Any, *, model_dir: str | Path | None = None, config: RunConfig | None = None
) -> Estimator:
    """Return an Estimator that trains a compiled Keras model.

    A model that was compiled in a strategy's scope is trained itself. Another is copied into the scope of
    `config.train_distribute`, with its weights, and compiled there as it was. Predictions are dicts by the
    names of the model's outputs.

    Raises InputError for a model that isn't compiled or built, and, as it is first used, for one that can't
    be copied.
    """
    if not isinstance(keras_model, keras.Model) or not keras_model.compiled or not keras_model.built:
        raise InputError(
            f"model_to_estimator takes a Keras model that is built and compiled. Received: {keras_model!r}. "
            "Give it an Input, and call compile"
        )
    if trainer_of(keras_model) is not None and config is not None and config.train_distribute is not None:
        raise InputError(
            "A model that was compiled in a strategy's scope is trained by that. Received: another in "
            "train_distribute. Leave it out"
        )
    return _KerasEstimator(keras_model, model_dir, config)


class _KerasEstimator(Estimator):
    def __init__(self, keras_model: Any, model_dir: str | Path | None, config: RunConfig | None) -> None:
        super().__init__(lambda features: None, model_dir, config)
        self._given = keras_model
        if trainer_of(keras_model) is not None:
            self._made = keras_model

    needs_labels = False

    def _check_modes(self, *modes: str) -> None:
        """Accept all: a Keras model does what it can."""

    def _make_model(self, features: Any, labels: Any) -> Any:
        given = self._given
        try:
            model = keras.models.clone_model(given)
            model.set_weights(given.get_weights())
            model.compile_from_config(given.get_compile_config())
        except Exception as error:
            raise InputError(
                f"A model is copied by its config. Received: {given.name!r}, and {type(error).__name__}: "
                f"{error}. Register its own classes and functions by "
                "keras.saving.register_keras_serializable, or compile it in a strategy's scope"
            ) from error
        if not model.compiled:
            raise InputError(
                f"A model is compiled by its config. Received: {given.name!r}, which overrides compile. "
                "Compile it in a strategy's scope"
            )
        return model

    def _predict_batch(self, features: Any) -> Any:
        outputs = self._made(features, training=False)
        flat = [keras.ops.convert_to_numpy(output) for output in keras.tree.flatten(outputs)]
        return dict(zip(self._known_keys(), flat, strict=True))

    def _known_keys(self) -> list[str]:
        names = getattr(self._made, "output_names", None)
        if names is None and isinstance(self._made, keras.Sequential):
            names = [self._made.layers[-1].name]
        return list(names or ["output"])
