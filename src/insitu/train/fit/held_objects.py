"""Reads and writes what the objects hold that a callback keeps: a generator, a metric, one of the user's own.

Such an object is made by the script in each process. Its contents are carried over as plain values, into the
one that is there: no class is named, and nothing is made from what was sent.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import logging
import pathlib
import random
import re
import site
import sys
import sysconfig
import types
import uuid
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from insitu.base.serialization import copy_value, keep_serializable
from insitu.train.replica import to_numpy

_MAX_DEPTH = 8

_UNCHANGING = (
    type(None),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    enum.Enum,
    pathlib.PurePath,
    re.Pattern,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    range,
    slice,
    logging.Logger,
)
"""Kinds of values that hold nothing which changes, or nothing that is a callback's own."""

_OF_LIBRARIES = ("keras", "tensorflow", "jax", "jaxlib", "torch", "insitu")
"""Objects of models, data and strategies are carried over by these, or are the script's."""

State = dict[str, Any]


class CantBeCarried(TypeError):
    """Raised for an object of which nobody knows how to take what it holds to another process."""


def read_object(value: Any, but: Collection[int] = (), depth: int = 0) -> State:
    """Return what an object holds as plain values, for `write_object`; {} if it holds nothing that changes.
    Variables whose ids are in `but` are others' to carry. Raises CantBeCarried."""
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, np.random.RandomState):
        return {"generator": value.get_state(legacy=False)}
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return {"random": value.getstate()}
    if isinstance(value, keras.Metric):
        return {"variables": [to_numpy(one) for one in value.variables]}
    if hasattr(value, "assign") and hasattr(value, "numpy"):
        return {} if id(value) in but else {"value": np.array(to_numpy(value))}
    if is_unchanging(value):
        return {}
    if depth > _MAX_DEPTH or not _is_of_user(type(value).__module__, type(value).__mro__):
        raise CantBeCarried(type(value).__name__)
    attributes = copy_value(keep_serializable(vars(value)))
    inner = {
        name: read_object(one, but, depth + 1) for name, one in vars(value).items() if name not in attributes
    }
    return {"attributes": attributes, "objects": {name: state for name, state in inner.items() if state}}


def can_read(value: Any) -> bool:
    """Return whether `read_object` takes an object."""
    try:
        read_object(value)
    except CantBeCarried:
        return False
    return True


def write_object(value: Any, state: State) -> bool:
    """Have an object hold what another one of its kind held. Return False, and change nothing, for an object
    of another kind."""
    if "generator" in state and isinstance(value, np.random.Generator):
        value.bit_generator.state = state["generator"]
    elif "generator" in state and isinstance(value, np.random.RandomState):
        value.set_state(state["generator"])
    elif "random" in state and isinstance(value, random.Random):
        version, numbers, following = state["random"]
        value.setstate((version, tuple(numbers), following))
    elif "variables" in state and isinstance(value, keras.Metric):
        if len(value.variables) != len(state["variables"]):
            return False
        for variable, array in zip(value.variables, state["variables"], strict=True):
            variable.assign(array)
    elif "value" in state and hasattr(value, "assign"):
        value.assign(state["value"])
    elif "attributes" in state and _is_of_user(type(value).__module__, type(value).__mro__):
        for name in [n for n in keep_serializable(vars(value)) if n not in state["attributes"]]:
            del vars(value)[name]
        vars(value).update(state["attributes"])
        return all(write_object(vars(value).get(name), one) for name, one in state["objects"].items())
    else:
        return False
    return True


def is_unchanging(value: Any) -> bool:
    """Return whether an object holds nothing that changes, or nothing that is a callback's own."""
    if isinstance(value, (*_UNCHANGING, keras.callbacks.Callback)):
        return True
    root = type(value).__module__.partition(".")[0]
    # Torch changes its tensors in place.
    return root in _OF_LIBRARIES and not (root == "torch" and type(value).__name__ == "Tensor")


@functools.cache
def _is_of_user(module: str, classes: tuple[type, ...]) -> bool:
    """Return whether a class was written by the script's author, in Python, without slots."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module != "__main__" and (file is None or file.startswith(_installed())):
        return False
    return all("__slots__" not in vars(one) for one in classes[:-1])


@functools.cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return (paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *site.getsitepackages())
