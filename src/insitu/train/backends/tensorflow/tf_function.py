"""Allow a `tf.function` around `strategy.run`, as in every example for `tf.distribute`.

`strategy.run` compiles the step itself and moves gradients between tasks outside of graphs. So a function
that calls it can't be one graph: as soon as it is found to call it, it runs as the Python code that it is,
then and from then on. Its steps stay compiled.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx as autograph_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from insitu.train.custom_loop import PerReplica

_RUNS_AS_PYTHON = "_insitu_runs_as_python"


class CalledInGraph(BaseException):
    """Raised through the trace of a `tf.function` by what can't be part of a graph.

    Not an Exception: AutoGraph and scripts would take it for an error of the function.
    """


def leave_graph(name: str) -> None:
    """See `Backend`. The `tf.function` that is being traced runs as Python: what its trace has done so far is
    done again."""
    if tf.inside_function():
        raise CalledInGraph(
            f"{name} moves values between tasks, outside of graphs. Received: a call in a graph that isn't a "
            "tf.function's, such as Dataset.map. Call it outside."
        )


def install() -> None:
    """Have `tf.function`s run as Python if they turn out to need it. Done once."""
    original = Function.__call__
    if getattr(original, "knows_insitu", False):
        return

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if _RUNS_AS_PYTHON not in vars(function):
            try:
                return original(function, *args, **kwargs)
            except CalledInGraph:
                if tf.inside_function():
                    raise  # it is called by another one, which can't be a graph either
            except (TypeError, ValueError):
                # An input_signature, for values of replicas.
                if tf.inside_function() or not _has_per_replica((args, kwargs)):
                    raise
            setattr(function, _RUNS_AS_PYTHON, True)
        elif tf.inside_function():
            raise CalledInGraph(
                "A function that calls strategy.run can't be part of a graph. Received: one "
                "in a graph that isn't a tf.function's. Call it outside."
            )
        return function.python_function(*args, **kwargs)

    call.knows_insitu = True  # type: ignore[attr-defined]
    Function.__call__ = call
    # AutoGraph would convert insitu's own functions too.
    autograph_config.CONVERSION_RULES = (
        autograph_config.DoNotConvert("insitu"),
        *autograph_config.CONVERSION_RULES,
    )


def convert(step: Any) -> Any:
    """Return a function whose `if`, `while` and `for` over tensors are operations."""
    return autograph.tf_convert(step, autograph_ctx.ControlStatusCtx(autograph_ctx.Status.ENABLED))


def _has_per_replica(structure: Any) -> bool:
    return any(isinstance(leaf, PerReplica) for leaf in tf.nest.flatten(structure))
