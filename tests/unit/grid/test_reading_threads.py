"""Threads that read: errors, forks, and an end that waits for nobody."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest

from insitu.grid.reading.read_ahead import ReadingThreads

HANGING = """
import threading
from insitu.grid.reading.read_ahead import ReadingThreads
threads, began = ReadingThreads(2), threading.Event()
def hang():
    began.set()
    threading.Event().wait()
threads.submit(hang)
assert began.wait(60)
print("end")
"""


def test_calls_run_and_raise() -> None:
    threads, done = ReadingThreads(2), []
    futures = [threads.submit(done.append, number) for number in range(20)]
    wait(futures, 20)
    assert sorted(done) == list(range(20))

    def fail() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        threads.submit(fail).result(20)
    threads.submit(done.append, 20).result(20)


def test_a_process_ends_while_a_read_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "end\n")


def test_threads_end_with_their_object() -> None:
    threads = ReadingThreads(3)
    names = []
    threads.submit(lambda: names.append(threading.current_thread())).result(20)
    del threads
    gc.collect()
    names[0].join(60)
    assert not names[0].is_alive()


def test_a_forked_process_has_threads_of_its_own() -> None:
    threads = ReadingThreads(1)
    threads.submit(lambda: None).result(20)
    child = os.fork()
    if not child:
        code = 1
        try:
            threads.submit(lambda: None).result(20)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
