"""Resolvers answer as TensorFlow's do."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import tensorflow as tf
from models import in_shards

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.train import MultiWorkerMirroredStrategy, ParameterServerStrategy
from insitu.train.strategies.cluster_resolver import (
    ClusterSpec,
    SimpleClusterResolver,
    check_cluster,
    check_server_cluster,
)

CONFIG = {
    "cluster": {"worker": ["a:1", "b:2"], "ps": ["c:3"]},
    "task": {"type": "worker", "index": 1},
    "rpc_layer": "grpc+loas",
}
QUESTIONS = ("task_type", "task_id", "rpc_layer", "environment")


def answers(resolver: Any) -> list[Any]:
    told = [getattr(resolver, name) for name in QUESTIONS]
    return [*told, resolver.cluster_spec().as_dict(), resolver.master(), resolver.num_accelerators()]


@pytest.mark.parametrize("config", [None, CONFIG, {"cluster": CONFIG["cluster"]}])
@pytest.mark.parametrize("arguments", [{}, {"task_type": "ps", "task_id": 0, "rpc_layer": "x"}])
def test_tf_config_is_read_as_tensorflow_does(monkeypatch, config: Any, arguments: Any) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    ours = insitu.cluster_resolver.TFConfigClusterResolver(**arguments)
    theirs = tf.distribute.cluster_resolver.TFConfigClusterResolver(**arguments)
    if config is not None and "task" not in config and not arguments:
        assert ours.task_type is None and ours.master() == ""  # TensorFlow fails
        return
    assert answers(ours) == answers(theirs)
    assert isinstance(ours.cluster_spec(), tf.train.ClusterSpec)


def test_a_simple_resolver_says_what_it_was_given() -> None:
    spec = tf.train.ClusterSpec(CONFIG["cluster"])
    arguments = {"master": "m", "task_type": "worker", "task_id": 1, "num_accelerators": {"GPU": 8}}
    ours = SimpleClusterResolver(spec, **arguments)
    theirs = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, **arguments)
    assert answers(ours) == answers(theirs)
    assert ours.master("ps", 0, "grpc") == theirs.master("ps", 0, "grpc") == "grpc://c:3"
    with pytest.raises(InputError, match="ClusterSpec"):
        SimpleClusterResolver({"worker": ["a:1"]})


def test_a_spec_without_tensorflow_has_the_same_methods() -> None:
    ours, theirs = ClusterSpec(CONFIG["cluster"]), tf.train.ClusterSpec(CONFIG["cluster"])
    assert ours.as_dict() == theirs.as_dict() and sorted(ours.jobs) == sorted(theirs.jobs)
    for role in theirs.jobs:
        assert ours.num_tasks(role) == theirs.num_tasks(role)
        assert ours.task_indices(role) == theirs.task_indices(role)
        assert ours.job_tasks(role) == theirs.job_tasks(role)
        assert ours.task_address(role, 0) == theirs.task_address(role, 0)
    assert ours == ClusterSpec(CONFIG["cluster"]) and ours != ClusterSpec({}) and not ClusterSpec({})
    with pytest.raises(InputError, match="'chief'"):
        ours.job_tasks("chief")


def test_a_strategy_takes_a_resolver_of_its_own_cluster_only(monkeypatch) -> None:
    alone, context = tf.train.ClusterSpec({}), in_shards((0,), 1)
    strategy = MultiWorkerMirroredStrategy(SimpleClusterResolver(alone), context=context)
    monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
    assert strategy.cluster_resolver.task_id == 1
    assert insitu.OneDeviceStrategy(context=context).cluster_resolver is None
    check_cluster(None, context)
    with pytest.raises(TrainingError, match=r"describes 2 workers, in a process of 1.*--workers"):
        MultiWorkerMirroredStrategy(insitu.cluster_resolver.TFConfigClusterResolver(), context=context)
    with pytest.raises(InputError, match=r"Received: 3.*communication='ring'"):
        MultiWorkerMirroredStrategy(3, context=context)


class PlainResolver:
    """Describes a cluster by a dictionary, as a script of one's own may."""

    def __init__(self, **cluster: list[str]) -> None:
        self._cluster = cluster

    def cluster_spec(self) -> Any:
        return self._cluster


def test_a_resolver_may_describe_the_tasks_by_a_dictionary() -> None:
    job = dataclasses.replace(in_shards((0,), 1), workers=("a:1", "b:1"))
    check_cluster(PlainResolver(worker=["x:1", "y:1"]), job)
    with pytest.raises(TrainingError, match="describes 3 workers, in a process of 2"):
        check_cluster(PlainResolver(worker=["x:1"] * 3), job)


def test_servers_take_a_resolver_of_their_own_job_only() -> None:
    alone = in_shards((0,), 1)
    job = dataclasses.replace(alone, workers=("a:1", "b:1"), servers=("c:1",))
    check_server_cluster(None, job)
    check_server_cluster(PlainResolver(worker=["x:1", "y:1"], ps=["z:1"]), job)
    check_server_cluster(PlainResolver(worker=["x:1"] * 3, ps=["z:1"] * 2), alone)
    with pytest.raises(TrainingError, match=r"2 workers and 1 ps tasks\. Received: a .* 3 workers and 0 ps"):
        check_server_cluster(PlainResolver(worker=["x:1"] * 3), job)
    with pytest.raises(InputError, match=r"Received: 'sync'\. Leave it out, or name .* mode='sync'"):
        ParameterServerStrategy("sync")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"function of a variable's shape and dtype\. Received: 2"):
        ParameterServerStrategy(variable_partitioner=2)
