"""The index of a table's keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.parameters.tables import HashIndex

keys64 = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


@settings(max_examples=50, deadline=None)
@given(st.lists(keys64, max_size=6))
def test_the_index_behaves_as_a_dictionary(batches):
    index, known = HashIndex(limit=1 << 20), {}
    for batch in batches:
        found = index.find(np.array(batch, np.int64))
        assert found.tolist() == [known.get(key, -1) for key in batch]
        new = [key for key in dict.fromkeys(batch) if key not in known]
        known.update(zip(new, index.add(np.array(new, np.int64)).tolist(), strict=True))
    assert len(index) == len(known)


def test_many_keys_of_similar_hash_are_found():
    index = HashIndex()
    keys = np.arange(5000, dtype=np.int64) << 40
    index.add(keys)
    assert index.find(keys).tolist() == list(range(5000))
    assert index.find(keys + 1).tolist() == [-1] * 5000
    index.rebuild()
    assert index.find(keys).tolist() == list(range(5000))
