"""A TPU is looked for, and mirrored over."""

from __future__ import annotations

import pytest

import insitu
from insitu.errors import TrainingError
from insitu.train.devices.names import list_devices


def test_without_a_tpu_it_is_said():

    with pytest.raises(TrainingError, match=r"TPUStrategy needs a TPU.*Received: tpu='' on tensorflow"):
        insitu.TPUStrategy()


def test_cores_are_mirrored_over():
    strategy = insitu.TPUStrategy("local", find=lambda tpu: list_devices())
    assert strategy.num_replicas_in_sync == len(list_devices())
