"""How a dataset is written."""

from __future__ import annotations

from insitu.base.spec import CacheSpec, Column
from insitu.grid.reading.datasets import Chain, describe_chain, describe_columns_of
from insitu.grid.reading.selection import Take


def test_a_chain_is_written_as_its_calls() -> None:
    assert describe_chain((), Chain()) == ""
    chain = Chain(seed=3, window_blocks=2, batch_size=8, maps=(abs,), passes=None)
    assert (
        describe_chain((Take(5),), chain)
        == ".take(...).shuffle(3, windows of 2 blocks).batch(8).repeat().map(abs)"
    )


def test_columns_are_written_with_their_shapes() -> None:
    columns = (Column("x", "uint8", (2, 3)), Column("name", "str"), Column("y", "int64"))
    cache = CacheSpec("a", 1, columns, (), 0, None, 0.0)
    assert describe_columns_of(cache, ["x", "name"]) == "x: uint8[2, 3], name: text"
