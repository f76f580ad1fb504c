"""Declares what `fit` needs of a strategy, and what strategies make for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit.epoch_lengths import EpochLengths
from insitu.train.replica import Logs, ShardBatch


class StepExecutor(Protocol):
    """Does the steps of one compiled model, for batches of one structure. Made by a strategy. All of it is
    collective but `example_output`.

    A step that raises RetryStep has changed nothing, and is called again with the parts of the shards that
    this task then has.
    """

    def train(
        self, position: LoopPosition, parts: Sequence[ShardBatch], report: Callable[[str], None]
    ) -> Logs:
        """Update the model once from the rows of `parts`, one part for each shard of this task. Calls
        `report` with the name of each phase that begins. Returns logs that are the same in each task."""

    def test(self, position: LoopPosition, parts: Sequence[ShardBatch]) -> Logs:
        """Return the metrics over all that was tested since they were reset."""

    def predict(self, position: LoopPosition, parts: Sequence[ShardBatch], example: Any) -> Any:
        """Return outputs for the rows of all shards of all tasks, in shard order; the same in each task.

        `example` is the model's output for any one row.
        """

    def example_output(self, data: Any) -> Any:
        """Return arrays of the structure, dtypes and shapes of the model's output for `data`; no other task
        takes part."""


class FitStrategy(Protocol):
    """A strategy, as far as a model's trainer needs it."""

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""

    @property
    def delegates_to_keras(self) -> bool:
        """Whether Keras' own loop and steps do what is asked, inside `placement()`: there is one replica,
        and no job that follows it."""

    def check_open(self, model: Any) -> None:
        """Raise TrainingError if `model` is trained in the scope of another strategy."""

    def check_recompile(self, model: Any) -> None:
        """Raise TrainingError if `model`, which belongs to this strategy, can't be compiled again."""

    def configure_compiled(self, model: Any) -> None:
        """Change what `compile` has chosen for `model`, if this strategy needs it otherwise."""

    def adapt_callbacks(self, callbacks: list[Any]) -> list[Any]:
        """Return the callbacks of a fit, with others in place of those that would do the wrong thing. Raises
        TrainingError for one that can't be replaced."""

    def placement(self) -> AbstractContextManager[Any]:
        """Return a scope in which variables are made where they belong."""

    def call_scope(self) -> AbstractContextManager[Any]:
        """Return a scope for a whole call of a model whose steps a trainer does."""

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """Prepare `model` to be built for batches like `example`, `part_rows` rows a shard at most."""

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        """Return the executor of `model` for batches like `example`; `first` if it has none yet."""

    def begin_fit(self, model: Any, fit_index: int, epochs: int, lengths: EpochLengths) -> tuple[int, int]:
        """Begin fit number `fit_index`, of so many epochs of these lengths. Returns the (epoch, step) to
        start at: another run of the script may have done what comes before."""

    def count_updates(self) -> int | None:
        """Return how many updates the model has had; None if the optimizer of each replica counts them."""

    def end_fit(self, fit_index: int, executors: Sequence[StepExecutor], position: LoopPosition) -> None:
        """End a fit whose steps are all done by these executors, up to `position`."""

    def evaluation_options(self, x: Any) -> dict[str, Any]:
        """Return which shards of `x` this task evaluates, as options of `make_feed`."""

    def show_updates(self) -> None:
        """Have the optimizer here count the updates that were made elsewhere."""

    def expect_saves(self) -> None:
        """Expect that the state of the fit that begins is saved now and then."""

    def save_elsewhere(self) -> bool:
        """Save the training's state in its place, if that isn't in the replicas; return whether it did."""

    def left_out(self) -> Collection[int]:
        """Return the shards of this task whose rows of the last step entered no update."""
