"""Refuse steps that use weights after their update, or assign them by themselves.

With several replicas the update follows the step, when the gradients of all are combined. A step's code after
`optimizer.apply` would see the old weights, and its assignments would be overwritten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import keras
from keras.src.trainers.trainer import Trainer

from insitu.base.errors import TrainingError

UPDATE_ADVICE = (
    "Use a constraint= of the layer to clip or project weights, use_ema=True of the optimizer for averages, "
    "a callback's on_train_batch_end for what follows an update, or a custom loop (strategy.run)."
)


@contextlib.contextmanager
def refuse_use_of_updated(model: Any, is_applied: Callable[[], bool]) -> Iterator[None]:
    """While open, an assignment of the model's trainable variables raises TrainingError; so does the use of
    their values, or of what the update moves in the optimizer, once `is_applied()`."""
    if not isinstance(model, Trainer):  # the step of a custom loop has been checked when it was traced
        yield
        return
    trainable = {id(v) for v in model.trainable_variables} - _normalized_kernels(model)
    kept = find_learning_rate(model.optimizer)
    moved = trainable | {id(v) for v in model.optimizer.variables if v is not kept}

    def is_updated(variable: Any) -> bool:
        return id(variable) in moved and is_applied()

    def check_assign(variable: Any) -> None:
        if id(variable) in trainable:
            _refuse_assignment(variable.path)

    with _watched_variables(is_updated, check_assign):
        yield


def make_error(message: str) -> TrainingError:
    """Return an error that Keras leaves as it is, if it is raised in the call of a layer."""
    error = TrainingError(message)
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


def refuse_assigned(model: Any, variables: Sequence[Any]) -> None:
    """Raise TrainingError for `variables` that a step has assigned, past Keras."""
    kernels = _normalized_kernels(model)
    for variable in variables:
        if id(variable) not in kernels:
            _refuse_assignment(variable.path)


def _refuse_assignment(what: str) -> NoReturn:
    raise make_error(
        "A train_step leaves the weights that it trains to the optimizer: with several replicas the update "
        f"comes after the step. Received: an assignment of {what!r}. {UPDATE_ADVICE}"
    )


def refuse_read(what: str) -> NoReturn:
    """Raise the TrainingError for the use of something that the update moves."""
    raise make_error(
        "A train_step can't use weights after optimizer.apply(): with several replicas the update comes "
        f"after the step, once gradients are combined. Received: a read of {what!r}. {UPDATE_ADVICE}"
    )


def find_learning_rate(optimizer: Any) -> Any:
    """Return the variable of the learning rate, which an update leaves alone, or None."""
    return getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)


def _normalized_kernels(model: Any) -> set[int]:
    """Return the ids of kernels that SpectralNormalization divides in the forward pass: by what doesn't
    depend on rows, so that each replica does the same."""
    layers = (keras.layers.SpectralNormalization,)
    return {
        id(layer.kernel) for layer in model._flatten_layers() if isinstance(layer, layers) and layer.built
    }


@contextlib.contextmanager
def _watched_variables(
    is_updated: Callable[[Any], bool], check_assign: Callable[[Any], None]
) -> Iterator[None]:
    """While open, call `check_assign` before a Keras variable is assigned. A variable that `is_updated` has a
    value that nothing can be done with."""
    kind = keras.Variable
    own = {name: vars(kind)[name] for name in ("value", "assign") if name in vars(kind)}
    value, assign = kind.value, kind.assign

    def read(variable: Any) -> Any:
        return UpdatedValue(variable.path) if is_updated(variable) else value.fget(variable)

    def watched_assign(variable: Any, new: Any) -> Any:
        check_assign(variable)
        return assign(variable, new)

    kind.value, kind.assign = property(read), watched_assign
    try:
        yield
    finally:
        for name in ("value", "assign"):
            if name in own:
                setattr(kind, name, own[name])
            else:
                delattr(kind, name)


class UpdatedValue:
    """Stands for a value after the update. Any use raises TrainingError; a step may pass it on in its
    state."""

    def __init__(self, path: str) -> None:
        self._path = path

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        refuse_read(next((arg._path for arg in args if isinstance(arg, cls)), "a weight"))

    def __getattr__(self, name: str) -> NoReturn:
        # Questions of Python and the backends to any object get the answer of an object of no such kind.
        if name.startswith("_") or name in ("aval", "weak_type", "sharding"):
            raise AttributeError(name)
        refuse_read(self._path)


def _refuse_operation(value: UpdatedValue, *others: Any, **options: Any) -> NoReturn:
    del others, options
    refuse_read(value._path)


for _name in (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "rpow"),
    *("neg", "abs", "getitem", "float", "lt", "le", "gt", "ge", "iter", "len"),
    *("array", "jax_array", "tf_tensor"),
):
    setattr(UpdatedValue, f"__{_name}__", _refuse_operation)
