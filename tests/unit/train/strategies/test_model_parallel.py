"""The sizes of a mesh, and the refusals of a strategy over it."""

from __future__ import annotations

import pytest

from insitu.base.errors import InputError
from insitu.train.strategies.model_parallel import resolve_mesh_sizes


def test_one_size_may_be_left_open() -> None:
    assert resolve_mesh_sizes({"data": 2, "model": -1}, 8) == (2, 4)
    assert resolve_mesh_sizes({"data": 1, "model": 3}, 3) == (1, 3)


@pytest.mark.parametrize("sizes", [(), (3, -1), (2, 2), (-1, -1), (0, -1)])
def test_sizes_must_multiply_to_the_devices(sizes: tuple[int, ...]) -> None:
    mesh = dict(zip(("data", "model"), sizes, strict=False))
    with pytest.raises(InputError, match="multiply to the number of devices, 8"):
        resolve_mesh_sizes(mesh, 8)
