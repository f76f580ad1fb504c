"""Keras' `fit`, `evaluate` and `predict` under a strategy, on the host.

Begin reading with `trainer.py`, then `two_phase.py`, the step.
"""

from insitu.train.fit.adapter import FeedAdapter, register_dataset_adapter
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.feed import Feed
from insitu.train.fit.place import as_numbers
from insitu.train.fit.sources import make_feed
from insitu.train.fit.trainer import Binding, binding_of
from insitu.train.fit.two_phase import StepExecutor, TwoPhaseStep

__all__ = [
    "Binding",
    "Bookkeeper",
    "Feed",
    "FeedAdapter",
    "StepExecutor",
    "TwoPhaseStep",
    "as_numbers",
    "binding_of",
    "make_feed",
    "register_dataset_adapter",
]
