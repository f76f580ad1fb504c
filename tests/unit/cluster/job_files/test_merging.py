"""Which lines of tasks come into the merged output."""

from __future__ import annotations

import pytest

from insitu.cluster.job_files.logs import LONGEST_HOLD, LineMerger, is_news

HEADER = b"Traceback (most recent call last):"
MISTAKE = [HEADER, b'  File "train.py", line 4, in <module>', b"    a.b", b"AttributeError: b"]
OTHER = [*MISTAKE[:-1], b"AttributeError: c"]


def shown(*parts: bytes) -> list[str]:
    return b"".join(parts).decode().splitlines()


def whole(source: str, lines: list[bytes]) -> list[str]:
    return [f"[{source}] {line.decode()}" for line in lines]


def test_a_traceback_that_tasks_write_alike_comes_once() -> None:
    merger = LineMerger()
    first = shown(merger.add("worker:0", MISTAKE[:2], 0.0))
    assert shown(merger.add("worker:1", MISTAKE, 0.0), merger.end("worker:1")) == []
    rest = shown(merger.add("worker:0", MISTAKE[2:], 0.0), merger.end("worker:0"))
    assert first + rest == whole("worker:0", MISTAKE)
    assert shown(merger.add("worker:2", MISTAKE, 1.0), merger.end("worker:2"), merger.finish()) == []


@pytest.mark.parametrize("lines", [OTHER, [*MISTAKE, b"and more"]])
def test_another_traceback_comes_whole(lines: list[bytes]) -> None:
    merger = LineMerger()
    merger.add("worker:0", MISTAKE, 0.0)
    merger.end("worker:0")
    assert shown(merger.add("worker:1", lines, 0.0), merger.end("worker:1")) == whole("worker:1", lines)


def test_a_traceback_is_compared_with_what_comes_after_it() -> None:
    merger = LineMerger()
    merger.add("worker:0", MISTAKE[:3], 0.0)
    assert merger.add("worker:1", OTHER, 0.0) == b""
    assert shown(merger.add("worker:0", MISTAKE[3:], 0.0)) == [
        *whole("worker:0", MISTAKE[3:]),
        *whole("worker:1", OTHER),
    ]


def test_nothing_is_held_back_for_long() -> None:
    merger = LineMerger()
    merger.add("worker:0", MISTAKE, 0.0)
    held = [*MISTAKE, b"Epoch 1"]
    assert merger.add("worker:1", held, 1.0) == merger.release(1.0 + LONGEST_HOLD / 2) == b""
    assert shown(merger.release(1.0 + LONGEST_HOLD)) == whole("worker:1", held)
    assert shown(merger.add("worker:1", [b"Epoch 2"], 9.0)) == ["[worker:1] Epoch 2"]


def test_chained_tracebacks_are_one() -> None:
    chain = [*MISTAKE, b"", b"During handling of the above exception, another exception occurred:", b""]
    chain = [*chain, *OTHER]
    merger = LineMerger()
    merger.add("worker:0", chain, 0.0)
    assert merger.add("worker:1", chain, 0.0) + merger.end("worker:1") == b""


def test_the_next_traceback_of_a_task_is_another_one() -> None:
    merger = LineMerger()
    for lines in (MISTAKE, OTHER):
        assert shown(merger.add("worker:0", lines, 0.0)) == whole("worker:0", lines)
        assert merger.add("worker:1", lines, 0.0) == b""
    assert merger.end("worker:1") + merger.finish() == b""


def test_a_syntax_error_comes_once() -> None:
    lines = [b'  File "train.py", line 1', b"    foo(", b"       ^", b"SyntaxError: '(' was never closed"]
    merger = LineMerger()
    assert shown(merger.add("worker:1", lines, 0.0)) == whole("worker:1", lines)
    assert merger.add("worker:0", lines, 0.0) + merger.end("worker:0") == b""


NEWS = [
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    b"I0000 00:00:1795820106.299303     980 port.cc:153] oneDNN custom operations are on. You may see",
    b"2024-01-01 00:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You",
    b"I0000 00:00:1.2     980 cpu_feature_guard.cc:210] This TensorFlow binary is optimized to use",
    b"To enable the following instructions: AVX2, rebuild TensorFlow with the appropriate compiler flags.",
    b"E0000 00:00:1.2    9 cuda_executor.cc:1309] failed call to cuInit: INTERNAL: UNKNOWN ERROR (303)",
    b"E0000 00:00:1.2    9 cuda_fft.cc:467] Unable to register cuFFT factory: Attempting to register",
]
NEEDED = [
    b"",
    b"WARNING: All rows are read",
    b"E0000 00:00:1.2    9 cuda_executor.cc:1309] failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY",
    b"E0000 00:00:1.2    9 cuda_dnn.cc:522] Could not create cudnn handle",
    b"To enable it, rebuild",
]


def test_the_lines_of_tensorflow_that_each_process_prints_are_left_out() -> None:
    assert all(map(is_news, NEWS)) and not any(map(is_news, NEEDED))
    assert shown(LineMerger().add("worker:0", [*NEWS, b"Epoch 1"], 0.0)) == ["[worker:0] Epoch 1"]
