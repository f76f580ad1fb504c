"""Joining the JAX of several tasks: which devices are whose, without starting JAX."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("jax")

from insitu.base.errors import InputError, PeerLost, TrainingError
from insitu.train.backends.jax.spmd import distributed, program
from insitu.train.backends.jax.spmd.distributed import own_accelerators, visible_accelerators

WORKERS = ("a:1", "b:1", "a:2")


def test_tasks_of_a_host_share_its_accelerators_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "visible_accelerators", lambda: 4)
    assert [own_accelerators(WORKERS, index) for index in range(3)] == [[0, 1], None, [2, 3]]
    monkeypatch.setattr(distributed, "visible_accelerators", lambda: 1)
    with pytest.raises(TrainingError, match="2 tasks and 1 GPUs on a"):
        own_accelerators(WORKERS, 2)


def test_a_task_has_all_gpus_that_its_job_has_given_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --gpus-per-worker it sees no others: they aren't divided again."""
    monkeypatch.setenv("INSITU_GPUS", "2")
    for visible in (1, 2):
        monkeypatch.setattr(distributed, "visible_accelerators", lambda visible=visible: visible)
        assert own_accelerators(WORKERS, 0) is None


def test_visible_accelerators_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(distributed.jax, "config", SimpleNamespace(jax_platforms=""))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2,-1")
    assert visible_accelerators() == 2


class Lost:
    """A group that has lost a peer."""

    def barrier(self) -> None:
        raise PeerLost(
            "worker:1 was lost", rank=1, task="worker:1", operation="barrier", sequence=0, last_completed=-1
        )


def test_a_broken_collective_names_the_lost_task(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[str] = []
    monkeypatch.setattr(program, "skip_shutdown", lambda: skipped.append("shutdown"))
    with pytest.raises(PeerLost, match="worker:1"), program.report_lost_peers(Lost()):  # type: ignore[arg-type]
        raise ValueError("INTERNAL: connection closed by peer")
    assert skipped == ["shutdown"]
    with pytest.raises(ValueError, match="a bug"), program.report_lost_peers(Lost()):  # type: ignore[arg-type]
        raise ValueError("a bug")
    with pytest.raises(ValueError, match="INTERNAL"), program.report_lost_peers(None):
        raise ValueError("INTERNAL: of the only task")
    assert skipped == ["shutdown"]


def test_gloo_listens_where_its_task_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listened on the address that the machine's name stands for, also in a job on loopback."""
    from jax._src import xla_bridge

    made: list[dict[str, object]] = []
    library = SimpleNamespace(make_gloo_tcp_collectives=lambda **options: made.append(options))
    monkeypatch.setattr(xla_bridge, "_jax", library, raising=False)
    for host in ("127.0.0.1", "192.0.2.1", "localhost"):
        distributed._bind_gloo(host)
        library.make_gloo_tcp_collectives(distributed_client=None)
    # 192.0.2.1 is nobody's, as the address of a gateway is no interface of this host.
    assert [options["hostname"] for options in made] == ["127.0.0.1", "127.0.0.1", "localhost"]


def test_jax_connects_hosts_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator lets in whoever reaches it, and listened on all interfaces."""
    monkeypatch.setattr(distributed, "backend_started", lambda: False)
    monkeypatch.setattr(distributed, "_bind_gloo", lambda host: None)

    def reached() -> None:
        raise KeyError("the group was joined")

    context = SimpleNamespace(workers=("10.0.0.1:1", "10.0.0.2:1"), index=0)
    membership = SimpleNamespace(context=context, group=reached)
    with pytest.raises(
        InputError, match=r"communication='xla' has no authentication.*Use communication='ring'"
    ):
        distributed.connect(membership)  # type: ignore[arg-type]
    monkeypatch.setenv("INSITU_ALLOW_UNAUTHENTICATED", "1")
    with pytest.raises(KeyError, match="joined"):
        distributed.connect(membership)  # type: ignore[arg-type]
    monkeypatch.delenv("INSITU_ALLOW_UNAUTHENTICATED")
    context.workers = ("127.0.0.1:1", "127.0.0.1:2")
    with pytest.raises(KeyError, match="joined"):
        distributed.connect(membership)  # type: ignore[arg-type]
