"""Servers and workers together: what is pushed is what comes back, in each mode and over each transport."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parameter_servers import DEADLINE, clients, servers

from insitu.errors import (
    AuthenticationError,
    CheckpointError,
    DefinitionMismatch,
    InputError,
    NotFinite,
    ParameterError,
    SequenceError,
    ServerLost,
    ServerStalled,
)
from insitu.exchange.arithmetic import Reducer, coefficients
from insitu.parameters import ParameterServer, Table, checkpoints, connect
from insitu.parameters.dense_transfer import DenseTransfer

TRANSPORTS = ["shm", "tcp"]
SHAPES = {"kernel": (300, 7), "bias": (7,), "scale": ()}


def definitions(seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: (shape, dtype, rng.normal(size=shape).astype(dtype)) for name, shape in SHAPES.items()}


def gradients(seed: int, dtype: str = "float32") -> dict[str, Any]:
    return {name: values for name, (_, _, values) in definitions(seed + 100, dtype).items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 3])
def test_what_is_pushed_comes_back(transport: str, count: int):
    with servers(count) as addresses, clients(addresses, transport=transport) as (client,):
        model = definitions()
        plan = client.define(model, updater={"name": "sgd", "learning_rate": 0.5}, min_piece_bytes=2000)
        assert len({piece.server for piece in plan.pieces}) == count
        assert client.pull().result() == 0
        for name, (_, _, initial) in model.items():
            np.testing.assert_array_equal(client.values[name], initial)
        assert client.push(0, 32, gradients=gradients(1)).result() == "applied"
        assert client.pull().result() == 1
        for name, (_, _, initial) in model.items():
            np.testing.assert_array_equal(client.values[name], initial - np.float32(0.5) * gradients(1)[name])


@pytest.mark.parametrize("updater", ["sgd", "adam"])
@pytest.mark.parametrize("count", [1, 3])
def test_who_pulls_behind_a_push_has_the_values_written_by_the_update(
    count: int, updater: str, monkeypatch: pytest.MonkeyPatch
):
    written: list[int] = []
    copy_out = DenseTransfer.write_values
    monkeypatch.setattr(
        DenseTransfer, "write_values", lambda *given: (written.append(1), copy_out(*given))[1]
    )
    with servers(count) as addresses, clients(addresses, transport="shm") as (one,):
        one.define(definitions(), updater=updater, min_piece_bytes=2000)
        one.pull().result()
        assert len(written) == count
        for sequence in range(3):
            push = one.push(sequence, 32, gradients=gradients(sequence), defer_send=True, pull_follows=True)
            one.pull().result()
            assert push.result() == "applied"
        assert len(written) == count
        ahead = {name: value.copy() for name, value in one.values.items()}
        one.pull().result()
        assert len(written) == 2 * count
        for name, value in one.values.items():
            np.testing.assert_array_equal(value, ahead[name])
        # A repetition updates nothing, and so writes nothing.
        one.push(2, 32, gradients=gradients(2), defer_send=True, pull_follows=True)
        one.values["bias"][...] = 7
        one.pull().result()
        np.testing.assert_array_equal(one.values["bias"], ahead["bias"])


def test_several_dtypes_have_buffers_of_their_own():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(
            {"a": ((3,), "float32", np.ones(3, "f4")), "b": ((5,), "float64", np.ones(5))}, updater="sgd"
        )
        client.push(0, 1, gradients={"a": np.ones(3, "f4"), "b": np.ones(5)}).result()
        client.pull().result()
        assert client.values["a"].dtype == np.float32
        np.testing.assert_allclose(client.values["b"], 0.99)
        with pytest.raises(InputError, match="say which group"):
            client.flat_values()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 2])
def test_sync_is_the_exchange_s_weighted_mean_to_the_bit(transport: str, count: int):
    rows = [5, 0, 11]
    with (
        servers(count, mode="sync", total_replicas=3) as addresses,
        clients(addresses, 3, transport=transport) as workers,
    ):
        for client in workers:
            client.define(definitions(), updater={"name": "sgd", "learning_rate": 1.0}, min_piece_bytes=2000)
        for client in workers:
            client.pull().result()
        # The last shard's first: the order of arrival must not matter.
        pushed = [workers[shard].push(0, rows[shard], gradients=gradients(shard)) for shard in (2, 1, 0)]
        assert [push.result() for push in pushed] == ["applied"] * 3
        factors = coefficients([float(r) for r in rows], np.dtype("float32"))
        for client in workers:
            assert client.pull().result() == 1
            for name, (shape, _, initial) in definitions().items():
                size = int(np.prod(shape))
                mean = np.empty(size, "f4")
                flat = [gradients(shard)[name].reshape(-1) for shard in range(3)]
                Reducer("weighted_mean", np.dtype("float32"), 3, size).reduce(flat, mean, factors)
                np.testing.assert_array_equal(client.values[name], initial - mean.reshape(shape))


@pytest.mark.parametrize("count", [1, 2])
def test_late_gradients_are_dropped_and_counted(count: int):
    with (
        servers(count, mode="sync", total_replicas=3, replicas_to_aggregate=2) as addresses,
        clients(addresses, 3) as workers,
    ):
        for client in workers:
            client.define(definitions(), min_piece_bytes=2000)
        for client in workers:
            client.pull().result()
        first = [workers[shard].push(0, 4, gradients=gradients(shard)) for shard in (2, 0)]
        assert [push.result() for push in first] == ["applied"] * 2
        assert workers[1].push(0, 6, gradients=gradients(1)).result() == "dropped"
        assert [client.pull().result() for client in workers] == [1, 1, 1]
        told = workers[0].stats()
        assert (told[0]["dropped"], told[0]["dropped_rows"], told[0]["dropped_by_shard"]) == (1, 6, [[1, 6]])
        assert {server["version"] for server in told} == {1}
        again = [workers[shard].push(1, 4, gradients=gradients(shard)) for shard in (1, 2)]
        assert [push.result() for push in again] == ["applied"] * 2


def test_bounded_holds_the_fast_one_back_until_the_slow_one_moves():
    with (
        servers(mode="bounded", total_replicas=2, max_staleness=1) as addresses,
        clients(addresses, 2) as (fast, slow),
    ):
        for client in (fast, slow):
            client.define({"a": ((2,), "float32")})
            client.pull().result()
        for sequence in range(2):
            fast.push(sequence, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiting = fast.pull()
        # One request that waits holds up no other.
        assert fast.last_applied() == 1
        assert not waiting.done()
        slow.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        assert waiting.result() == 3
        assert slow.stats()[0]["staleness"]["largest"] == 2


def test_a_wait_ends_with_who_is_awaited():
    with (
        servers(mode="sync", total_replicas=2, stall_timeout=0.3) as addresses,
        clients(addresses, 1) as (client,),
    ):
        client.define({"a": ((2,), "float32")})
        with pytest.raises(ServerStalled, match=r"for pushes of shards \[1\]"):
            client.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()


def test_a_repeated_push_changes_nothing_and_a_gap_is_refused():
    with servers(2) as addresses, clients(addresses) as (client,):
        client.define(definitions(), min_piece_bytes=2000)
        for _ in range(2):
            assert client.push(0, 8, gradients=gradients(0)).result() == "applied"
        client.pull().result()
        for name, (_, _, initial) in definitions().items():
            np.testing.assert_array_equal(
                client.values[name], initial - np.float32(0.01) * gradients(0)[name]
            )
        assert client.last_applied() == 0
        assert client.stats()[0]["repeated"] == 1
        with pytest.raises(SequenceError, match="comes to sequence 1 next"):
            client.push(2, 8, gradients=gradients(0)).result()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_gradient_with_nan_is_refused_by_name_or_clipped(transport: str):
    bad = gradients(0)
    bad["bias"][3] = np.nan
    with servers(2) as addresses, clients(addresses, transport=transport) as (client,):
        client.define(definitions(), min_piece_bytes=2000)
        with pytest.raises(NotFinite, match="variable 'bias', shard 0, sequence 0"):
            client.push(0, 8, gradients=bad).result()
    with servers(nan="clip") as addresses, clients(addresses, transport=transport) as (client,):
        client.define(definitions(), updater={"name": "sgd", "learning_rate": 1.0})
        client.push(0, 8, gradients=bad).result()
        client.pull().result()
        assert client.values["bias"][3] == definitions()["bias"][2][3]
        assert client.stats()[0]["clipped"] == 1


def test_a_gradient_that_the_worker_has_looked_through_is_not_looked_through_again():
    nothing = {name: np.full(shape, np.nan, "f4") for name, shape in SHAPES.items()}
    with servers() as addresses, clients(addresses) as (client,):
        client.define(definitions())
        assert client.push(0, 1, gradients=nothing, finite=True).result() == "applied"
        with pytest.raises(NotFinite):
            client.push(1, 1, gradients=nothing).result()


def test_huge_but_finite_gradients_pass():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"a": ((2,), "float32")}, updater={"name": "sgd", "learning_rate": 1e-38})
        client.push(0, 1, gradients={"a": np.full(2, 3e38, "f4")}).result()


def test_another_model_is_refused_by_name():
    with servers() as addresses, clients(addresses, 1) as (client,):
        client.define(definitions())
        changed = {**definitions(), "bias": ((8,), "float32")}
        with clients(addresses) as (other,), pytest.raises(DefinitionMismatch, match="variable 'bias'"):
            other.define(changed)
        with clients(addresses) as (other,), pytest.raises(DefinitionMismatch, match="optimizer is adam"):
            other.define(definitions(), updater="adam")
        with clients(addresses) as (other,):
            other.define(definitions())


def test_bad_pushes_are_refused_before_they_are_sent():
    with servers() as addresses, clients(addresses) as (client,):
        with pytest.raises(InputError, match="must be defined"):
            client.pull()
        client.define(definitions())
        with pytest.raises(InputError, match=r"'bias' is float32\[7\]. Received: float32\[8\]"):
            client.push(0, 1, gradients={**gradients(0), "bias": np.zeros(8, "f4")})
        with pytest.raises(InputError, match="Received: float64"):
            client.push(0, 1, gradients={**gradients(0), "bias": np.zeros(7)})
        with pytest.raises(InputError, match=r"Missing: \['scale'\]"):
            client.push(0, 1, gradients={n: g for n, g in gradients(0).items() if n != "scale"})
        with pytest.raises(InputError, match="shard must be one of"):
            client.push(0, 1, shard=7)


def test_connecting_to_what_cannot_be():
    with pytest.raises(InputError, match="--ps 1 or more"):
        connect([])
    with servers() as addresses:
        with pytest.raises(AuthenticationError, match="doesn't know this job's secret"):
            connect(addresses, secret=b"another", timeout=0.5)
        with pytest.raises(InputError, match=r"shards must be in \[0, 1\)"), clients(addresses, shards=(3,)):
            pass
        with pytest.raises(ParameterError, match="can't listen"):
            ParameterServer(addresses[0])


def test_versions_that_differ_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    with servers() as addresses:
        monkeypatch.setattr(
            "insitu.parameters.server_connection.make_peer_info", _peer_info_of_another_version
        )
        monkeypatch.setattr("insitu.parameters.server_handshake.PROTOCOL_VERSION", 99)
        with pytest.raises(ParameterError, match="need the same version of insitu"), clients(addresses):
            pass


def _peer_info_of_another_version(role: str, index: int, **more: Any) -> dict[str, Any]:
    return {"room": "parameters", "role": role, "index": index, "protocol": 99, "host": "", **more}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_table(transport: str, count: int):
    with servers(count) as addresses, clients(addresses, transport=transport) as (client,):
        client.define_tables([Table("words", 8, updater={"name": "sgd", "learning_rate": 1.0}, seed=3)])
        keys = np.array([5, -9, 5, 2**62, 0])
        before = client.pull_rows("words", keys).result()
        np.testing.assert_array_equal(before[0], before[2])
        assert len({row.tobytes() for row in before}) == 4
        ones = np.ones((5, 8), "f4")
        assert client.push_rows("words", keys, ones, 0).result() == "applied"
        client.push_rows("words", keys, ones, 0).result()
        after = client.pull_rows("words", keys).result()
        np.testing.assert_allclose(before - after, np.array([2, 1, 2, 1, 1])[:, None] * ones, rtol=1e-6)
        assert client.last_applied(table="words") == 0
        client.pull_rows("words", np.array([77]), create=False).result()
        read = {
            int(k): row
            for ks, rows in client.read_rows("words", block=2)
            for k, row in zip(ks, rows, strict=True)
        }
        assert sorted(read) == sorted({5, -9, 2**62, 0})
        np.testing.assert_array_equal(read[5], after[0])
        client.load_rows("words", [5, 6], np.zeros((2, 8))).result()
        assert not client.pull_rows("words", [6, 5]).result().any()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_that_were_looked_up_stay_as_they_are(transport: str):
    """Also once other rows have been, and the client is gone."""
    with servers() as addresses, clients(addresses, transport=transport) as (client,):
        client.define_tables([Table("t", 64)])
        keys = [np.arange(low, low + 20_000) for low in range(0, 100_000, 20_000)]
        found = [client.pull_rows("t", some).result() for some in keys]
        again = [client.pull_rows("t", some, out=np.empty((20_000, 64), "f4")).result() for some in keys]
        client.push_rows("t", keys[0], np.ones((20_000, 64), "f4"), 0).result()
    for one, other in zip(found, again, strict=True):
        np.testing.assert_array_equal(one, other)
        one += 1  # they are the caller's


def test_rows_of_a_step_are_part_of_it():
    with servers(2, mode="sync", total_replicas=2) as addresses, clients(addresses, 2) as workers:
        for client in workers:
            client.define({"a": ((2,), "float32")}, updater={"name": "sgd", "learning_rate": 1.0})
            client.define_tables(
                [Table("t", 4, initializer="constant", updater={"name": "sgd", "learning_rate": 1.0})]
            )
            client.pull().result()
        pushed = [
            client.push(
                0,
                rows,
                gradients={"a": np.full(2, value, "f4")},
                tables={"t": (np.array([3, 3, rank]), np.full((3, 4), value, "f4"))},
            )
            for rank, (client, rows, value) in enumerate(zip(workers, (1, 3), (4.0, 8.0), strict=True))
        ]
        assert [push.result() for push in pushed] == ["applied"] * 2
        rows = workers[0].pull_rows("t", [3, 0, 1]).result()
        np.testing.assert_allclose(rows[:, 0], [-(2 * 1 + 2 * 6), -1, -6])


def test_bad_keys_are_refused():
    with servers() as addresses, clients(addresses) as (client,):
        client.define_tables([Table("t", 4)])
        for keys, message in (
            (np.array([1.5]), "Keys must be integers"),
            (np.array([2**63], np.uint64), "must fit into int64. Received: 9223372036854775808"),
            (np.array([[1]]), "Keys must be integers"),
        ):
            with pytest.raises(InputError, match=message):
                client.pull_rows("t", keys)
        with pytest.raises(InputError, match="'u'"):
            client.pull_rows("u", [1])
        with pytest.raises(NotFinite, match="table 't'"):
            client.push_rows("t", [1], np.full((1, 4), np.inf, "f4"), 0).result()
        with pytest.raises(DefinitionMismatch, match="table 't'"):
            client.define_tables([Table("t", 5)])


def test_several_threads_may_wait_at_once():
    with (
        servers(mode="bounded", total_replicas=2, max_staleness=0) as addresses,
        clients(addresses, 2) as (one, two),
    ):
        one.define({"a": ((2,), "float32")})
        one.define_tables([Table("t", 4)])
        two.define({"a": ((2,), "float32")})
        one.pull().result()
        one.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiter = threading.Thread(target=lambda: one.pull().result())
        waiter.start()
        for key in range(20):
            one.pull_rows("t", [key]).result()
        two.push(0, 1, gradients={"a": np.ones(2, "f4")}).result()
        waiter.join(30)
        assert not waiter.is_alive()


def test_a_lost_server_is_named():
    with servers() as addresses, clients(addresses) as (client,):
        client.define({"a": ((2,), "float32")})
    with pytest.raises(ParameterError, match="closed"):
        client.pull()
    with ParameterServer() as server:
        client = connect([server.address], timeout=0.3)
        client.define({"a": ((2,), "float32")})
    with (
        client,
        pytest.raises(ServerLost, match=f"isn't found again at {server.address}") as caught,
    ):
        client.pull().result()
    assert caught.value.server == 0


def test_the_example_of_the_documentation_runs():
    text = (Path(__file__).parents[3] / "docs" / "parameters.md").read_text()
    found: dict[str, Any] = {}
    exec(text.split("## From NumPy")[1].split("```python\n")[1].split("```")[0], found)
    assert found["push"].result() == "applied"
    assert found["rows"].shape == (3, 8)


def test_a_checkpoint_has_large_variables_and_their_slots(tmp_path: Path):
    """Those of the snapshot, though the next step is done before it is on disk."""
    shape = (700, 500)
    gradient = {"large": np.linspace(-1, 1, 350_000, dtype="f4").reshape(shape)}
    seen = []
    for lives in (1, 2):
        with contextlib.ExitStack() as stack:
            sequence = 0
            for life in range(lives):
                server = stack.enter_context(ParameterServer(checkpoint=tmp_path / str(lives)))
                client = stack.enter_context(connect([server.address]))
                client.define({"large": (shape, "float32", np.ones(shape, "f4"))}, updater="adam")
                for _ in range(4 // lives):
                    client.push(sequence, 1, gradients=gradient).result()
                    sequence += 1
                if life + 1 < lives:
                    client.checkpoint(tmp_path / str(lives)).result()
                    client.push(sequence, 1, gradients=gradient).result()
            client.pull().result()
            seen.append(client.values["large"].copy())
    np.testing.assert_array_equal(*seen)


class Gate:
    """Holds up whoever writes arrays of a checkpoint until `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        pieces = checkpoints._iterate_blocks

        def held_up(array: Any) -> Any:
            self.reached.set()
            assert self.open.wait(DEADLINE)
            return pieces(array)

        monkeypatch.setattr(checkpoints, "_iterate_blocks", held_up)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    keys = np.arange(1000)
    ones = np.ones((1000, 4), "f4")

    def begin(server: Any, stack: contextlib.ExitStack) -> Any:
        client = stack.enter_context(connect([stack.enter_context(server).address]))
        client.define(
            {"w": ((5,), "float32", np.zeros(5, "f4"))}, updater={"name": "sgd", "learning_rate": 1.0}
        )
        client.define_tables(
            [Table("t", 4, initializer="constant", updater={"name": "sgd", "learning_rate": 1.0})]
        )
        return client

    with contextlib.ExitStack() as stack:
        client = begin(ParameterServer(), stack)
        client.expect_checkpoints()
        first = client.pull_rows("t", keys).result().copy()
        writing = client.checkpoint(tmp_path)
        assert gate.reached.wait(DEADLINE)
        for sequence in range(3):
            client.push(sequence, 1, gradients={"w": np.ones(5, "f4")}, tables={"t": (keys, ones)}).result()
        with pytest.raises(ParameterError, match="under way"):
            client.checkpoint(tmp_path)
        np.testing.assert_array_equal(client.pull_rows("t", keys).result(), first - 3)
        gate.open.set()
        assert writing.result(DEADLINE) == 1
        assert client.checkpoint(tmp_path / "later").result(DEADLINE) == 2
    for folder, steps in ((tmp_path, 0), (tmp_path / "later", 3)):
        with contextlib.ExitStack() as stack:
            client = begin(ParameterServer(checkpoint=folder), stack)
            client.pull().result()
            np.testing.assert_array_equal(client.values["w"], np.full(5, -steps, "f4"))
            np.testing.assert_array_equal(client.pull_rows("t", keys).result(), first - steps)


def test_a_server_that_ends_gives_its_checkpoint_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, stop = Gate(monkeypatch), checkpoints.CheckpointWriter.cancel

    def stop_and_open(writing: Any) -> None:
        writing._cancelled.set()
        gate.open.set()
        stop(writing)

    monkeypatch.setattr(checkpoints.CheckpointWriter, "cancel", stop_and_open)
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((5,), "float32")})
        client.checkpoint(tmp_path)
        assert gate.reached.wait(DEADLINE)
    assert list((tmp_path / "server-0").iterdir()) == []


def test_what_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(array: Any) -> Any:
        raise RuntimeError("the thing broke")

    monkeypatch.setattr(checkpoints, "_iterate_blocks", broken)
    with ParameterServer() as server, connect([server.address]) as client:
        client.define({"w": ((5,), "float32")})
        with pytest.raises(CheckpointError, match="the thing broke"):
            client.checkpoint(tmp_path).result(DEADLINE)
        assert client.push(0, 1, gradients={"w": np.ones(5, "f4")}).result() == "applied"
