"""Bytes become lines: whole, in order, never cut inside a character."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from insitu.cluster.job_files.logs import MAX_LINE_BYTES, LineAssembler, format_merged, split_prefix


def lines_of(*pieces: tuple[bytes, float] | bytes) -> list[bytes]:
    assembler = LineAssembler()
    found = []
    for piece in pieces:
        data, now = piece if isinstance(piece, tuple) else (piece, 0.0)
        found += assembler.feed(data, now)
    return found + assembler.flush()


def test_lines_are_whole_however_they_come() -> None:
    assert lines_of(b"on", b"e\ntw", b"o\n", b"\n", b"rest") == [b"one", b"two", b"", b"rest"]


def test_windows_line_ends_are_line_ends() -> None:
    assert lines_of(b"a\r\nb\r", b"\nc\r\n") == [b"a", b"b", b"c"]


def test_a_progress_bar_shows_its_last_state_and_at_most_one_a_second_before() -> None:
    states = [(f"\r{i}%".encode(), i / 10) for i in range(35)]
    assert lines_of(*states, (b"\r100%\n", 3.5)) == [b"0%", b"10%", b"20%", b"30%", b"100%"]


def test_a_progress_bar_that_ends_with_returns_is_kept() -> None:
    assert lines_of((b"1%\r", 0.0), (b"2%\r", 0.1), (b"3%\r", 0.2)) == [b"1%", b"3%"]


def test_a_long_line_is_cut_between_characters() -> None:
    text = "ä" * MAX_LINE_BYTES
    pieces = lines_of(b"x" + text.encode() + b"\n")
    assert len(pieces) == 3 and all(len(p) <= MAX_LINE_BYTES for p in pieces)
    assert "".join(p.decode() for p in pieces) == "x" + text


def test_bytes_that_are_no_text_pass_through() -> None:
    assert lines_of(b"\xff\xfe\x00\n") == [b"\xff\xfe\x00"]
    assert b"".join(lines_of(b"\x80" * (MAX_LINE_BYTES + 10))) == b"\x80" * (MAX_LINE_BYTES + 10)


@given(
    st.binary(max_size=200).map(lambda b: b.replace(b"\r", b"")), st.lists(st.integers(0, 200), max_size=6)
)
def test_nothing_is_lost_wherever_the_stream_is_cut(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(bounds)]
    expected = data.split(b"\n")
    assert lines_of(*pieces) == (expected[:-1] if not expected[-1] else expected)


@given(st.lists(st.sampled_from([b"a", b"bc", b"\r", b"\n", b"\r\n"]), max_size=30), st.integers(1, 5))
def test_returns_never_lose_the_last_state_of_a_line(parts: list[bytes], size: int) -> None:
    data = b"".join(parts)
    pieces = [(data[i : i + size], 0.0) for i in range(0, len(data), size)]
    last_states = []
    for line in data.split(b"\n"):
        states = [s for s in line.split(b"\r") if s]
        if states:
            last_states.append(states[-1])
    found = [line for line in lines_of(*pieces) if line]
    assert [line for line in found if line in last_states][-1:] == last_states[-1:]
    iterator = iter(found)
    assert all(any(line == state for line in iterator) for state in last_states)


def test_the_merged_output_names_the_task_of_each_line() -> None:
    data = format_merged("worker:0", [b"[x] y", b""])
    assert data == b"[worker:0] [x] y\n[worker:0] \n"
    assert [split_prefix(line) for line in data.splitlines()] == [("worker:0", b"[x] y"), ("worker:0", b"")]
