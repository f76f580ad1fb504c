"""Handing memory from one process to another."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterator

import pytest
from readiness import wait_readable

from insitu.base.errors import ExchangeError
from insitu.exchange import memory, memory_passing
from tests.support.descriptors import find_new_descriptors, list_descriptors

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")


@pytest.fixture
def listener() -> Iterator[memory_passing.MemoryListener]:
    found = memory_passing.MemoryListener()
    yield found
    found.close()


def test_a_descriptor_comes_with_its_data(listener: memory_passing.MemoryListener) -> None:
    file = memory.create("insitu-test", 100)
    with memory_passing.dial(listener.name, os.getpid()) as here:
        call = listener.accept()
        assert call is not None
        there, process = call
        with there:
            assert process == os.getpid()
            with pytest.raises(BlockingIOError):
                memory_passing.receive(there, 3)
            memory_passing.send(here, b"abc", file)
            data, received = memory_passing.receive(there, 3)
            assert data == b"abc" and received != file and os.fstat(received).st_ino == os.fstat(file).st_ino
            assert not os.get_inheritable(received)
    os.close(file)
    os.close(received)
    assert listener.accept() is None


def test_only_the_process_that_was_named_is_given_memory(listener: memory_passing.MemoryListener) -> None:
    with pytest.raises(ExchangeError, match="handed to process 1 of user"):
        memory_passing.dial(listener.name, 1)
    with pytest.raises(ExchangeError, match="reach each other's Unix sockets"):
        memory_passing.dial("0" * 32, os.getpid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_callers_of_another_user_are_disconnected(listener: memory_passing.MemoryListener) -> None:
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as call:
                call.connect("\0insitu-" + listener.name)
                call.settimeout(30)
                os._exit(0 if call.recv(1) == b"" else 1)
        finally:
            os._exit(2)
    assert wait_readable([listener], 30)
    assert listener.accept() is None
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("count", [0, 2])
def test_anything_but_one_descriptor_is_refused_and_closed(count: int) -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        there.setblocking(False)
        files = list(os.pipe())[:count]
        socket.send_fds(here, [b"abc"], files)
        before = list_descriptors()
        with pytest.raises(ExchangeError, match="one descriptor"):
            memory_passing.receive(there, 3)
        assert find_new_descriptors(before, "pipe:") == []
        for file in files:
            os.close(file)


def test_an_end_is_an_error() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with there:
        here.close()
        there.setblocking(False)
        with pytest.raises(ExchangeError):
            memory_passing.receive(there, 3)
        with pytest.raises(ExchangeError, match="Memory must be handed"):
            memory_passing.send(there, b"abc", 0)


def test_callers_of_another_user_do_not_hold_up_the_loop(
    listener: memory_passing.MemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as they called faster than they were disconnected, `accept` didn't return."""
    monkeypatch.setattr(memory_passing, "_STRANGERS_AT_ONCE", 4)
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(memory_passing.dial(listener.name, os.getpid()))
        stack.enter_context(monkeypatch.context()).setattr(
            memory_passing, "_read_credentials", lambda connection: (1, os.geteuid() + 1)
        )
        assert listener.accept() is None
        assert select.select([listener], [], [], 0)[0], "two of them still wait"
        assert listener.accept() is None
        assert not select.select([listener], [], [], 0)[0]


def test_a_caller_for_whom_there_is_no_descriptor_is_told_of(
    listener: memory_passing.MemoryListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listener stays ready: a loop that didn't know would spin."""

    class Full:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many")

    whole = listener._socket
    monkeypatch.setattr(listener, "_socket", Full())
    assert listener.accept() is None and listener.lacks_descriptors
    monkeypatch.setattr(listener, "_socket", whole)
    assert listener.accept() is None and not listener.lacks_descriptors
