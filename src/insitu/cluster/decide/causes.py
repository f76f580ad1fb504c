"""Finds out why an attempt ended. Pure."""

from __future__ import annotations

import signal

from insitu.cluster.decide.job_state import Cause, JobState, TaskState


def find_cause(state: JobState) -> Cause:
    """Return why the attempt ended: the task that failed, not those that failed because of it.

    A stall or a failed launch counts first. Then a failure that is final. Then tasks that ended before they
    were signalled, or by a signal that wasn't ours; those that only lost a peer come last; else the one that
    ended last.
    """
    if state.stop_cause:
        return state.stop_cause
    dead = [state.task(name) for name in state.died if name.role != "evaluator"]
    suspects = [
        task
        for task in dead
        if task.code
        and (
            not task.signal_sent
            or (task.failure and task.failure.final)
            or (task.code < 0 and not _ended_by_our_signal(task))
        )
    ]
    suspects.sort(key=lambda t: (not t.failure.final, t.failure.peer_lost) if t.failure else (True, False))
    guilty = suspects[0] if suspects else dead[-1]
    # Losing a peer is no bug of the script, however often it looks the same.
    fingerprint = guilty.failure.fingerprint if guilty.failure and not guilty.failure.peer_lost else ""
    return Cause(describe_exit(guilty), to_exit_code(guilty.code or 0), guilty.task, fingerprint)


def _ended_by_our_signal(task: TaskState) -> bool:
    sent = {"term": {signal.SIGTERM}, "kill": {signal.SIGTERM, signal.SIGKILL}, "": set()}[task.signal_sent]
    return -(task.code or 0) in sent


def to_exit_code(code: int) -> int:
    """Return an exit code as the shell has it: 128 + the signal's number for a task that a signal ended."""
    return 128 - code if code < 0 else code


def describe_exit(task: TaskState) -> str:
    """Return such as `worker:1 was killed by SIGKILL`."""
    if task.code is None:
        return f"{task.task} did not run"
    if task.code < 0:
        return f"{task.task} was killed by {_name_signal(-task.code)}"
    why = [task.failure.type, task.failure.message] if task.failure else []
    return ": ".join([f"{task.task} ended with exit code {task.code}", *filter(None, why)])


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
