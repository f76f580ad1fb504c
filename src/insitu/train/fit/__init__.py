"""Keras' `fit`, `evaluate` and `predict` under a strategy, on the host.

Begin reading with `trainer.py`, then `two_phase.py`, the step. `keras_patch.py` is how Keras gets there.
"""

from insitu.train.fit.adapter import FeedAdapter, register_dataset_adapter
from insitu.train.fit.bookkeeping import Bookkeeper
from insitu.train.fit.data_fingerprint import check_same_data
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.fit.feed import Feed
from insitu.train.fit.fit_strategy import FitStrategy, StepExecutor
from insitu.train.fit.keras_patch import dispatch_methods, record_maker
from insitu.train.fit.predicting_into import predict_into
from insitu.train.fit.sources import Repeated, draw_by_worker, is_never_sharded, make_feed, seed_unseeded
from insitu.train.fit.step_log import StepLog
from insitu.train.fit.tf_dataset import find_shards_of
from insitu.train.fit.trainer import KerasTrainer, trainer_of, warn_of_own_fit
from insitu.train.fit.two_phase import TwoPhaseStep
