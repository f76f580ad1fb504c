"""Pages of logs, and what is left of text that a terminal would obey."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from insitu.service.logs import MAX_LINE, clean_line, read_on, read_page


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07after", "after"),
        (b"\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPq data \x1b\\x", "x"),
        (b"\x1bcreset", "reset"),
        (b"10%\r50%\r100%", "100%"),
        (b"a\tb", "a\tb"),
        (b"bell\x07", "bell\\x07"),
        ("\u202etxt.exe".encode(), "\\u202etxt.exe"),
        (b"\xff", "\ufffd"),
    ],
)
def test_what_a_terminal_or_a_browser_would_obey_is_gone(line: bytes, expected: str) -> None:
    assert clean_line(line) == expected


@given(st.binary(max_size=300))
def test_whatever_was_printed_is_text_that_can_be_shown(line: bytes) -> None:
    assert all(c.isprintable() or c == "\t" for c in clean_line(line))


def test_a_line_without_end_is_cut() -> None:
    assert len(clean_line(b"a" * 10 * MAX_LINE)) == MAX_LINE


@given(
    st.lists(st.text("ab", max_size=5), max_size=30),
    st.integers(1, 7),
    st.sampled_from(["", "a", "ab"]),
    st.booleans(),
)
def test_pages_from_the_end_to_the_start_hold_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int, search: str, whole: bool
) -> None:
    path = tmp_path_factory.mktemp("log") / "output.log"
    data = "".join(f"{line}\n" for line in lines) + ("" if whole else "aab")
    path.write_text(data)
    expected = [line for line in (*lines, *([] if whole else ["aab"])) if search in line]
    found: list[str] = []
    before: int | None = None
    while True:
        page, start, _ = read_page(path, count, before, search.encode())
        assert len(page) <= count
        assert all(data[at:].startswith(line.decode()) for at, line in page)
        found = [line.decode() for _, line in page] + found
        if start == 0:
            break
        before = start
    assert found == expected


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_page(tmp_path / "nothing", 5, None, b"") == ([], 0, 0)
    (tmp_path / "empty").touch()
    assert read_page(tmp_path / "empty", 5, 100, b"x") == ([], 0, 0)


def test_a_log_is_read_on_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert read_on(path, 5, 7) == ([], 7, 7)
    path.write_bytes(b"one\ntwo\nthr")
    assert read_on(path, 1, 0) == ([(0, b"one")], 0, 4)
    assert read_on(path, 5, 4) == ([(4, b"two")], 4, 8) and read_on(path, 5, 8) == ([], 8, 8)
