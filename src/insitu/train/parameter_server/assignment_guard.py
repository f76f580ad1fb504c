"""Refuses assignments that only the worker that runs a scheduled function would see.

With `tf.distribute` all variables of a scope live on servers, so a scheduled function may assign them
anywhere. Here servers update by the gradients of `strategy.run`, and metrics are summed over workers. Any
other assignment in a scheduled function would change one worker's copy, so it is an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras.src.backend.common.variables import Variable

from insitu.errors import TrainingError

_RAW_ASSIGNMENTS = ("assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update")


class AssignmentGuard:
    """Refuses assignments while `refusing` is open, but not while `lifted` is.

    `allowed` returns the variables that may be assigned.
    """

    def __init__(self, allowed: Callable[[], Sequence[Any]]) -> None:
        self._allowed = allowed
        self._refuses = False

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Refuse assignments to other variables while open."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._set(True))
            stack.enter_context(_replaced(Variable, "assign", self._check_keras))
            for owner in _raw_owners():
                for name in _RAW_ASSIGNMENTS:
                    if name in vars(owner):
                        stack.enter_context(_replaced(owner, name, self._check_raw))
            yield

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Allow assignments while open, as to what `strategy.run` does itself."""
        return self._set(False)

    @contextlib.contextmanager
    def _set(self, refuses: bool) -> Iterator[None]:
        before, self._refuses = self._refuses, refuses
        try:
            yield
        finally:
            self._refuses = before

    def _check_keras(self, variable: Any) -> None:
        if self._refuses and not _may_assign(variable, self._allowed()):
            raise _refusal(f"{variable.path!r}")

    def _check_raw(self, variable: Any) -> None:
        known = (getattr(v, "_value", None) for v in self._allowed())
        if self._refuses and not any(variable is v for v in known) and "seed_generator" not in variable.name:
            raise _refusal(f"the tf.Variable {variable.name!r}")


def _may_assign(variable: Any, allowed: Sequence[Any]) -> bool:
    # A seed generator's state is each process's own.
    return any(variable is v for v in allowed) or "seed_generator" in variable.path


def _refusal(name: str) -> TrainingError:
    return TrainingError(
        "A scheduled function trains by an optimizer of the strategy's scope in strategy.run, and counts by "
        f"metrics that were made in the scope; other assignments would be one worker's own. Received: an "
        f"assignment to {name}. Move it into the function that strategy.run runs, with gradients for "
        "optimizer.apply."
    )


def _raw_owners() -> tuple[type, ...]:
    """Return TensorFlow's classes of variables, on TensorFlow."""
    if keras.backend.backend() != "tensorflow":
        return ()
    from tensorflow.python.ops import resource_variable_ops

    return resource_variable_ops.BaseResourceVariable, resource_variable_ops.ResourceVariable


@contextlib.contextmanager
def _replaced(owner: type, name: str, check: Callable[[Any], None]) -> Iterator[None]:
    original = vars(owner)[name]

    @functools.wraps(original)
    def method(variable: Any, *args: Any, **kwargs: Any) -> Any:
        check(variable)
        return original(variable, *args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
