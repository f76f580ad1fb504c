"""Decides about the evaluator, which trains nothing: its end never stops, restarts or fails a job.

It has failures of its own, as many as `max_restarts`. The roster says when training is over. From then on it
has `JobState.evaluator_grace` seconds to score the last checkpoint and end by itself; if it fails meanwhile
it is launched again as before. The job ends with it.
"""

from __future__ import annotations

from dataclasses import replace

from insitu.cluster.decide import recovery
from insitu.cluster.decide.events import Log, Publish, Result
from insitu.cluster.decide.job_state import JobState, TaskState
from insitu.spec import TaskId


def finish_training(state: JobState) -> Result:
    """Return the state of a job whose training is over, and the roster that tells the evaluator so.

    No task is launched any more but an evaluator that was to be launched again: the last checkpoint is still
    to be scored.
    """
    tasks = tuple(t if t.task.role == "evaluator" else replace(t, launch_at=None) for t in state.tasks)
    state = replace(state, phase="stopping", goal="finish", tasks=tasks)
    if not is_evaluating(state):
        return state, []
    state = replace(state, generation=state.generation + 1)
    return state, [Publish(state.generation)]


def is_evaluating(state: JobState) -> bool:
    """Return whether the evaluator runs, or is about to be launched again."""
    return any(t.task.role == "evaluator" and (t.alive or t.launch_at is not None) for t in state.tasks)


def retry_evaluator(state: JobState, task: TaskState, now: float) -> Result:
    """Schedule another launch of an evaluator that has failed, or give it up."""
    goes_on = "training goes on" if state.phase == "running" else "training is over"
    if state.evaluator_failures >= state.max_restarts:
        tries = f"{state.evaluator_failures} of {state.max_restarts} restarts of its own were used"
        return state, [Log(f"{task.task} is not started again: {tries}; {goes_on}")]
    delay = 0.0
    if state.evaluator_failures:
        delay = min(recovery.MAX_RESTART_DELAY, 2.0 ** (state.evaluator_failures - 1))
    state = replace(state, evaluator_failures=state.evaluator_failures + 1)
    count = f"{state.evaluator_failures} of {state.max_restarts}"
    log = Log(f"starting {task.task} again in {delay:g} s ({count}); {goes_on}")
    if delay:
        return state.with_task(replace(task, launch_at=now + delay)), [log]
    state, actions = recovery.relaunch(state, [task.task], now)
    return bound_evaluation(state, task.task, now), [log, *actions]


def bound_evaluation(state: JobState, name: TaskId, now: float) -> JobState:
    """Return `state` with the evaluator's grace begun, if training is over and it runs."""
    task = state.task(name)
    if task.task.role != "evaluator" or state.goal != "finish" or not task.alive or task.signal_sent:
        return state
    return state.with_task(replace(task, escalate_at=now + state.evaluator_grace))
