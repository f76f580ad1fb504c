"""Train dense layers synchronously, around tables that are updated asynchronously."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.exchange import Group
from insitu.parameters import ConsistencyPolicy
from insitu.train.backends import active_backend
from insitu.train.collectives import barrier_token
from insitu.train.custom_loop import LoopAggregation
from insitu.train.elastic import LoopPosition
from insitu.train.fit import StepExecutor, TwoPhaseStep
from insitu.train.parameter_server import (
    HybridReplica,
    LossScale,
    ParameterServerSession,
    TableLookup,
    attach_tables,
    embeddings_of,
    find_key_inputs,
    refuse_recompile,
    serve_or_configure,
)
from insitu.train.replica import inner_optimizer, plan_combination
from insitu.train.strategies.base import warn_unverified
from insitu.train.strategies.synchronous import SynchronousStrategy


class HybridStrategy(SynchronousStrategy):
    """Tables of `insitu.layers.Embedding` live in the `ps` tasks and take each worker's gradients at once;
    all other variables live in the workers, which update them together as `MultiWorkerMirroredStrategy` does.
    Lian et al. 2022, "Persia", is the source of the division: each batch touches few rows of a table, where a
    stale gradient does little harm, but all elements of dense layers.

    In a `ps` task the constructor serves until the job is over and never returns. In a plain process, outside
    a job, the server is a thread of it.

    A step's dense update is the mean over all rows of the global batch. Its rows' gradients are pushed behind
    it, each shard's, the mean over its part of the batch, an update of its own. So with SGD a row moves by
    rate * shards * the mean gradient of the global batch: give `table_optimizer` a rate divided by
    `num_replicas_in_sync` for the steps of one worker. The next step doesn't wait for the pushes of other
    workers, but a fit ends once the servers have all. Workers
    evaluate and predict together. `BackupAndRestore` saves the dense variables, and has the servers write
    theirs; the two aren't of one moment. A worker that dies takes along the rows' gradients of at most one
    step, and tables don't go back if all tasks start over from an older checkpoint.

    Args:
        nan: `"refuse"` ends the fit, naming the table, if rows' gradients aren't finite; `"clip"` takes 0 for
            values that aren't.
        table_optimizer: for the rows; None: the model's.
        context: who this process is; read from the environment by default.

    Raises TrainingError in a job without ps tasks, or for a model without such a table.

    Example:
        >>> strategy = insitu.HybridStrategy()  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     layers = [insitu.layers.Embedding(8), keras.layers.Flatten(), keras.layers.Dense(1)]
        ...     model = keras.Sequential(layers)
        ...     model.compile("adam", "mse")
    """

    def __init__(
        self, *, nan: str = "refuse", table_optimizer: Any = None, context: Context | None = None
    ) -> None:
        context = context or read_context()
        rules = ConsistencyPolicy("async", context.num_shards)
        context = context.for_strategy()
        self._server_config = serve_or_configure(
            context, rules, nan, "A HybridStrategy keeps tables in ps tasks."
        )
        super().__init__(context=context)
        self._membership.shards_move = False
        self._table_optimizer = keras.optimizers.get(table_optimizer) if table_optimizer else None
        self._session: ParameterServerSession | None = None
        self._replicas: list[HybridReplica] = []

    def _open_session(self) -> ParameterServerSession:
        if self._session is None:
            context, follow = self.membership.context, self._table_optimizer is None
            self._session = ParameterServerSession(context, self._server_config, tables_follow_model=follow)
            # An earlier incarnation of this task pushed up to these numbers.
            self._session.begin(self._session.applied())
        return self._session

    @property
    def delegates_to_keras(self) -> bool:
        # The servers hold the tables; an evaluator has none.
        return self.membership.context.evaluates

    def check_recompile(self, model: Any) -> None:
        if self._session is not None:
            refuse_recompile()

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """Attach a table with room for the rows of one batch to each Embedding."""
        super().before_build(model, example, part_rows)
        optimizer = self._table_optimizer or inner_optimizer(model.optimizer)
        attach_tables(model, example, part_rows, self._open_session, optimizer)

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        layers = embeddings_of(model)
        if not layers:
            raise TrainingError(
                "A HybridStrategy is for models with tables on servers. Received: a model without an "
                "insitu.layers.Embedding. Use MultiWorkerMirroredStrategy."
            )
        session = self._open_session()
        lookup = TableLookup(session, layers, find_key_inputs(model, layers, example))
        rows = lookup.example(example)
        plan = plan_combination(model, rows, self.num_replicas_in_sync)
        warn_unverified(plan, model, self._membership)
        inner, scale = active_backend().make_replica(model, rows, plan), LossScale(model.optimizer)
        replica = HybridReplica(inner, session, lookup, scale)
        session.follow_settings(model.optimizer, dense=False)
        self._replicas.append(replica)
        if first:
            self._broadcast_initial_state(model)
        return TwoPhaseStep(replica, self._membership.lockstep)

    def end_fit(self, fit_index: int, executors: Sequence[StepExecutor], position: LoopPosition) -> None:
        """Wait until the servers have the last rows' gradients of all workers: who reads rows then finds
        them."""

        def wait(group: Group) -> NDArray[Any]:
            for replica in self._replicas:
                replica.wait_for_pushes()
            return barrier_token(group)

        self._membership.lockstep.run_unit_until_done(position, wait)

    def save_elsewhere(self) -> bool:
        job = self.membership.context.job
        if job is not None and self.membership.is_leader:
            self._open_session().checkpoint(job.server_checkpoints)
        return False

    def loop_aggregation(self) -> LoopAggregation:
        raise TrainingError(
            "A custom loop has no tables on servers. Received: strategy.run under a HybridStrategy. Use fit."
        )
