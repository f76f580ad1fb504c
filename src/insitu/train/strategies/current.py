"""The strategy that a script is in."""

from __future__ import annotations

from insitu.train.custom_loop import find_strategy
from insitu.train.strategies.base import Strategy
from insitu.train.strategies.one_device import OneDeviceStrategy

_defaults: list[Strategy] = []


def get_strategy() -> Strategy:
    """Return the strategy of the step that runs or of the innermost scope; outside of all, one for a single
    device, as `tf.distribute.get_strategy` does.

    Raises:
        TrainingError: outside of all scopes in a job of several workers.

    Example:
        >>> with (strategy := insitu.OneDeviceStrategy("cpu:0")).scope():
        ...     insitu.get_strategy() is strategy
        True
    """
    found: Strategy | None = find_strategy()
    if found is not None:
        return found
    if not _defaults:
        _defaults.append(OneDeviceStrategy())
    return _defaults[0]
