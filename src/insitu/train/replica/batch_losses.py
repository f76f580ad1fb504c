"""Losses in which the rows of a batch depend on each other: contrastive ones, triplets, two towers.

With several replicas nobody has all rows of a step. The user says of which rows such a loss is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras

from insitu.base.errors import InputError, TrainingError
from insitu.train.replica.leaves import pack_batch
from insitu.train.replica.state import read_losses

_MARK = "_insitu_rows"
REPLICA, GLOBAL = "replica", "global"
_COMPUTE_LOSS = "compute_loss"
_METHODS = ("train_step", "test_step", _COMPUTE_LOSS)
"""Methods of a model that may be marked."""

OF_PAIRS = (
    "A loss over the rows of the global batch gets values for rows, of all replicas. Received: "
    "insitu.over_batch(..., rows='global') of outputs whose rows have another shape in a batch of another "
    "size, as outputs for pairs of rows have. Let the model return values for rows, and make pairs in the "
    "loss; or say rows='replica'."
)

Loss = TypeVar("Loss")


def over_batch(loss: Loss, *, rows: str) -> Loss:
    """Say over which rows a loss goes in which the rows of a batch depend on each other. Returns `loss`.

    `loss` is a function or `keras.losses.Loss` for `compile`, or the method `compute_loss` or `train_step` of
    a model. With `rows="replica"` each replica takes its own rows, and losses and gradients are averaged by
    rows, as with tf.distribute: the negatives of a row are those of its replica, so the result depends on the
    number of replicas. With `rows="global"` the rows are those of the global batch, as on one device.
    Replicas then exchange all arguments of the loss. `fit` raises TrainingError if that is impossible:
    for `train_step`, for outputs for pairs of rows, and on parameter servers.

    Example:
        >>> def loss(labels, outputs):
        ...     return keras.ops.mean(keras.ops.abs(outputs - keras.ops.mean(outputs, axis=0)))
        >>> loss = insitu.over_batch(loss, rows="global")
    """
    if rows not in (REPLICA, GLOBAL):
        raise InputError(f"The rows of a loss are those of a 'replica' or 'global'. Received: rows={rows!r}")
    if not callable(loss):
        raise InputError(
            "A loss over the rows of a batch is a function, a keras.losses.Loss or a method of a model. "
            f"Received: {type(loss).__name__}"
        )
    object.__setattr__(loss, _MARK, rows)
    return loss


def find_rows(model: Any) -> str | None:
    """Return the rows that losses of `model` are marked with; None if none is. Raises TrainingError if they
    differ."""
    found = {rows for each in _marked_of(model) if (rows := getattr(each, _MARK, None)) is not None}
    if len(found) > 1:
        raise TrainingError(
            "All losses of a model are computed over the same rows. Received: rows='replica' and "
            f"rows='global' in {model.name!r}. Choose one"
        )
    return found.pop() if found else None


def find_global_step(model: Any) -> str | None:
    """Return the name of the step of `model` that must be over the rows of the global batch; None if none
    is."""
    steps = (name for name in _METHODS if name != _COMPUTE_LOSS)
    return next((name for name in steps if _is_global(getattr(type(model), name, None))), None)


def _marked_of(model: Any) -> Iterator[Any]:
    for name in _METHODS:
        yield getattr(type(model), name, None)
    for loss in read_losses(model):
        yield loss
        yield getattr(loss, "fn", None)


def check_global(model: Any, num_replicas: int) -> None:
    """Raise TrainingError if losses must be over the rows of a replica, but one program computes them
    over those of the global batch."""
    if num_replicas > 1 and find_rows(model) == REPLICA:
        raise TrainingError(
            "A program over a mesh of devices computes a loss over all rows of the global batch. Received: "
            "insitu.over_batch(..., rows='replica'). Say rows='global', or use MultiWorkerMirroredStrategy"
        )


@contextlib.contextmanager
def intercept_global(model: Any, over_batch: Callable[[Any, Callable[[Any], Any]], Any]) -> Iterator[None]:
    """While open, calls of losses of `model` over the rows of the global batch go to `over_batch`, with their
    arguments and a function of those."""
    call = keras.losses.Loss.__call__

    def call_loss(loss: Any, *arguments: Any, **options: Any) -> Any:
        if not _is_global(loss) and not _is_global(getattr(loss, "fn", None)):
            return call(loss, *arguments, **options)
        return over_batch((arguments, options), lambda given: call(loss, *given[0], **given[1]))

    keras.losses.Loss.__call__ = call_loss
    try:
        with _intercepted_method(model, over_batch):
            yield
    finally:
        keras.losses.Loss.__call__ = call


@contextlib.contextmanager
def _intercepted_method(model: Any, over_batch: Callable[[Any, Callable[[Any], Any]], Any]) -> Iterator[None]:
    if not _is_global(getattr(type(model), _COMPUTE_LOSS, None)):
        yield
        return
    method = getattr(model, _COMPUTE_LOSS)

    @functools.wraps(method)
    def compute_loss(*arguments: Any, **options: Any) -> Any:
        return over_batch((arguments, options), lambda given: method(*given[0], **given[1]))

    # Around Keras' tracking: this is no part of the model's state.
    object.__setattr__(model, _COMPUTE_LOSS, compute_loss)
    try:
        yield
    finally:
        object.__delattr__(model, _COMPUTE_LOSS)


def _is_global(loss: Any) -> bool:
    return getattr(loss, _MARK, None) == GLOBAL


def call_over_batch(
    arguments: Any, take: Callable[[list[Any]], list[Any]], call: Callable[[Any], Any]
) -> Any:
    """Return `call(arguments)` with those tensors that `take` returns for all that have rows, masks
    included."""
    leaves = keras.tree.flatten(arguments)
    places = [index for index, leaf in enumerate(leaves) if len(getattr(leaf, "shape", ()))]
    own = [keras.ops.convert_to_tensor(leaves[index]) for index in places]
    masks = {index: mask for index in places if (mask := _mask_of(leaves[index])) is not None}
    taken = take([*own, *masks.values()])
    for index, tensor in zip(places, taken, strict=False):
        leaves[index] = tensor
    for index, mask in zip(masks, taken[len(own) :], strict=True):
        keras.src.backend.set_keras_mask(leaves[index], mask)
    return call(pack_batch(arguments, [leaf for leaf in leaves if leaf is not None]))


def _mask_of(leaf: Any) -> Any:
    return keras.src.backend.get_keras_mask(leaf)
