"""How arrays are on a mesh of one process' devices, and which meshes of several tasks can't be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from insitu.base.errors import TrainingError


def over_one(*axes: str) -> Any:
    import jax

    from insitu.train.backends.jax.spmd.mesh_sharding import MeshSharding

    devices = np.array(jax.devices("cpu")[:1]).reshape((1,) * len(axes))
    return MeshSharding.from_devices(devices, axes)


def test_the_mesh_of_one_process_is_its_part() -> None:
    sharding = over_one("data", "model")
    assert sharding.mesh is sharding.local and not sharding.spans_processes
    assert sharding.local_rows == 1
    assert tuple(sharding.batch_sharding.spec) == ("data",) and tuple(sharding.replicated.spec) == ()


def test_rows_are_padded_to_their_length() -> None:
    sharding = over_one("data")
    rows = np.arange(6, dtype="float32").reshape(3, 2)
    padded = np.asarray(sharding.shard_rows(rows, 5, 5))
    assert padded[:3].tolist() == rows.tolist() and not padded[3:].any()
    whole = sharding.shard_rows(rows, 3, 3)
    assert whole.sharding == sharding.batch_sharding


def test_a_placed_value_has_memory_of_its_own() -> None:
    import jax

    sharding = over_one("data")
    value = jax.numpy.arange(4.0)
    placed = sharding.place(value, sharding.replicated)
    assert placed.unsafe_buffer_pointer() != value.unsafe_buffer_pointer()
    assert sharding.view(placed) is placed


def test_a_variable_keeps_its_sharding_where_the_mesh_has_its_axes() -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    sharding, other = over_one("data", "model"), over_one("data", "rows")
    value = jax.device_put(np.zeros((2, 2)), NamedSharding(sharding.mesh, PartitionSpec("model")))
    assert tuple(sharding.sharding_of(value).spec) == ("model",)
    assert other.sharding_of(value) == other.replicated
    assert sharding.sharding_of(jax.numpy.zeros(2)) == sharding.replicated


@pytest.mark.parametrize("processes", [[[0, 1]], [[0], [0], [1]], [[1], [1]]])
def test_each_task_has_as_many_whole_rows(monkeypatch: pytest.MonkeyPatch, processes: Any) -> None:
    from insitu.train.backends.jax.spmd import mesh_sharding

    monkeypatch.setattr(mesh_sharding, "Mesh", lambda devices, axes: (devices, axes))
    devices = np.array([[SimpleNamespace(process_index=p) for p in row] for row in processes])
    axes = ("data", "model")
    with pytest.raises(TrainingError, match="same number of whole rows of the mesh's first axis, 'data'"):
        mesh_sharding.MeshSharding.from_devices(devices, axes)


def test_the_part_of_a_task_is_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from insitu.train.backends.jax.spmd import mesh_sharding

    monkeypatch.setattr(mesh_sharding, "Mesh", lambda devices, axes: devices)
    devices = np.array([[SimpleNamespace(process_index=p)] for p in (1, 1, 0, 0)])
    made: Any = mesh_sharding.MeshSharding.from_devices(devices, ("data", "model"))
    assert made.local.ravel().tolist() == devices[2:].ravel().tolist()
