"""What an agent is given."""

from __future__ import annotations

from insitu.cluster.wire.options import choose_copy_rate


def test_copies_leave_most_of_the_processors_to_jobs() -> None:
    assert choose_copy_rate([16, 4, 8]) == 20e6
    assert choose_copy_rate([]) == choose_copy_rate([0]) == 5e6
