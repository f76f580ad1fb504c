"""A resolver must describe the job that a strategy runs in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from models import in_shards

from insitu.errors import InputError, TrainingError
from insitu.train import ParameterServerStrategy
from insitu.train.parameter_server.resolver import check_resolver


class Resolver:
    def __init__(self, **cluster: list[str]) -> None:
        self._cluster = cluster

    def cluster_spec(self) -> Any:
        return self._cluster


def test_a_resolver_of_another_cluster_is_refused() -> None:
    alone = in_shards((0,), 1)
    job = dataclasses.replace(alone, workers=("a:1", "b:1"), servers=("c:1",))
    check_resolver(None, job)
    check_resolver(Resolver(worker=["x:1", "y:1"], ps=["z:1"]), job)
    check_resolver(Resolver(worker=["x:1"] * 3, ps=["z:1"] * 2), alone)
    with pytest.raises(TrainingError, match=r"2 workers and 1 ps tasks\. Received: a .* 3 workers and 0 ps"):
        check_resolver(Resolver(worker=["x:1"] * 3), job)


def test_what_is_no_resolver_is_refused() -> None:
    with pytest.raises(InputError, match=r"Received: 'sync'\. Leave it out, or name .* mode='sync'"):
        ParameterServerStrategy("sync")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"function of a variable's shape and dtype\. Received: 2"):
        ParameterServerStrategy(variable_partitioner=2)
