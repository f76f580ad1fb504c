"""Arguments of TensorFlow's functions: those that differ here go by name, others are refused.

A function with an old name takes by place what TensorFlow's takes in the same place, so that a script that is
brought here can't give an argument another meaning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from insitu.base.errors import InputError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class", bound=type)
_WITHOUT_EFFECT = (None, "sum_over_batch_size")
"""Values of an argument that isn't here which ask for nothing else than what is done."""


def takes_old(**advice: str) -> Callable[[_Function], _Function]:
    """Return a decorator for a function with an old name. `advice` says what to do instead of an argument
    that TensorFlow has and this function hasn't.

    The function then raises InputError for such an argument, unless it asks for nothing, and for more
    arguments by place than it names before its `*`.
    """

    def decorate(function: _Function) -> _Function:
        name = function.__qualname__.removesuffix(".__init__")
        parameters = list(inspect.signature(function).parameters.values())
        by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        own = 1 if by_place[:1] == ["self"] else 0

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(by_place):
                raise InputError(
                    f"{name} takes {', '.join(by_place[own:])} by place, and the others by name: "
                    f"{', '.join(by_name)}. Received: {len(args) - own} by place. TensorFlow has other "
                    "arguments there, so name them"
                )
            for old in advice.keys() & kwargs.keys():
                value = kwargs.pop(old)
                if not any(
                    value is each or (isinstance(value, str) and value == each) for each in _WITHOUT_EFFECT
                ):
                    raise InputError(f"{name} has no {old}. Received: {old}={value!r}. {advice[old]}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def class_takes_old(**advice: str) -> Callable[[_Class], _Class]:
    """Return `takes_old` for a class whose `__init__` is made, such as a dataclass."""

    def decorate(kind: _Class) -> _Class:
        made = kind.__init__  # type: ignore[misc]
        made.__qualname__ = f"{kind.__name__}.__init__"
        kind.__init__ = takes_old(**advice)(made)  # type: ignore[misc]
        return kind

    return decorate
