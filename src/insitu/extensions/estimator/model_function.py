"""What a `model_fn` returns, and the rules that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import keras

from insitu.base.errors import InputError
from insitu.base.tf_signatures import class_takes_old
from insitu.extensions.estimator.specs import check_evaluation_hooks

ModelFn = Callable[..., Any]


class ModeKeys:
    """What a `model_fn` is run for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True, slots=True)
class TrainOp:
    """What a training step does: `optimizer` makes `loss` smaller, as `optimizer.minimize(loss)` did."""

    #: A Keras optimizer.
    optimizer: Any
    #: The loss of the EstimatorSpec.
    loss: Any
    #: The variables that it trains; None: all that are trainable.
    var_list: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, keras.optimizers.Optimizer):
            raise InputError(
                f"TrainOp takes a Keras optimizer. Received: {self.optimizer!r}. Pass such as "
                "keras.optimizers.Adam(0.001)"
            )


@class_takes_old(
    prediction_hooks="Leave it out: predictions have no hooks",
    scaffold="Leave it out: checkpoints are insitu's",
)
@dataclass(frozen=True, slots=True)
class EstimatorSpec:
    """What a `model_fn` makes of the features, for one mode."""

    #: The mode that the `model_fn` was called with.
    mode: str
    #: A tensor, or a dict of tensors, with a row for each row of the features.
    predictions: Any = None
    #: One number: the mean over rows.
    loss: Any = None
    #: A TrainOp, a list of TrainOps over distinct variables, or an optimizer, which trains all variables.
    train_op: Any = None
    #: Keras metrics by name, whose update_state was called.
    eval_metric_ops: Mapping[str, Any] | None = None
    #: By "serving_default", what is exported in place of the predictions.
    export_outputs: Mapping[str, Any] | None = None
    #: Hooks and Keras callbacks of a training, in the chief alone.
    training_chief_hooks: Sequence[Any] | None = None
    #: Hooks and Keras callbacks of a training, in each task.
    training_hooks: Sequence[Any] | None = None
    #: What follows goes by name.
    _: KW_ONLY
    #: Keras callbacks of an evaluation.
    evaluation_hooks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        for name in ("training_chief_hooks", "training_hooks", "evaluation_hooks"):
            hooks = tuple(getattr(self, name) or ())
            wrong = next((hook for hook in hooks if not isinstance(hook, keras.callbacks.Callback)), None)
            if wrong is not None:
                raise InputError(
                    f"{name} are hooks of insitu.estimator and Keras callbacks. Received: "
                    f"{type(wrong).__name__}. Derive it from insitu.estimator.SessionRunHook"
                )
            object.__setattr__(self, name, hooks)
        check_evaluation_hooks("EstimatorSpec.evaluation_hooks", self.evaluation_hooks or ())


def call_model_fn(
    model_fn: ModelFn, features: Any, labels: Any, mode: str, params: Any, config: Any
) -> EstimatorSpec:
    """Return the spec of one mode. Passes `labels`, `mode`, `params` and `config` where the function takes
    them. Raises InputError for what isn't a spec of that mode."""
    taken = inspect.signature(model_fn).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    given = {"labels": labels, "mode": mode, "params": params, "config": config}
    arguments = {name: value for name, value in given.items() if takes_all or name in taken}
    try:
        spec = model_fn(features, **arguments)
    except KeyError as error:
        if isinstance(features, Mapping) and error.args and error.args[0] not in features:
            raise InputError(
                f"model_fn takes features that the data has: {', '.join(map(str, features))}. Received: it "
                f"asks for {error.args[0]!r}. Return that feature from input_fn, or leave it out of model_fn"
            ) from error
        raise
    if not isinstance(spec, EstimatorSpec):
        raise InputError(
            f"model_fn returns an insitu.estimator.EstimatorSpec for each mode. Received: "
            f"{type(spec).__name__} for mode {mode!r}"
        )
    if spec.mode != mode:
        raise InputError(
            f"An EstimatorSpec has the mode that model_fn was called with. Received: {spec.mode!r} for mode "
            f"{mode!r}. Return EstimatorSpec(mode, ...)"
        )
    _check_needed(spec)
    return spec


