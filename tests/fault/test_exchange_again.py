"""Every fault 200 times in a row: what fails once in a hundred times fails here."""

from __future__ import annotations

import signal

import pytest
import test_exchange_loss as loss
import test_exchange_network as network
import test_exchange_trust as trust

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TURNS = 200
namespaces = network.namespaces


@pytest.mark.parametrize("transport", loss.TRANSPORTS)
@pytest.mark.parametrize("size", [100, 300_000])
def test_killed(size: int, transport: str) -> None:
    for _ in range(TURNS):
        loss.test_survivors_get_peer_lost(signal.SIGKILL, size, transport)


@pytest.mark.parametrize("algorithm", ["gather", "star", "direct"])
def test_killed_with_each_algorithm(algorithm: str) -> None:
    for turn in range(TURNS):
        loss.test_survivors_get_peer_lost_with_each_algorithm(algorithm, 100_000, 2 * (turn % 2), True)


def test_half_a_sum() -> None:
    for _ in range(TURNS):
        loss.test_half_a_received_sum_leaves_the_rows_unchanged(True)


@pytest.mark.parametrize("transport", loss.TRANSPORTS)
def test_stopped(transport: str) -> None:
    for _ in range(TURNS):
        loss.test_survivors_get_peer_lost(signal.SIGSTOP, 300_000, transport)


@pytest.mark.parametrize("transport", loss.TRANSPORTS)
def test_replaced(transport: str) -> None:
    for _ in range(TURNS):
        loss.test_survivors_continue_with_a_replacement(transport)


def test_cut(namespaces: tuple[str, str]) -> None:
    for _ in range(TURNS):
        network.test_cut_network_is_noticed_and_leaves_buffers_whole(namespaces, 2_000_000)
        network._ip("-n", namespaces[0], "link", "set", "in0", "up")


def test_half_open() -> None:
    for _ in range(TURNS):
        network.test_half_open_connection_is_a_lost_peer()


@pytest.mark.parametrize("victim", [0, 3])
def test_lost_on_another_host(victim: int) -> None:
    for _ in range(TURNS):
        network.test_all_hosts_learn_of_a_loss_on_another(victim)


def test_garbage() -> None:
    for _ in range(TURNS):
        trust.test_garbage_does_not_disturb_peers(b"\xff" * 100_000)


def test_wrong_secret() -> None:
    for _ in range(TURNS):
        trust.test_wrong_secret_is_rejected()
