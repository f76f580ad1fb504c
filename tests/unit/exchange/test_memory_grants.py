"""Memory that is lent and taken back."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from insitu.base.errors import ExchangeError
from insitu.exchange import memory
from insitu.exchange.memory_grants import GRANT_BYTES, Borrower, Lender

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="no shared memory")
SIZE = 100_000


class Shared:
    """A segment as its owner sees it, and as two borrowers do."""

    def __init__(self) -> None:
        file = memory.create("insitu-test", SIZE + GRANT_BYTES)
        self.own = memory.Segment(file, SIZE + GRANT_BYTES)
        self.lender = Lender(self.own, SIZE)

    def lend(self, number: int) -> Borrower:
        segment = memory.adopt(os.dup(self.own.file), SIZE + GRANT_BYTES)
        return Borrower(segment, **self.lender.grant(number))


@pytest.fixture
def shared() -> Iterator[Shared]:
    yield Shared()


def test_a_borrower_writes_until_the_memory_is_taken_back(shared: Shared) -> None:
    one, other = shared.lend(0), shared.lend(1)
    for borrower in (one, other, one):
        borrower.begin()
        borrower.end()
    shared.lender.take_back(0, 1.0)
    with pytest.raises(ExchangeError, match="after it was taken back"):
        one.begin()
    other.begin()
    other.end()
    again = shared.lend(0)
    again.begin()
    again.end()
    with pytest.raises(ExchangeError):
        one.begin()


def test_the_owner_waits_for_a_write_under_way(shared: Shared) -> None:
    borrower, begun = shared.lend(0), threading.Event()
    borrower.begin()
    with pytest.raises(ExchangeError, match="stopped in the middle"):
        shared.lender.take_back(0, 0.05)

    def take_back() -> None:
        begun.set()
        shared.lender.take_back(0, 30.0)

    thread = threading.Thread(target=take_back)
    thread.start()
    assert begun.wait(30)
    borrower.end()
    thread.join(30)
    with pytest.raises(ExchangeError):
        borrower.begin()


def test_a_borrower_that_ends_in_a_write_holds_nobody_up(shared: Shared) -> None:
    borrower = shared.lend(0)
    child = os.fork()
    if not child:
        own = os.open(f"/proc/self/fd/{shared.own.file}", os.O_RDWR)
        borrower._file = own
        borrower.begin()
        os._exit(0)
    os.waitpid(child, 0)
    shared.lender.take_back(0, 5.0)


@pytest.mark.parametrize("word", [-8, 4, SIZE + GRANT_BYTES])
def test_a_word_outside_of_the_segment_is_refused(shared: Shared, word: int) -> None:
    with pytest.raises(ExchangeError, match="must be in the segment"):
        Borrower(shared.own, word, 1)
