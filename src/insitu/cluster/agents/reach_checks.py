"""Questions to all agents which of the others they can't reach, until all have answered."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from insitu.cluster.agents.messages import Message
from insitu.cluster.agents.options import CHECK_SECONDS
from insitu.spec import NodeId


@dataclass(slots=True)
class _Check:
    """One question."""

    #: Tells its answers from those to an earlier question.
    number: int
    #: The connection that wants to know it.
    asking: int
    #: The agents that haven't answered yet, by connection.
    waiting: dict[int, NodeId]
    #: When those that have said nothing are named, on the monotonic clock.
    deadline: float
    #: (from, to, why) of each pair that can't talk.
    pairs: list[tuple[str, str, str]] = field(default_factory=list)


class ReachChecks:
    """The questions that haven't been answered yet."""

    def __init__(self) -> None:
        self._checks: list[_Check] = []

    def begin(self, number: int, asking: int, agents: dict[int, NodeId], now: float) -> None:
        """Note a question to `agents`, by connection, on behalf of the connection `asking`."""
        self._checks.append(_Check(number, asking, agents, now + CHECK_SECONDS))

    def note(self, number: object, connection: int, unreachable: dict[str, str]) -> None:
        """Note the answer of an agent."""
        for check in self._checks:
            if check.number == number and connection in check.waiting:
                node = check.waiting.pop(connection)
                check.pairs += [(node, to, why) for to, why in unreachable.items()]

    def take_answers(self, connected: Container[int], now: float) -> list[tuple[int, Message]]:
        """Return (connection, answer) for questions that all `connected` agents have answered, and for those
        whose time is up."""
        answers = []
        for check in list(self._checks):
            late = {n: node for n, node in check.waiting.items() if n in connected}
            if late and now < check.deadline:
                continue
            self._checks.remove(check)
            answer = {"do": "check", "pairs": sorted(check.pairs), "silent": sorted(late.values())}
            answers.append((check.asking, answer))
        return answers
