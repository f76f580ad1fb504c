from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import ClusterError
from insitu.cluster.decide import Claim
from insitu.cluster.leases.job_terms import (
    accept_term,
    draw_term,
    encode_term,
    parse_term,
    read_term,
    write_term,
)


def test_a_host_accepts_the_highest_term_that_it_has_seen(tmp_path: Path) -> None:
    path = tmp_path / "job.term"
    accept_term(path, Claim(), "job")
    later = draw_term(1)
    accept_term(path, later, "job")
    accept_term(path, later, "job")  # the same supervisor has a server started again
    assert read_term(path) == later
    for refused in (Claim(), draw_term(1)):  # that of before, and another one that knew nothing of this
        with pytest.raises(ClusterError, match="after term 1: the job was brought to another machine"):
            accept_term(path, refused, "job")
    assert read_term(path) == later


def test_a_job_that_was_never_moved_has_the_first_term(tmp_path: Path) -> None:
    assert read_term(tmp_path / "term.json") == Claim() == parse_term(None)
    write_term(tmp_path / "term.json", Claim(3, "x"))
    assert read_term(tmp_path / "term.json") == Claim(3, "x") == parse_term(encode_term(Claim(3, "x")))


@pytest.mark.parametrize("value", [3, [], [1], ["1", "x"], [-1, "x"], [1, 2], [True, "x"], [1 << 40, "x"]])
def test_what_is_no_term_is_refused(value: Any) -> None:
    with pytest.raises(ClusterError, match="A term is a number and an instance"):
        parse_term(value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "term.json").write_text("{")
    with pytest.raises(ClusterError, match=r"term\.json must say the term"):
        read_term(tmp_path / "term.json")
