"""What agents say about themselves, made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from insitu.base.spec import NodeId
from insitu.cluster.decide import AgentFacts, AgentLoad

VERSIONS = {"insitu": "1.0", "python": "3.11", "keras": "3.11.3"}
LOAD = AgentLoad(memory_available=1, disk_free=2, unknown_versions=0)
WALL = 1_000_000.0


def facts(node: str = "a", store: str = "", process: str = "p", **changes: Any) -> AgentFacts:
    """The facts of an agent; the store is that of the node unless it is given."""
    made = AgentFacts(
        node=NodeId(node),
        store=store or f"store-of-{node}",
        folder=f"/home/nodes/{node}",
        process=process,
        host=f"host-{node}",
        address="10.0.0.1",
        port=7071,
        certificate="PEM",
        versions=VERSIONS,
        cores=4,
        gpus=("H200",),
        memory=1 << 30,
        disk=1 << 40,
        processor="a processor",
        clock=WALL,
    )
    return replace(made, **changes)
