"""The base of strategies whose tasks train in lockstep, over the exchange."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from insitu.base.context import Context
from insitu.base.context import context as read_context
from insitu.exchange import Group
from insitu.train.backends import active_backend
from insitu.train.collectives import barrier_token
from insitu.train.custom_loop import (
    EpochLog,
    ExchangeAggregation,
    ExchangeStep,
    LoopAggregation,
    LoopStep,
    StepModel,
)
from insitu.train.elastic import SETUP, SynchronousMembership
from insitu.train.fit import StepExecutor, TwoPhaseStep
from insitu.train.replica import (
    FusedStep,
    broadcast_state,
    plan_combination,
    read_state,
)
from insitu.train.strategies.base import Strategy, warn_unverified


class SynchronousStrategy(Strategy):
    """A step of all tasks ends in one update, which each replica applies."""

    _membership: SynchronousMembership

    def __init__(
        self, *, transport: str = "auto", compression: str = "none", context: Context | None = None
    ) -> None:
        context = (context or read_context()).for_strategy()
        super().__init__(SynchronousMembership(context, transport, compression))

    def _open_epoch_log(self) -> EpochLog:
        return EpochLog(self._membership.context, self.created_in_scope, self._count_loop_updates)

    def make_step(self, model: Any, example: Any, *, first: bool) -> StepExecutor:
        """Return the step of `model`. The first time, all replicas get the state of rank 0."""
        if self._membership.is_alone:
            return FusedStep(active_backend().make_fused_replica(model, example))
        if first:
            self._broadcast_initial_state(model)
        plan = plan_combination(model, example, self.num_replicas_in_sync)
        warn_unverified(plan, model, self._membership)
        return TwoPhaseStep(active_backend().make_replica(model, example, plan), self._membership.lockstep)

    def make_loop_step(self, model: StepModel, example: list[Any]) -> LoopStep:
        return ExchangeStep(model, active_backend().make_loop_replica(model, example), self._membership)

    def _broadcast_initial_state(self, model: Any) -> None:
        """Give all replicas the state of rank 0. Collective."""
        membership, state = self._membership, read_state(model)

        def begin(group: Group) -> NDArray[Any]:
            broadcast_state(state, group, model)
            return barrier_token(group)

        membership.lockstep.run_unit_until_done(membership.calls.position(SETUP), begin)

    def loop_aggregation(self) -> LoopAggregation:
        """Return how the gradients of a custom loop's replicas are combined: over the exchange."""
        return ExchangeAggregation(self._membership)
