"""Holders on the nodes of a Ray cluster that join, leave and fail; Ray itself is a stand-in."""

from __future__ import annotations

from collections.abc import Collection

from insitu.base.errors import ClusterError, InputError
from insitu.base.spec import NodeId
from insitu.cluster.nodes.ray_hosts import AskToDrain, HolderKeeper
from insitu.cluster.ray.ray_cluster import Died, RayNode
from insitu.cluster.ray.ray_holder import HolderAnswer, HolderSettings

SETTINGS = HolderSettings("s1", "10.0.0.1:7070", "1.0", "t" * 32)
JOINED = {"node": "a", "address": "h:1", "host": "h"}


class FakeRay:
    """A Ray cluster in which nothing takes time."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = {name: RayNode(name, f"host-{name}", f"10.0.0.{name}", True, True) for name in nodes}
        self.holders: dict[str, HolderAnswer | Died | None] = {}
        self.started: list[str] = []
        self.ended: list[str] = []
        self.again: list[str] = []
        #: What holders answer that have ended before they were listed.
        self.unnamed: dict[str, HolderAnswer | Died] = {}
        #: What the next holders answer.
        self.answer: HolderAnswer | Died | None = HolderAnswer("s1", "joined", JOINED)
        self.draining: dict[str, float | None] = {}

    def list_nodes(self) -> list[RayNode]:
        return list(self.nodes.values())

    def list_draining(self) -> dict[str, float | None]:
        return self.draining

    def list_holders(self) -> set[str]:
        return set(self.holders)

    def ask_holders(self, nodes: Collection[str], seconds: float) -> dict[str, HolderAnswer | Died]:
        found = {**self.holders, **{node: self.unnamed.pop(node) for node in nodes if node in self.unnamed}}
        return {node: answer for node in nodes if (answer := found.get(node)) is not None}

    def start_holder(self, node: RayNode, settings: HolderSettings) -> None:
        assert node.id not in self.holders
        self.started.append(node.id)
        self.holders[node.id] = self.answer

    def end_holder(self, node: str) -> None:
        self.ended.append(node)
        self.holders.pop(node, None)

    def start_agent_again(self, node: str) -> None:
        self.again.append(node)


def keep(ray: FakeRay, ask: AskToDrain = lambda node, seconds: None) -> HolderKeeper:
    return HolderKeeper(ray, SETTINGS, ask)  # type: ignore[arg-type]


def states(keeper: HolderKeeper) -> dict[str, str]:
    return {report.id: report.state for report in keeper.report()[1]}


def test_each_node_gets_an_agent_also_one_that_joins_later() -> None:
    ray = FakeRay("1", "2")
    keeper = keep(ray)
    keeper.advance(0)
    assert ray.started == ["1", "2"] and states(keeper) == {"1": "starting", "2": "starting"}
    keeper.advance(1)
    assert states(keeper) == {"1": "joined", "2": "joined"} and keeper.report()[0] == 2
    ray.nodes["3"] = RayNode("3", "host-3", "10.0.0.3", False, True)
    keeper.advance(2)
    keeper.advance(3)
    assert ray.started == ["1", "2", "3"] and states(keeper)["3"] == "joined" and ray.ended == []
    assert keeper.report()[1][0].joined == JOINED


def test_the_holder_of_a_node_that_is_dead_is_ended_and_that_node_has_another_id_later() -> None:
    ray = FakeRay("1", "2")
    keeper = keep(ray)
    keeper.advance(0)
    ray.nodes["2"] = RayNode("2", "host-2", "10.0.0.2", True, False)
    ray.nodes["9"] = RayNode("9", "host-2", "10.0.0.2", True, True)
    keeper.advance(1)
    assert ray.ended == ["2"] and ray.started == ["1", "2", "9"]
    keeper.advance(2)
    assert states(keeper) == {"1": "joined", "9": "joined"}


def test_holders_with_other_settings_are_replaced() -> None:
    ray = FakeRay("1")
    ray.holders["1"] = HolderAnswer("old", "joined", JOINED)
    keeper = keep(ray)
    keeper.advance(0)
    assert ray.ended == ["1"] and states(keeper) == {"1": "starting"}
    keeper.advance(1)
    keeper.advance(2)
    assert ray.started == ["1"] and states(keeper) == {"1": "joined"}


def test_a_holder_that_cannot_begin_is_named_and_tried_again_later() -> None:
    ray = FakeRay("1")
    ray.answer = Died("No module named 'insitu'")
    keeper = keep(ray)
    for now in (0.0, 0.1, 0.2, 0.3):
        keeper.advance(now)
    (report,) = keeper.report()[1]
    assert (report.state, report.problem) == ("failed", "No module named 'insitu'")
    assert ray.started == ["1"] and ray.ended == ["1"]  # not once a pass
    ray.answer = HolderAnswer("s1", "joined", JOINED)
    keeper.advance(10)
    keeper.advance(11)
    assert ray.started == ["1", "1"] and states(keeper) == {"1": "joined"}


def test_a_holder_that_ends_before_it_is_listed_is_named() -> None:
    ray = FakeRay("1")
    keeper = keep(ray)
    keeper.advance(0)
    ray.unnamed["1"] = Died("No module named 'insitu'")
    del ray.holders["1"]
    keeper.advance(0.1)
    keeper.advance(0.2)
    (report,) = keeper.report()[1]
    assert report.problem == "No module named 'insitu'" and ray.started == ["1"]


def test_a_holder_that_is_away_for_a_moment_stays() -> None:
    ray = FakeRay("1")
    keeper = keep(ray)
    keeper.advance(0)
    keeper.advance(1)
    ray.holders["1"] = None  # Ray restarts it
    keeper.advance(2)
    assert ray.ended == [] and ray.started == ["1"]


def test_who_brings_up_again_starts_what_has_ended_and_gets_no_old_report() -> None:
    ray = FakeRay("1", "2", "3")
    keeper = keep(ray)
    keeper.advance(0)
    ray.holders["1"] = HolderAnswer("s1", "ended")
    ray.holders["2"] = HolderAnswer("s1", "failed", None, "no room")
    keeper.advance(1)
    assert states(keeper) == {"1": "ended", "2": "failed", "3": "joined"}
    assert keeper.start_again() == 2 and sorted(ray.again) == ["1", "2"]
    assert states(keeper) == {"1": "starting", "2": "starting", "3": "joined"}
    ray.answer = Died("x")
    ray.holders["3"] = Died("x")
    keeper.advance(2)
    assert keeper.report()[1][2].problem == "x"
    keeper.start_again()
    keeper.advance(2.1)  # at once
    assert ray.started.count("3") == 2


def test_the_head_hears_that_ray_takes_a_node_away_and_that_it_is_back() -> None:
    ray, asked = FakeRay("1"), []
    problems: list[Exception] = [ClusterError("no head answers"), InputError("no other one stays")]

    def ask(node: NodeId, seconds: float | None) -> None:
        asked.append((node, seconds))
        if problems:
            raise problems.pop(0)

    keeper = keep(ray, ask)
    keeper.advance(0, 100)
    keeper.advance(1, 101)
    ray.draining["1"] = 160
    keeper.advance(2, 102)
    keeper.advance(3, 103)  # the head is there again, and refuses until another node is there
    keeper.advance(4, 104)
    keeper.advance(5, 105)
    assert asked == [("a", 58), ("a", 57), ("a", 56)]
    ray.draining["1"] = 150
    keeper.advance(6, 106)
    assert asked[3:] == [("a", 44)]
    del ray.nodes["1"], ray.holders["1"]
    ray.draining.clear()
    ray.nodes["9"] = RayNode("9", "host-1", "10.0.0.1", True, True)
    for now in (200, 201, 202, 203):
        keeper.advance(now, now)
    assert asked[4:] == [("a", None)]
