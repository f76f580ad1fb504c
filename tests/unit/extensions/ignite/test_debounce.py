"""Topology versions become stable: rows aren't read again while servers come and go."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from ignite_wire import cluster_of, drawings

from insitu.extensions.ignite import debounce
from insitu.extensions.ignite.address import parse_address
from insitu.extensions.ignite.debounce import STABLE_SECONDS, Debounce, wait_until_stable


def test_a_version_that_stays_is_stable() -> None:
    debounce = Debounce((1, 0))
    assert debounce.observe([1, 0], 5.0), "it is known from before"
    assert not debounce.observe([2, 0], 6.0)
    assert not debounce.observe([2, 0], 6.0 + STABLE_SECONDS / 2)
    assert not debounce.observe([3, 1], 6.0 + STABLE_SECONDS)
    assert not debounce.observe([3, 1], 6.0 + 1.5 * STABLE_SECONDS)
    assert debounce.observe([3, 1], 6.0 + 2 * STABLE_SECONDS)


def test_a_topology_that_changes_is_waited_for(monkeypatch) -> None:
    monkeypatch.setenv("INSITU_IGNITE_TIMEOUT", "2")
    clock = itertools.count()  # each look takes half a second
    fake = SimpleNamespace(monotonic=lambda: next(clock) / 4, sleep=lambda seconds: None)
    monkeypatch.setattr(debounce, "time", fake)
    seen = []
    observe = Debounce.observe

    def note(self, version, now):
        seen.append(version)
        if len(seen) == 2:
            cluster.topology = (3, 0)
        return observe(self, version, now)

    monkeypatch.setattr(Debounce, "observe", note)
    with cluster_of(1, drawings(5)) as cluster:
        cluster.topology = (2, 0)
        wait_until_stable(parse_address(cluster.address()), (1, 0))
    assert seen[0] == (2, 0) and seen[-1] == (3, 0) and len(seen) >= 3
