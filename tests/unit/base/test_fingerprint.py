from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from insitu.base.fingerprint import CROSS_KEY, fingerprints, join_fingerprints

MOST = 2**63 - 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20))
def test_hashes_are_those_of_tensorflow(texts: list[bytes]):
    import tensorflow as tf

    expected = tf.strings.to_hash_bucket_fast(tf.constant(texts), MOST).numpy()
    np.testing.assert_array_equal(fingerprints(texts) % np.uint64(MOST), expected)


def test_texts_of_each_length_are_hashed_as_by_tensorflow():
    import tensorflow as tf

    data = np.random.default_rng(0).bytes(400)
    texts = [data[start : start + length] for length in range(200) for start in (0, 100)]
    expected = tf.strings.to_hash_bucket_fast(tf.constant(texts), MOST).numpy()
    np.testing.assert_array_equal(fingerprints(texts) % np.uint64(MOST), expected)


def test_a_hash_stays_what_it_was():
    """Saved models depend on it."""
    assert fingerprints([b"", b"insitu"]).tolist() == [0x9AE16A3B2F90404F, 0xADD5BF611FE82286]


@given(st.integers(0, MOST), st.text(max_size=30), st.integers(1, 10**6))
@settings(max_examples=20, deadline=None)
def test_joined_hashes_are_those_of_tensorflow(number: int, text: str, buckets: int):
    import tensorflow as tf

    expected = tf.sparse.cross_hashed(
        [tf.constant([[number]], tf.int64), tf.constant([[text]])], num_buckets=buckets
    ).values.numpy()
    start = np.array([CROSS_KEY], np.uint64)
    joined = join_fingerprints(start, np.array([number], np.uint64))
    joined = join_fingerprints(joined, fingerprints([text.encode()]))
    assert (joined % np.uint64(buckets)).tolist() == expected.tolist()
