"""Hashes of keys and first values of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from insitu.parameters.rules.hashing import assign_servers
from insitu.parameters.tables import RowStore, Table


def pulled(rows: RowStore, keys: Any, **options: Any) -> Any:
    keys = np.asarray(keys, np.int64)
    out = np.empty((len(keys), rows.table.width), rows.table.dtype)
    rows.pull(keys, out, **options)
    return out


@pytest.mark.parametrize("initializer", ["uniform", "normal", {"name": "constant", "value": 2.5}])
def test_first_values_depend_only_on_seed_table_and_key(initializer):
    table = Table("t", 7, initializer=initializer, seed=5)
    one, two = RowStore(table), RowStore(table)
    keys = np.array([9, -3, 2**63 - 1, 9])
    a = pulled(one, keys)
    pulled(two, [1, 2, 3])
    b = np.concatenate([pulled(two, [key]) for key in keys])
    np.testing.assert_array_equal(a, b)
    if initializer != {"name": "constant", "value": 2.5}:
        assert (pulled(RowStore(Table("t", 7, initializer=initializer, seed=6)), keys) != a).all()
        assert (pulled(RowStore(Table("u", 7, initializer=initializer, seed=5)), keys) != a).all()


def test_drawn_values_have_the_configured_distribution():
    keys = np.arange(20000)
    normal = pulled(RowStore(Table("t", 9, initializer={"name": "normal", "mean": 1, "deviation": 2})), keys)
    assert abs(normal.mean() - 1) < 0.03
    assert abs(normal.std() - 2) < 0.03
    uniform = pulled(RowStore(Table("t", 9, initializer={"name": "uniform", "low": -1, "high": 3})), keys)
    assert -1 <= uniform.min() < -0.99
    assert 2.99 < uniform.max() <= 3
    assert abs(np.corrcoef(uniform[:, 0], uniform[:, 1])[0, 1]) < 0.03


def test_keys_are_spread_evenly_over_servers():
    counts = np.bincount(assign_servers(np.arange(30_000), 3), minlength=3)
    assert counts.min() > 9_500
