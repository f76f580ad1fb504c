"""Train with parameter servers: asynchronously, synchronously with backup workers, or with bounded
staleness."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.base.errors import TrainingError
from insitu.exchange import Group, join
from insitu.grid import Dataset
from insitu.parameters import MIN_PIECE_BYTES, ClosureClient, ConsistencyPolicy, Mode
from insitu.parameters.rules import check_min_piece_bytes
from insitu.train.backends import active_backend
from insitu.train.checkpoint import BackupAndRestore
from insitu.train.custom_loop import (
    AnyReduceOp,
    InputContext,
    LoopAggregation,
    LoopStep,
    StepModel,
    gather_values,
    reduce_values,
)
from insitu.train.elastic import LoopPosition
from insitu.train.fit import EpochLengths, StepExecutor, draw_by_worker
from insitu.train.parameter_server import (
    AssignmentGuard,
    ClipNorms,
    DataCheck,
    EndedFits,
    LossScale,
    ParameterServerSession,
    ServerAggregation,
    ServerLoopStep,
    ServerMarks,
    ServerMembership,
    ServerStep,
    SharedTests,
    TableLookup,
    UpdateCount,
    UpdatePlan,
    attach_tables,
    check_coordination,
    check_partitioner,
    check_vocabularies,
    clip_norms_of,
    embeddings_of,
    find_key_inputs,
    optimizer_of,
    refuse_recompile,
    serve_or_configure,
)
from insitu.train.replica import Replica, inner_optimizer, plan_combination
from insitu.train.strategies.base import Strategy, warn_unverified
from insitu.train.strategies.cluster_resolver import check_server_cluster
from insitu.train.strategies.communication import tell


class ParameterServerStrategy(Strategy):
    """The model's variables and its optimizer live in the `ps` tasks; each worker computes gradients of its
    own shards, pushes them, and trains on what it pulls.

    In a `ps` task the constructor serves until the job is over and never returns: the script's imports and
    registered classes are the server's. In a plain process, outside a job, the server is a thread of it.

    - `mode="async"`: each push is an update at once. Workers don't wait for each other, so there is no
      common step.
    - `mode="sync"`: a step takes the gradients of `replicas_to_aggregate` shards (None: all, which gives the
      bits of `MultiWorkerMirroredStrategy`); those that come late are dropped and counted.
    - `mode="bounded"`: as async, but no worker runs more than `max_staleness` steps ahead of the slowest.

    History and logs of training are of the rows of all workers in mode sync, otherwise of a worker's own.
    `evaluate`, validation and `predict` of arrays run in each worker alone, over all rows. Each worker takes
    the shards of an `insitu.dataset` that this names (its own by default). In mode sync the workers evaluate
    it together, and all get the scores of all rows; in the other modes each gets those of its own. State that
    the forward pass moves (BatchNorm) is averaged by the servers: in mode sync over a step, otherwise over
    what workers push that haven't seen each other's. Seeds differ by shard. A fit ends for all workers when
    the last one has pushed its last gradient, so all end with the same weights: what a late worker still has
    is applied. A restarted worker resumes behind the last of its gradients that the servers applied.

    Args:
        cluster_resolver: as scripts for `tf.distribute` pass it: a resolver that describes this job. The
            tasks are those of the job in any case.
        variable_partitioner: called with each variable's shape and dtype; returns into how many pieces it is
            cut (`insitu.experimental.partitioners`), in place of `min_piece_bytes`.
        mode: see above.
        replicas_to_aggregate: for mode sync, in [1, number of shards].
        max_staleness: for mode bounded, in steps.
        min_piece_bytes: a variable is split over servers into pieces of at least so many bytes. With
            `global_clipnorm` in mode "sync" the first server has all variables, since the norm is of all
            together; rows of tables stay spread.
        nan: `"refuse"` ends the fit, naming the variable, if a gradient isn't finite; `"clip"` takes 0 for
            values that aren't.
        table_optimizer: for the rows of `insitu.layers.Embedding`; None: the model's.
        context: who this process is; read from the environment by default.

    Raises:
        InputError: for a mode or a number that can't be.
        TrainingError: in a job without ps tasks, or a task that isn't a worker or ps.

    Example:
        >>> strategy = insitu.ParameterServerStrategy(mode="sync")  # doctest: +SKIP
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model = keras.Sequential([keras.layers.Dense(10)])
        ...     model.compile("adam", "mse")
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Any = None,
        *,
        mode: Mode = "async",
        replicas_to_aggregate: int | None = None,
        max_staleness: int = 4,
        min_piece_bytes: int = MIN_PIECE_BYTES,
        nan: str = "refuse",
        table_optimizer: Any = None,
        context: Context | None = None,
    ) -> None:
        context = context or read_context()
        check_server_cluster(cluster_resolver, context)
        check_partitioner(variable_partitioner)
        rules = ConsistencyPolicy(mode, context.num_shards, replicas_to_aggregate, max_staleness)
        check_min_piece_bytes(min_piece_bytes)
        context = context.for_strategy()
        self._server_config = serve_or_configure(
            context, rules, nan, "A ParameterServerStrategy needs ps tasks."
        )
        membership = ServerMembership(context)
        super().__init__(membership)
        self._reporter = membership.reporter
        self._mode = mode
        self._min_piece_bytes = min_piece_bytes
        self._partitioner = variable_partitioner
        self._table_optimizer = keras.optimizers.get(table_optimizer) if table_optimizer else None
        self._session: ParameterServerSession | None = None
        self._bound: Any = None
        self._loop_steps: list[ServerStep] = []
        #: The step that was made last. All steps have the same variables.
        self._step: ServerStep | None = None
        self._fits = EndedFits(context)
        #: Plan of the next fit, or the one under way. Written by `plan_updates` and `end_fit`.
        self._plan = UpdatePlan()
        #: None before the first fit.
        self._updates: UpdateCount | None = None
        #: True once a ClusterCoordinator was made. Written by `coordinate`.
        self._coordinated = False
        #: True while a function that a coordinator has scheduled runs. Written by `run_closure`.
        self._in_closure = False
        #: Compares the data of workers; None if they needn't be the same.
        self._data_check: DataCheck | None = None
        #: Combines evaluations of workers; None if each evaluates alone.
        self._shared_tests: SharedTests | None = None
        self._guard = AssignmentGuard(self.created_in_scope.summed)
        #: The group of this worker alone, for scheduled functions; None before one asks for it.
        self._own_group: Group | None = None
        #: True once the script has read `num_replicas_in_sync`. Written by that property.
        self._replicas_read = False

    @property
    def delegates_to_keras(self) -> bool:
        # The servers hold the variables; an evaluator's model has its own.
        return self.membership.context.evaluates

    def check_recompile(self, model: Any) -> None:
        if self._session is not None:
            refuse_recompile()

    def adapt_callbacks(self, callbacks: list[Any]) -> list[Any]:
        return adapt_callbacks(callbacks, is_chief=self.membership.context.is_chief)

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """Attach a table with room for the rows of one batch to each Embedding."""
        super().before_build(model, example, part_rows)
        optimizer = self._table_optimizer or inner_optimizer(model.optimizer)
        bounded = self._table_optimizer is None and self._mode != "sync"
        attach_tables(model, example, part_rows, lambda: self._session_for(model), optimizer, bounded=bounded)

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        """Return the step of `model`. The first time, the variables are defined on the servers, and this
        replica gets the servers' values: those of the chief, or trained ones."""
        session = self._session_for(model)
        if self._step is None:
            check_vocabularies(session.marks, self.membership.context.shards, model)
        layers = embeddings_of(model)
        lookup = TableLookup(session, layers, find_key_inputs(model, layers, example) if layers else ())
        rows = lookup.example(example)
        plan = plan_combination(model, rows, self.num_replicas_in_sync, weights_on_servers=True)
        warn_unverified(plan, model, self._membership)
        replica = active_backend().make_replica(model, rows, plan)
        # Each task evaluates by itself, and unless servers wait for all, each push is an update.
        replica.keep_own_losses(training=False)
        if self._mode == "sync" and len(self.membership.context.workers) > 1 and self._data_check is None:
            self._data_check = DataCheck(session.marks, self.membership.context.shards)
            self._shared_tests = SharedTests(session)
        if self._mode != "sync" or self.num_replicas_in_sync == 1:
            replica.keep_own_losses(training=True)
        return self._server_step(model, model.optimizer, replica, lookup)

    def _server_step(self, model: Any, optimizer: Any, replica: Replica, lookup: TableLookup) -> ServerStep:
        session, exact = self._open_session(), self._mode == "sync"
        inner = inner_optimizer(optimizer)
        if optimizer is not None:
            sizes = {"min_piece_bytes": self._min_piece_bytes, "partitioner": self._partitioner}
            session.define(model, inner, replica, exact=exact, **sizes)
        norms = ClipNorms() if exact or optimizer is None else clip_norms_of(inner)
        shards = len(self.membership.context.shards)
        scale = LossScale(optimizer)
        options: dict[str, Any] = {
            "norms": norms,
            "scale": scale,
            "shares_records": exact,
            "clips": self._server_config.nan == "clip",
            "shared_tests": self._shared_tests,
            "check": self._data_check,
        }
        self._step = ServerStep(replica, session, shards, lookup, **options)
        return self._step

    def _session_for(self, model: Any) -> ParameterServerSession:
        if self._bound is not None and self._bound is not model:
            raise TrainingError(
                "The servers of a job hold one model. Received: a second one compiled under the same "
                "ParameterServerStrategy."
            )
        self._bound = model
        return self._open_session()

    def _open_session(self) -> ParameterServerSession:
        if self._session is None:
            context, follow = self.membership.context, self._table_optimizer is None
            self._session = ParameterServerSession(context, self._server_config, tables_follow_model=follow)
        return self._session

    # Custom loops

    def loop_aggregation(self) -> LoopAggregation:
        """See `Strategy.run`. Unless a step takes the gradients of all replicas, each replica's is the mean
        over its own rows, and no call waits for those of other workers."""
        return ServerAggregation(self._membership if self._waits_for_all else None)

    @property
    def _waits_for_all(self) -> bool:
        """Whether a step takes the gradients of all replicas."""
        rules = self._server_config.rules
        return rules.mode == "sync" and rules.pushes_per_step == rules.total_replicas

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        shards = len(self.membership.context.shards)
        replica = active_backend().make_loop_replica(model, example)
        if not model.optimizer.groups:
            return ServerLoopStep(replica, None, shards)
        optimizer = optimizer_of(model)
        session = self._open_session()
        if not self._loop_steps:
            applied = session.applied()
            self._fits.read_valid(applied)
            session.begin(applied if self._coordinated else session.sequence, applied)
            session.leave_at_exit()
            check_vocabularies(session.marks, self.membership.context.shards)
        step = self._server_step(model, optimizer, replica, TableLookup(session, (), ()))
        self._loop_steps.append(step)
        return ServerLoopStep(replica, step, shards)

    def join(self) -> None:
        """Wait, in a custom loop, until each worker has come to this call, and take the weights after all
        workers' gradients. Nobody waits for this worker's gradients meanwhile. Raises ServerStalled."""
        session, number = self._open_session(), self._membership.count_fit()
        session.finish(number, waiting=self._reporter.follow_generation)
        if number >= len(self._fits.read_valid(session.applied())):
            self._fits.append(session.sequence)
        for step in self._loop_steps:
            step.refresh()

    def left_out(self) -> Collection[int]:
        return self._session.left_out if self._session is not None else ()

    @property
    def _compares_data(self) -> bool:
        # Others don't wait for each other.
        return self._waits_for_all and not self._coordinated and super()._compares_data

    def _after_step(self, position: LoopPosition, first: bool, last: bool) -> None:
        """Skip the check of equal replicas: workers' weights differ."""

    def _count_left(self, own: int) -> int:
        return own  # workers have no common step

    # Coordinated loops. See CoordinatedStrategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of shards; 1 with a ClusterCoordinator, with which each update is of one worker's
        rows."""
        self._replicas_read = True
        return 1 if self._coordinated else self._membership.num_shards

    def coordinate(self) -> tuple[ClosureClient, ServerMarks, Context]:
        context = self.membership.context
        check_coordination(self._mode, len(context.shards), self._step is not None)
        if self._replicas_read and self._membership.num_shards > 1:
            raise TrainingError(
                "With a ClusterCoordinator each update is of one worker's rows, so num_replicas_in_sync is "
                f"1. Received: a script that has read {self._membership.num_shards} before. Make the "
                "ClusterCoordinator first."
            )
        self._coordinated = True
        session = self._open_session()
        return session.coordinate(), session.marks, context

    def run_closure(self, call: Callable[[], Any], *, trial: bool) -> Any:
        session = self._open_session()
        session.pushes, self._in_closure = not trial, True
        try:
            with self._guard.refusing():
                return call()
        finally:
            session.pushes, self._in_closure = True, False

    def follow_generation(self) -> None:
        self._reporter.follow_generation()

    def summed_variables(self) -> list[Any]:
        return self.created_in_scope.summed()

    def pull_weights(self) -> None:
        for step in self._loop_steps:
            step.refresh()

    def make_worker_dataset(self, make: Callable[[], Any]) -> Any:
        context = self.membership.context
        with draw_by_worker(context.seed, context.index if len(context.workers) > 1 else None):
            return make()

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """See `Strategy.distribute_dataset`. With a ClusterCoordinator each worker has all of `dataset`."""
        return dataset if self._coordinated else super().distribute_dataset(dataset, options)

    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(self, dataset_fn: Callable[[Any], Any], options: Any = None) -> Any:
        """See `Strategy.distribute_datasets_from_function`. With a ClusterCoordinator each worker has
        all that `dataset_fn` returns."""
        if self._coordinated:
            return dataset_fn(InputContext())
        return super().distribute_datasets_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """See `Strategy.run`. With a ClusterCoordinator, for functions that it schedules."""
        if self._coordinated and not self._in_closure:
            raise TrainingError(
                "With a ClusterCoordinator a step runs on one worker. Received: strategy.run outside of a "
                "scheduled function, which all workers would run. Call it in a function that is passed to "
                "ClusterCoordinator.schedule."
            )
        with self._guard.lifted():
            return super().run(fn, args, kwargs, options)

    def group(self) -> Group:
        """Return the exchange of this job's tasks; in a scheduled function that of its worker alone."""
        if not self._in_closure:
            return super().group()
        if self._own_group is None:
            shards = range(len(self.membership.context.shards))
            self._own_group = join(0, ["127.0.0.1:1"], shards=shards, num_shards=len(shards))
        return self._own_group

    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: int | None = None) -> Any:
        """See `Strategy.reduce`. In a scheduled function, over the replicas of its worker alone."""
        active_backend().leave_graph("strategy.reduce")
        return reduce_values(self.group(), reduce_op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """See `Strategy.gather`. In a scheduled function, of the replicas of its worker alone."""
        active_backend().leave_graph("strategy.gather")
        return gather_values(self.group(), value, axis)

    # Fits

    def evaluation_options(self, x: Any) -> dict[str, Any]:
        """Return the options for all data that this worker was given: a dataset's own shards, all rows of
        anything else."""
        options = {**self.membership.feed_options, "launched_shards": None}
        if isinstance(x, Dataset):
            return {**options, "shards": x.shards, "num_shards": x.num_shards}
        return {**options, "shards": (0,), "num_shards": 1}

    def plan_updates(self, plan: UpdatePlan) -> None:
        """Have the next fit end as `plan` says, in all workers. Called in each of them."""
        self._plan = plan

    @property
    def updates(self) -> UpdateCount | None:
        """The updates of the fit under way, or of the last one; None before the first."""
        return self._updates

    @property
    def ends_together(self) -> bool:
        """Whether all workers end a fit at the same step: each step takes the gradients of all replicas."""
        return self._waits_for_all

    def count_updates(self) -> int | None:
        """Return how many updates the servers have made, as far as this worker knows, with those that the
        weights had before."""
        return self._plan.first if self._updates is None else self._updates.count

    def show_updates(self) -> None:
        """Have the optimizer here count the updates that the servers have made."""
        if self._session is not None:
            self._session.show_updates()

    def begin_fit(self, model: Any, fit_index: int, epochs: int, lengths: EpochLengths) -> tuple[int, int]:
        """Continue after the last gradient of this task's shards that the servers have."""
        if self._coordinated:
            raise TrainingError(
                "With a ClusterCoordinator a script trains by the functions that it schedules. Received: "
                "fit. Leave the coordinator out, and call fit in all workers."
            )
        session = self._session_for(model)
        if self._shared_tests is not None:
            self._shared_tests.begin_fit(fit_index)
        # Keras would put averages into the weights that this task's optimizer hasn't kept: the servers' has.
        object.__setattr__(
            inner_optimizer(model.optimizer), "finalize_variable_values", lambda variables: None
        )
        applied, plan = session.applied(), self._plan
        fits = self._fits.read_valid(applied)
        self._updates = updates = self._updates or UpdateCount(session.marks)
        if fit_index < len(fits):
            session.begin(fits[fit_index], applied)
            updates.begin(fit_index, plan)
            # Servers that were restored may not know that it has ended, and would not wait for this worker.
            session.finish(fit_index, waiting=self._reporter.follow_generation)
            return epochs, 0
        session.begin(applied)
        if self.membership.context.is_chief:
            updates.offer_first(fit_index, plan.first)
        if self._step is not None:
            self._step.start_fit(fit_index, self._reporter.follow_generation)
        updates.begin(fit_index, plan)
        start = fits[-1] if fits else 0
        done = applied - start
        place = lengths.locate(done) if done else (0, 0)
        if self._data_check is not None:
            self._data_check.begin(fit_index, resumed=done > 0)
        if updates.is_at_limit:
            return epochs, 0
        if place is None:
            raise TrainingError(
                "A worker finds its place again in data of known length. Received: data of unknown length, "
                "and a fit that was under way. Start the job again, on arrays or an insitu.Dataset."
            )
        if place[1]:
            session.resume_epoch()
        return place

    def expect_saves(self) -> None:
        membership = self.membership
        if self._session is not None and membership.context.job is not None and membership.is_leader:
            self._session.expect_checkpoints()

    def save_elsewhere(self) -> bool:
        """Have the servers write a consistent checkpoint while training continues."""
        job = self.membership.context.job
        if self._session is not None and job is not None:
            self._session.checkpoint(job.server_checkpoints)
        return True

    def end_fit(self, fit_index: int, executors: Sequence[StepExecutor], position: LoopPosition) -> None:
        """Wait for the other workers' last gradients, and take the resulting weights."""
        session = self._open_session()
        if self._shared_tests is not None:
            self._shared_tests.end_fit(fit_index)
        if fit_index < len(self._fits.read()):
            return
        if self._data_check is not None:
            self._data_check.record_end()
        session.finish(fit_index, waiting=self._reporter.follow_generation)
        if self._data_check is not None:
            self._data_check.compare()
        for step in executors:
            if isinstance(step, ServerStep):
                step.refresh()
        self._plan = UpdatePlan()
        self._fits.append(session.sequence)


# Callbacks of Keras that mean something else if servers hold the weights


def adapt_callbacks(callbacks: list[Any], *, is_chief: bool) -> list[Any]:
    """Return the callbacks with insitu's own in place of Keras' BackupAndRestore, which would save the
    weights of one worker. Raises TrainingError for one that can't be replaced."""
    if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks):
        raise TrainingError(
            "Under a ParameterServerStrategy the servers keep the averages of the weights. Received: "
            "keras.callbacks.SwapEMAWeights, which takes a worker's. Leave it out: averages become the "
            "weights when a fit ends."
        )
    theirs = keras.callbacks.BackupAndRestore
    if not any(isinstance(callback, theirs) for callback in callbacks):
        return callbacks
    tell(
        "keras.callbacks.BackupAndRestore: the servers hold the weights, so insitu.BackupAndRestore has them "
        "saved, in the job's folder.",
        is_chief=is_chief,
    )
    return [
        BackupAndRestore(save_freq=each.save_freq) if isinstance(each, theirs) else each for each in callbacks
    ]
