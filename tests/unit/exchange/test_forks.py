"""Sockets in forked children."""

from __future__ import annotations

import os
import socket

from insitu.exchange import close_in_children


def test_a_child_does_not_keep_the_socket() -> None:
    here, there = socket.socketpair()
    with here, there:
        close_in_children(here)
        child = os.fork()
        if not child:
            os._exit(0 if here.fileno() == -1 and there.fileno() >= 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert here.fileno() >= 0