def check_model_fn(model_fn: Any) -> None:
    """Raise InputError for what can't be called with features."""
    if not callable(model_fn):
        raise InputError(
            f"model_fn is a function of (features, labels, mode, params). Received: {model_fn!r}"
        )
    names = list(inspect.signature(model_fn).parameters)
    if not names or names[0] != "features":
        raise InputError(
            "model_fn is a function of (features, labels, mode, params). Received: one of "
            f"({', '.join(names)}). Name the first argument features"
        )


def _check_needed(spec: EstimatorSpec) -> None:
    """Raise InputError if what the mode needs is missing."""
    needed = {
        ModeKeys.TRAIN: ("loss", "train_op"),
        ModeKeys.EVAL: ("loss",),
        ModeKeys.PREDICT: ("predictions",),
    }[spec.mode]
    missing = [name for name in needed if getattr(spec, name) is None]
    if missing:
        given = ", ".join(f"{name}=..." for name in needed)
        raise InputError(
            f"An EstimatorSpec of mode {spec.mode!r} has {' and '.join(needed)}. Received: none for "
            f"{' and '.join(missing)}. Return EstimatorSpec(mode, {given})"
        )
    for output in keras.tree.flatten(spec.predictions) if spec.mode == ModeKeys.PREDICT else ():
        if not isinstance(output, keras.KerasTensor) or not output.shape:
            raise InputError(
                "Predictions have a row for each row of the features, and are computed by layers and "
                f"keras.ops. Received: {output!r}"
            )
    if spec.loss is not None and spec.mode != ModeKeys.PREDICT:
        shape = getattr(spec.loss, "shape", None)
        if not isinstance(spec.loss, keras.KerasTensor) or tuple(shape or ()) != ():
            raise InputError(
                "The loss of an EstimatorSpec is one number, computed from features or labels by layers and "
                f"keras.ops. Received: {spec.loss!r}. Take the mean over rows, by keras.ops.mean"
            )


def make_optimizer(spec: EstimatorSpec, trainable: Sequence[Any]) -> Any:
    """Return the optimizer that `spec.train_op` says, for the trainable variables. Raises InputError."""
    given = spec.train_op
    ops = list(given) if isinstance(given, (list, tuple)) else [given]
    ops = [TrainOp(op, spec.loss) if isinstance(op, keras.optimizers.Optimizer) else op for op in ops]
    for op in ops:
        if not isinstance(op, TrainOp):
            raise InputError(
                "train_op is an insitu.estimator.TrainOp(optimizer, loss), or a list of them. Received: "
                f"{op!r}"
            )
        if op.loss is not spec.loss:
            raise InputError(
                "A TrainOp makes the loss of its EstimatorSpec smaller. Received: another loss. Pass the "
                "same tensor to both, such as the sum of several losses"
            )
    if len(ops) == 1 and (ops[0].var_list is None or _ids(ops[0].var_list) == _ids(trainable)):
        return ops[0].optimizer
    return _make_of_parts(ops, trainable)


def _make_of_parts(ops: Sequence[TrainOp], trainable: Sequence[Any]) -> Any:
    """Return an optimizer that leaves each variable to that of its TrainOp. Raises InputError."""
    places: dict[int, Any] = {}
    for op in ops:
        for variable in op.var_list if op.var_list is not None else trainable:
            if id(variable) in places:
                raise InputError(
                    "Each variable is trained by one TrainOp. Received: several for "
                    f"{variable.path!r}. Give each TrainOp its var_list"
                )
            places[id(variable)] = op.optimizer
    left = next((v for v in trainable if id(v) not in places), None)
    if left is not None:
        raise InputError(
            "The TrainOps train all trainable variables. Received: none with "
            f"{left.path!r} in its var_list. Set layer.trainable = False if nothing is to train it"
        )
    strange = set(places) - _ids(trainable)
    if strange:
        raise InputError(
            "var_list has trainable variables of the layers that model_fn calls. Received: others. Take "
            "layer.trainable_variables once the layer was called"
        )
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        raise InputError(
            "Several optimizers for one model need keras.optimizers.MultiOptimizer. Received: Keras "
            f"{keras.__version__}, without it. Install a newer Keras, or use one optimizer"
        )
    return keras.optimizers.MultiOptimizer(lambda variable: places[id(variable)])


def _ids(variables: Sequence[Any]) -> set[int]:
    return {id(variable) for variable in variables}
