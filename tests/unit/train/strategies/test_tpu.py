"""A TPU is looked for, and mirrored over."""

from __future__ import annotations

import keras
import pytest

import insitu
from insitu.base.errors import TrainingError
from insitu.train.backends import load_backend
from insitu.train.devices.names import list_devices


def test_without_a_tpu_it_is_said():

    with pytest.raises(TrainingError, match=r"TPUStrategy needs a TPU.*Received: tpu='' on tensorflow"):
        insitu.TPUStrategy()


def test_cores_are_mirrored_over():
    strategy = insitu.TPUStrategy("local", find=lambda tpu: list_devices())
    assert strategy.num_replicas_in_sync == len(list_devices())


def test_a_resolver_names_the_tpu(monkeypatch: pytest.MonkeyPatch):
    """As the four lines of a script for tf.distribute. TensorFlow's resolver, and a TPU, are played."""
    tf = pytest.importorskip("tensorflow")
    made = []
    resolvers = tf.distribute.cluster_resolver
    monkeypatch.setattr(resolvers, "TPUClusterResolver", lambda tpu=None: made.append(tpu) or resolvers)
    resolver = insitu.cluster_resolver.TPUClusterResolver(tpu="grpc://10.0.0.2")
    assert resolver is resolvers and made == ["grpc://10.0.0.2"]
    seen = []
    insitu.TPUStrategy(resolver, find=lambda tpu: seen.append(tpu) or list_devices())
    assert seen == [resolver]
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    named = insitu.cluster_resolver.TPUClusterResolver("")
    assert named.tpu == ""
    load_backend("jax").start_tpu(named)
    with pytest.raises(TrainingError, match=r"leave tpu out. Received: 'x'"):
        load_backend("jax").start_tpu(insitu.cluster_resolver.TPUClusterResolver("x"))
