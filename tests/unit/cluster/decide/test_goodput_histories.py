"""Each second of a job is where it was spent, however often all of it is killed and has to continue.

A history is drawn together with its truth, slot by slot. The account, which sees only the journal and the
samples, must say the same of each slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from insitu.base.measure.task_samples import Sample
from insitu.base.measure.time_account import ACTIVITIES, GRADIENT, IMPORT
from insitu.cluster.decide.goodput import (
    PRODUCTIVE,
    Life,
    TaskAccount,
    account_for_tasks,
    find_absences,
    find_lives,
    validate,
)

TASKS = ("worker:0", "worker:1")
SLOT = 0.25
"""Seconds; all times are multiples."""
SPANS = st.integers(0, 6)
"""In slots."""


@dataclass
class Process:
    """One process of a task, and what it did in each slot of its life."""

    launched: int
    ended: int
    doing: list[str]
    first: bool


@dataclass
class History:
    """What a job has left on disk, and what is true of it. Times are in slots."""

    draw: st.DrawFn
    now: int = 0
    entries: list[tuple[float, Mapping[str, Any]]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {task: [] for task in TASKS})
    processes: dict[str, list[Process]] = field(default_factory=lambda: {task: [] for task in TASKS})
    away: list[tuple[int, int]] = field(default_factory=list)

    def record(self, at: int, event: str, **more: Any) -> None:
        self.entries.append((at * SLOT, {"event": event, **more}))

    def run(self, *, dies: bool) -> int:
        """Launch some tasks, and let their processes end; all together where all of the job `dies`. Returns
        when the journal or a sample last tells of it."""
        ends, begun = [], self.now
        for task in self.draw(st.permutations(TASKS))[: self.draw(st.integers(0, 2))]:
            begun += self.draw(SPANS)
            self.record(begun, "Launched", processes=[[task, 1]], attempts=[len(self.processes[task]) + 1])
            ends.append((task, begun))
        death = begun + self.draw(SPANS)
        last = begun if ends else self.now
        exits = []
        for task, launched in ends:
            end = death if dies else death + self.draw(SPANS)
            code = None if dies else self.draw(st.sampled_from([-9, 0, 1]))
            last = max(last, self.live(task, launched, end, by_itself=code is not None and code >= 0))
            exits.append((end, task, code))
        self.now = max([death, *(end for end, _, _ in exits)])
        if dies:
            return last
        for end, task, code in sorted(exits):
            self.record(end, "TaskExited", task=task, code=code, attempt=len(self.processes[task]))
        self.record(self.now, "Tick")  # such as the end of the attempt
        return self.now

    def live(self, task: str, launched: int, ended: int, *, by_itself: bool) -> int:
        """Let a process live. It writes samples as tasks do: where an activity begins, and in between."""
        number = len(self.processes[task]) + 1
        first, activity, steps, at = number == 1, IMPORT, 0, launched
        seconds, doing, last = dict.fromkeys(ACTIVITIES, 0.0), list[str](), launched
        while at < ended:
            length = min(ended - at, 1 + self.draw(SPANS))
            seconds[activity] += length * SLOT
            doing += [activity if first or steps else "recovery"] * length
            at += length
            if at == ended and not by_itself:
                break
            if activity == GRADIENT:
                steps += 1
            # The same one again: a sample in the middle of it.
            activity = self.draw(st.sampled_from([activity, *ACTIVITIES]))
            self.samples[task].append(
                Sample(
                    at * SLOT, number, launched * SLOT, steps=steps, activity=activity, seconds=dict(seconds)
                )
            )
            last = at
        self.processes[task].append(Process(launched, ended, doing, first))
        return last

    def find_truth(self, task: str, slot: int) -> str:
        """Return what a task did in a slot."""
        own = self.processes[task]
        launched = min((each[0].launched for each in self.processes.values() if each), default=1 << 60)
        if any(a <= slot < b for a, b in self.away):
            return "away"
        for index, each in enumerate(own):
            if each.launched <= slot < each.ended:
                done = each.doing[slot - each.launched]
                is_last = not any(s.at > slot * SLOT for s in self.samples[task] if s.attempt == index + 1)
                lost = is_last and index + 1 < len(own) and done in PRODUCTIVE
                return "recovery" if lost else done
        if slot < launched:
            return "queueing"
        ended = [each.ended for each in own if each.ended <= slot]
        later = [each.launched for each in own if each.launched > slot]
        if not ended or not later:
            return "idle"
        ends = [b for a, b in self.away if a >= max(ended) and b <= min(later)]
        return "idle" if any(b > slot for b in ends) else "recovery"


def find_slot(account: TaskAccount, slot: int) -> str:
    """Return what most of a slot was spent on."""
    (found,) = [s for s in account.segments if s.start <= slot * SLOT < s.end]
    return max(found.seconds, key=lambda name: found.seconds[name])


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_each_second_lies_where_it_was_spent(data: st.DataObject) -> None:
    history = History(data.draw)
    history.now = data.draw(SPANS)
    history.record(history.now, "Submitted")
    until = history.now
    for _ in range(data.draw(st.integers(1, 4))):
        dies = data.draw(st.booleans())
        until = max(history.run(dies=dies), until)
        if dies:
            until = data.draw(st.integers(until, history.now))  # the last heartbeat
            for each in (own[-1] for own in history.processes.values() if own):
                each.ended = min(each.ended, until)
        if data.draw(st.booleans()):
            if dies:
                history.record(until, "ControllerLost")
            history.now += data.draw(SPANS)
            history.record(history.now, "Resumed")
            history.away.append((until, history.now))
            until = history.now
        elif dies:
            break
    lives = find_lives(history.entries)
    accounts = account_for_tasks(0.0, until * SLOT, lives, history.samples, find_absences(history.entries))
    for account in accounts:
        validate(account, until * SLOT)
        found = [find_slot(account, slot) for slot in range(until)]
        assert found == [history.find_truth(account.task, slot) for slot in range(until)]


def test_what_earlier_versions_wrote_names_the_incarnations_too() -> None:
    entries = [
        (1.0, {"event": "Launched", "processes": [["worker:0", 7]]}),
        (3.0, {"event": "ControllerLost"}),
        (5.0, {"event": "Resumed"}),
        (6.0, {"event": "Launched", "processes": [["worker:0", 8]]}),
    ]
    assert find_lives(entries) == {"worker:0": [Life(1.0, 3.0), Life(6.0, incarnation=2)]}
