"""The base of all strategies: the scope, and the low-level calls of a custom loop."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from insitu.base.errors import InputError, InsituError, TrainingError
from insitu.base.missing_names import missing_name
from insitu.exchange import Group
from insitu.grid import Dataset
from insitu.train.backends import active_backend
from insitu.train.collectives import gather_sizes, squeeze_shards
from insitu.train.custom_loop import (
    LOOP_CHECK_INTERVAL,
    AnyReduceOp,
    CreationTracker,
    DistributedDataset,
    EpochLog,
    InputContext,
    LoopAggregation,
    LoopRunner,
    LoopStep,
    RunOptions,
    StepModel,
    ValueContext,
    WorkerFeed,
    average_loss,
    check_same_place,
    check_weights,
    cut_for_replicas,
    find_strategy,
    gather_values,
    is_per_replica,
    local_values,
    make_values,
    open_scope,
    reduce_values,
    scale_by_share,
)
from insitu.train.elastic import LoopPosition, Membership
from insitu.train.fit import (
    Bookkeeper,
    EpochLengths,
    KerasTrainer,
    StepExecutor,
    check_same_data,
    dispatch_methods,
    is_never_sharded,
    make_feed,
    record_maker,
    register_dataset_adapter,
    seed_unseeded,
    trainer_of,
    warn_of_own_fit,
)
from insitu.train.replica import CombinationPlan, check_one_optimizer, count_rows


class Strategy:
    """Decides where replicas and variables are, and how they are synchronised.

    Models compiled inside `scope()` train under the strategy: their `fit`, `evaluate` and `predict` are
    collective, so every task calls them in the same order.

    Example:
        >>> strategy = insitu.get_strategy()
        >>> strategy.num_replicas_in_sync
        1
        >>> with strategy.scope():
        ...     insitu.has_strategy()
        True
    """

    def __init__(self, membership: Membership) -> None:
        shorten_printed_tracebacks()
        register_dataset_adapter()
        dispatch_methods()
        active_backend().prepare_scripts()
        self._membership = membership
        if len(membership.context.workers) > 1:
            seed_unseeded(membership.context.seed)
        self.created_in_scope = CreationTracker()
        self._loop_runner: LoopRunner | None = None
        self._epoch_log = self._open_epoch_log()

    def _open_epoch_log(self) -> EpochLog | None:
        """Return what finds the positions of restarted loops in their data. None here: a worker that dies
        runs its loop again, without the others."""
        return None

    @property
    def membership(self) -> Membership:
        """Who this process is among the tasks."""
        return self._membership

    @property
    def cluster_resolver(self) -> Any:
        """Membership of the job's tasks; None for a strategy of one machine."""
        return None

    def __getattr__(self, name: str) -> Any:
        raise missing_name("Strategy", name, of=type(self).__name__)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of shards: each is one replica, whichever process computes it."""
        return self._membership.num_shards

    @property
    def _runs_one_program(self) -> bool:
        """Whether one program computes the global batch's gradient, so that none are combined."""
        return False

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """While open, models that are compiled belong to this strategy. Scopes of two strategies don't
        nest."""
        outer = find_strategy()
        if outer not in (None, self):
            raise TrainingError(
                f"A scope can't be opened inside another strategy's. Received: {type(self).__name__} inside "
                f"{type(outer).__name__}. Close that one first."
            )
        with (
            open_scope(self),
            self.created_in_scope.track(self._bind, self._check_bound, self._record_made),
            self.placement(),
        ):
            yield self

    def _record_made(self, layer: Any) -> None:
        record_maker(layer, self)

    def compile_made(self, model: Any, compile_model: Callable[[], None]) -> None:
        """Compile a model that was made in the scope, as if in it."""
        current = find_strategy()
        if current is not self:
            self.check_open(model)
            with self.scope():
                compile_model()
                self._bind(model)
        else:
            compile_model()

    def _bind(self, model: Any) -> None:
        if not self._membership.is_alone:
            _refuse_distribution(model)
            if self._membership.context.is_chief:
                warn_of_own_fit(model)
        if model.built:
            self.created_in_scope.check_created_here(model.variables)
        trainer = trainer_of(model)
        if trainer is None or trainer.strategy is not self:
            KerasTrainer(model, self)

    def _check_bound(self, model: Any) -> None:
        """Raise TrainingError for a model that no strategy knows: Keras' own fit would train it in each task
        by itself."""
        if model.compiled and trainer_of(model) is None:
            raise TrainingError(
                "A model that is trained in a strategy's scope must have been compiled in it. Received: "
                f"{model.name!r}, compiled outside. Make and compile it in `with strategy.scope():`."
            )

    @property
    def delegates_to_keras(self) -> bool:
        """Whether Keras' own loop and steps do what is asked, inside `placement()`: there is one replica, and
        no job that follows it."""
        return self._membership.is_alone and self._membership.context.job_id is None

    def check_recompile(self, model: Any) -> None:
        """Raise TrainingError if `model` can't be compiled again. Here it always can."""

    def configure_compiled(self, model: Any) -> None:
        """Change what `compile` has chosen for `model`. Does nothing here."""

    def adapt_callbacks(self, callbacks: list[Any]) -> list[Any]:
        """Return the callbacks of a fit as they are."""
        return callbacks

    def check_open(self, model: Any) -> None:
        """Raise TrainingError if `model`, of this strategy, is trained in the scope of another, or in an
        evaluator."""
        if self._membership.context.evaluates:
            raise TrainingError(
                f"An evaluator scores checkpoints and trains nothing. Received: a fit of {model.name!r} in "
                "the evaluator task. Let the role decide: `if insitu.context().role == 'evaluator': "
                "insitu.SidecarEvaluator(model, data).start()`, else the fit."
            )
        current = find_strategy()
        if current not in (None, self):
            raise TrainingError(
                "A model is made, compiled and trained in the scope of one strategy. Received: "
                f"{model.name!r} of {type(self).__name__}, in another strategy's scope, "
                f"{type(current).__name__}. Close that scope, or make the model in it."
            )

    def group(self) -> Group:
        """Return the exchange of this job's tasks, for loops that combine arrays themselves. The first call
        joins it, and is collective. Its shards are the replicas of this process."""
        return self._membership.group()

    def placement(self) -> contextlib.AbstractContextManager[Any]:
        """Return the scope in which variables are made: entered by `scope()`, and when the first `fit` builds
        a model."""
        return contextlib.nullcontext()

    def call_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a scope for a whole call of a model whose steps insitu does. It sets nothing here."""
        return contextlib.nullcontext()

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        """Return the step of `model`, compiled and built, for batches like `example`. The first time, all
        replicas get the same state. Collective."""
        raise NotImplementedError

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        """Return the step of `run` for `model`, which has been traced, for arrays like `example`."""
        raise NotImplementedError

    def before_build(self, model: Any, example: Any, part_rows: int | None) -> None:
        """Prepare `model` before it is built. Raises TrainingError for one that can't be trained."""
        if not self._runs_one_program:
            check_one_optimizer(model, self.num_replicas_in_sync)

    def loop_aggregation(self) -> LoopAggregation:
        """Return how the gradients of a custom loop's replicas are combined."""
        raise NotImplementedError

    def left_out(self) -> Collection[int]:
        """Return the shards of this task whose rows of the last step entered no update. None here."""
        return ()

    def begin_fit(self, model: Any, fit_index: int, epochs: int, lengths: EpochLengths) -> tuple[int, int]:
        """Return the (epoch, step) at which a fit begins. Here that is its beginning."""
        return 0, 0

    def count_updates(self) -> int | None:
        """Return how many updates the model has had; None if its optimizer here counts them."""
        return None

    def show_updates(self) -> None:
        """Have the optimizer here count the updates that were made elsewhere. Here none are."""

    def expect_saves(self) -> None:
        """Prepare for a fit with backups. Does nothing here."""

    def save_elsewhere(self) -> bool:
        """Save the state in its own place, and return True if the replicas don't hold it. Here the caller
        saves it."""
        return False

    def end_fit(self, fit_index: int, executors: Sequence[StepExecutor], position: LoopPosition) -> None:
        """Finish a fit. Does nothing here."""

    def evaluation_options(self, x: Any) -> dict[str, Any]:
        """Return the options of the feed of `x` for evaluation. Here a task evaluates the shards that it
        trains on."""
        return self._membership.feed_options

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Run `fn(*args, **kwargs)` on each replica of this process, each with its own values of PerReplica
        leaves.

        `fn` is compiled on TensorFlow and JAX. Optimizers made in `scope()` that it applies sum the gradients
        over all replicas of all tasks before they update; state that the forward pass moves is combined as
        in `fit` (BatchNorm by rows, metrics summed). On JAX, variables may be read, differentiated and
        assigned in it as if it ran by itself. Arrays are traced; Python integers, strings and the like are
        constants, for each of which `fn` is compiled again, as for other values or objects of the globals,
        enclosed variables and attributes that its code names. It runs once more, without effect, to learn
        what it touches.

        Returns what `fn` returns: tensors of the backend, with PerReplica leaves if this process has several
        replicas. A replica without rows has arrays of zero rows, or None in place of tensors without an axis
        of rows. Collective, unless `fn` changes nothing.

        `options` are `insitu.RunOptions`, which change nothing here.

        Raises:
            TrainingError: if `fn` makes variables, applies an optimizer twice or one that was made outside
                the scope, or reads variables after it has applied their update.
        """
        if getattr(options, "experimental_xla_options", None) is not None:
            RunOptions(experimental_xla_options=options.experimental_xla_options)
        if self._loop_runner is None:
            self._loop_runner = LoopRunner(self)
        return self._loop_runner.run(fn, args, kwargs or {})

    def compute_average_loss(
        self, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
    ) -> Any:
        """Return the replica's part of the mean loss over the global batch: the sum of its rows' losses, each
        times its weight, divided by the rows of the whole step. Over replicas it sums up to the mean.

        `per_example_loss` has shape (rows, ...), as of a loss with reduction="none"; `sample_weight` (rows,).
        The rows of a step are known in `run`; `global_batch_size` sets another number to divide by.
        """
        return average_loss(per_example_loss, sample_weight, global_batch_size, self.num_replicas_in_sync)

    def scale_regularization_loss(self, loss: Any) -> Any:
        """Return the replica's part of a loss that doesn't depend on rows, such as a model's `losses`. Over
        replicas it sums up to the whole, also if some have no rows."""
        return scale_by_share(loss, self.num_replicas_in_sync)

    def reduce(self, reduce_op: AnyReduceOp, value: Any, axis: int | None = None) -> Any:
        """Return the sum or the mean over replicas of `value`, a structure of arrays or scalars, one of each
        replica.

        With `axis=0`, also over the rows of each replica's value, whose number may differ: a mean weighs each
        row the same. Replicas whose value is None count nothing. Returns tensors of the backend, of the same
        dtype (float64 for a mean of integers), summed in shard order: the same bits in each task. NumPy
        arrays if the backend has no such dtype, as JAX without 64 bits. Collective.
        """
        active_backend().leave_graph("strategy.reduce")
        with self._membership.explain_loss("reduce"):
            return reduce_values(self._membership.group(), reduce_op, value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Return the values of all replicas, joined along `axis`, as `reduce` returns values; their sizes
        along `axis` may differ. Collective."""
        active_backend().leave_graph("strategy.gather")
        with self._membership.explain_loss("gather"):
            return gather_values(self._membership.group(), value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the value of each replica of this process in `value`."""
        return local_values(value, len(self._membership.context.shards))

    experimental_local_results = local_results
    unwrap = local_results

    def distribute_dataset(self, dataset: Any, options: Any = None) -> DistributedDataset:
        """Return an iterable over the steps of `dataset` (global batches): each replica's rows, for `run`.

        Each process is given the same data, and takes its part. A `tf.data.Dataset` with
        `AutoShardPolicy.OFF` is each process' own: of its batches, too, each replica takes a part as large as
        of a global batch, so that an epoch has more steps.

        A replica without rows in a step gets arrays of zero rows. Each iteration is the next epoch. Every so
        many steps, and when an epoch ends, it is checked that all replicas' weights are the same, and
        that all processes were given the same batches.
        """
        if is_per_replica(options):
            raise InputError(
                "A dataset is cut for replicas. Received: InputReplicationMode.PER_REPLICA, which makes data "
                "for each replica. Use distribute_datasets_from_function."
            )
        context = self._membership.context
        if len(context.workers) <= 1 or not is_never_sharded(dataset):
            feed = make_feed(dataset, may_be_endless=True, **self._membership.feed_options)
            compares = self._compares_data and not isinstance(dataset, Dataset)
            made = self._distribute(feed, self._check_data if compares else None)
            made.whole = dataset
            return made
        whole = make_feed(dataset, shards=(0,), num_shards=1, seed=context.seed, fit=context.index)
        cut = cut_for_replicas(count_rows(whole.source.peek()), context.num_shards, context.shards[0])
        return self._distribute(WorkerFeed([whole], context.shards, self._count_left, cut))

    @property
    def _compares_data(self) -> bool:
        """Whether processes compare the data of a custom loop: there are several, which run in lockstep."""
        return len(self._membership.context.workers) > 1

    def _check_data(self, fingerprint: int, position: LoopPosition) -> None:
        """Raise InputError, in each task, if processes were given other batches up to `position`."""
        group = self._membership.group()
        own = np.full((len(group.shards), 1), fingerprint, np.float64)
        check_same_data(group.all_gather(squeeze_shards(own)).reshape(-1).tolist(), position)

    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: Any = None
    ) -> DistributedDataset:
        """Return an iterable over the steps of data that each process makes by itself, for `run`.

        `dataset_fn` is called once in each process, with an `InputContext` that says which part of the data
        it makes, and returns batches of one replica: each replica takes the next one. With
        `InputReplicationMode.PER_REPLICA` it is called for each replica. An epoch ends when no process has a
        batch left; replicas whose data ended before get arrays of zero rows.
        """
        context = self._membership.context
        if is_per_replica(options):
            contexts = [
                InputContext(context.num_shards, shard, context.num_shards) for shard in context.shards
            ]
        else:
            pipelines = max(1, len(context.workers))
            contexts = [InputContext(pipelines, context.index if pipelines > 1 else 0, context.num_shards)]
        feeds = [
            make_feed(
                dataset_fn(each), shards=(0,), num_shards=1, seed=context.seed, fit=each.input_pipeline_id
            )
            for each in contexts
        ]
        return self._distribute(WorkerFeed(feeds, context.shards, self._count_left))

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return what `value_fn` returns for each replica of this process, as an argument for `run`. It is
        called with a `ValueContext` that has the replica's number."""
        context = self._membership.context
        return make_values([value_fn(ValueContext(shard, context.num_shards)) for shard in context.shards])

    def _distribute(
        self, feed: Any, check_data: Callable[[int, LoopPosition], None] | None = None
    ) -> DistributedDataset:
        bookkeeper = Bookkeeper(self._membership)
        make: type[DistributedDataset] = active_backend().make_trackable(DistributedDataset)
        return make(feed, bookkeeper, self._after_step, self.left_out, check_data, self._epoch_log)

    def _count_left(self, own: int) -> int:
        """Return the sum of a number over all tasks. Collective."""
        return (
            sum(gather_sizes(self._membership.group(), own))
            if len(self._membership.context.workers) > 1
            else own
        )

    def check_replicas(self, where: str = "here") -> None:
        """Raise Diverged, in every task, unless all replicas have the same weights. The error names the first
        variable that differs, of those made in the scope. Collective."""
        with self._membership.explain_loss("check_replicas"):
            check_weights(self._membership.group(), self.created_in_scope.weights(), where)

    def _after_step(self, position: LoopPosition, first: bool, last: bool) -> None:
        index = position.step
        if first and self._compares_data:
            check_same_place(self._membership.group(), position)
        if last or (index + 1) % LOOP_CHECK_INTERVAL == 0 or first:
            self.check_replicas("after an epoch" if last else f"after step {index}")

    def _count_loop_updates(self) -> int:
        return self._loop_runner.updates if self._loop_runner is not None else 0


def warn_unverified(plan: CombinationPlan, model: Any, membership: Membership) -> None:
    """Warn, in the chief, of what the plan could not find out, and of what finding out has changed."""
    if plan.effects and membership.context.is_chief:
        sys.stderr.write(
            f"[insitu] {', '.join(plan.effects)} of {model.name!r} changed before the first step: how the "
            "model's parts combine was found out on made-up batches of 5, 2 and 3 rows. Reset them in a "
            "callback's on_train_begin\n"
        )
    if plan.unchecked and membership.context.is_chief:
        warnings.warn(
            f"Not everything could be checked of how {model.name!r} trains over several replicas: gradients "
            "are averaged by rows, metrics are added up, logs are averaged. "
            f"{'. '.join(plan.unchecked)}. Compare its first losses and metrics with those of one device.",
            stacklevel=2,
        )


def _refuse_distribution(model: Any) -> None:
    """Raise TrainingError for a model that TensorFlow would distribute too. JAX' distributions are refused by
    the replica, since some strategies set one."""
    distribution = getattr(model, "_distribute_strategy", None)
    if distribution is not None:
        raise TrainingError(
            "A strategy and a tf.distribute strategy can't distribute the same model. Received: "
            f"{model.name!r}, made in the scope of a tf.distribute.{type(distribution).__name__}. Make it "
            "outside that scope."
        )


# Shortens tracebacks that end a script, so that they show the user's lines


FULL_ENV = "INSITU_FULL_TRACEBACKS"
"""The environment variable that leaves tracebacks as they are."""
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def shorten_traceback(error: BaseException) -> None:
    """Take insitu's own frames out of the tracebacks of `error` and of what it was raised from.

    All of them for a refusal, an InsituError: its message says what is wrong, and the last line that is shown
    is the one to change. For any other error those before a line of the user's, as when `strategy.run` runs a
    step: an error in insitu itself keeps what shows its place.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _shorten(link.__traceback__, whole=isinstance(link, InsituError))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _shorten(traceback: TracebackType | None, *, whole: bool) -> TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    own = [frame.tb_frame.f_code.co_filename.startswith(_OWN) for frame in frames]
    if all(own):
        return frames[0] if frames else None
    last = len(own) - 1 - own[::-1].index(False)
    shown = [frame for index, frame in enumerate(frames) if not own[index] or (index > last and not whole)]
    result = None
    for frame in reversed(shown):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def shorten_printed_tracebacks() -> None:
    """Have Python print shortened tracebacks at the end of a script. Done once."""
    report: Callable[..., Any] = sys.excepthook
    if getattr(report, "shortens", False) or os.environ.get(FULL_ENV):
        return

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shorten_traceback(error)
        report(kind, error, error.__traceback__)

    excepthook.shortens = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook
