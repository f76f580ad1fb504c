"""How gradients travel is what was asked for, or a line says what it is."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf
from models import in_shards

import insitu
from insitu.base.errors import InputError, TrainingError
from insitu.train import MirroredStrategy, MultiWorkerMirroredStrategy
from insitu.train.strategies.communication import choose_communication, choose_reduction

CONTEXT = in_shards((0,), 1)


@pytest.mark.parametrize("names", [insitu, tf.distribute], ids=["insitu", "tensorflow"])
def test_options_choose_the_communication(names: Any, capsys) -> None:
    ways = names.experimental.CommunicationImplementation
    for way, told in [(ways.AUTO, ""), (ways.RING, ""), (ways.NCCL, "NCCL was asked for")]:
        options = names.experimental.CommunicationOptions(timeout_seconds=33, implementation=way)
        strategy = MultiWorkerMirroredStrategy(communication_options=options, context=CONTEXT)
        assert strategy.communication == "ring" and strategy.membership.context.stall_timeout == 33
        assert told in capsys.readouterr().err
        assert bool(told) == (way is ways.NCCL)
    old = MultiWorkerMirroredStrategy(communication=ways.RING, context=CONTEXT)
    assert old.communication == "ring"
    assert insitu.experimental.CollectiveCommunication is insitu.experimental.CommunicationImplementation
    assert insitu.experimental.CollectiveHints(3).bytes_per_pack == 3


def test_nccl_is_xla_on_jax_with_gpus() -> None:
    assert choose_communication("NCCL", "jax", True) == ("xla", "")
    for backend, gpus, where in [("jax", False, "CPUs on jax"), ("torch", True, "GPUs on torch")]:
        way, note = choose_communication("NCCL", backend, gpus)
        assert way == "ring" and where in note


def test_options_that_cannot_be_are_refused() -> None:
    options = insitu.experimental.CommunicationOptions
    for wrong in ({"bytes_per_pack": -1}, {"timeout_seconds": 0}, {"implementation": "pigeons"}):
        with pytest.raises(InputError, match="Received: "):
            options(**wrong)
    with pytest.raises(TrainingError, match="both"):
        MultiWorkerMirroredStrategy(communication_options=options(), communication="ring", context=CONTEXT)


def test_devices_add_up_as_asked_or_say_how() -> None:
    one, tree, nccl = (
        insitu.ReductionToOneDevice(),
        insitu.HierarchicalCopyAllReduce(num_packs=2),
        insitu.NcclAllReduce(),
    )
    for ops in (None, one, tf.distribute.ReductionToOneDevice()):
        assert choose_reduction(ops, "tensorflow", {"cpu"}) == ("copies, added on one device", "")
    for ops in (tree, nccl, tf.distribute.HierarchicalCopyAllReduce()):
        way, note = choose_reduction(ops, "tensorflow", {"gpu"})
        assert way == "copies, added on one device"
        assert type(ops).__name__ in note and way in note
    assert choose_reduction(nccl, "jax", {"gpu"}) == ("one program over a mesh, NCCL collectives", "")
    assert "ReductionToOneDevice isn't" in choose_reduction(one, "jax", {"cpu"})[1]
    for wrong in ("nccl", object()):
        with pytest.raises(InputError, match=r"insitu\.ReductionToOneDevice\(\)"):
            choose_reduction(wrong, "tensorflow", {"cpu"})
    with pytest.raises(InputError, match="in the order of the devices"):
        insitu.ReductionToOneDevice(reduce_to_device="cpu:0")
    with pytest.raises(InputError, match="num_packs"):
        insitu.NcclAllReduce(-1)


def test_a_mirrored_strategy_tells_its_reduction(capsys) -> None:
    strategy = MirroredStrategy(None, insitu.HierarchicalCopyAllReduce(), context=CONTEXT)
    assert strategy.reduction == "copies, added on one device"
    assert "[insitu] cross_device_ops: HierarchicalCopyAllReduce" in capsys.readouterr().err
