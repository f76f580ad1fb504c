"""What tests of IPv6 need: Python knows it also where the system has it turned off."""

from __future__ import annotations

import socket

import pytest


def _can_listen() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _can_listen(), reason="nothing can listen at ::1 here")
