"""A head is replaced; the processes are in process/test_agents.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import Paths
from insitu.cluster.nodes import head_replacing as module
from insitu.cluster.nodes.hosts import HostRequest
from insitu.cluster.wire.launching import Outcome
from insitu.cluster.wire.records import read_head, start_record, write_token

REQUEST = HostRequest("10.0.0.3\n", "hosts.txt", "ssh", "insitu")


def test_a_head_that_did_not_start_is_started_by_the_next_command(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port was taken, say, after this home had become that of the head."""
    home.mkdir(mode=0o700)
    paths = Paths(home)
    write_token(paths, "t" * 32)
    view = {"cluster": "c" * 32, "head": "127.0.0.1:1", "epoch": 7, "head_answers": False}

    def fail(*_: Any) -> Any:
        raise ClusterError("the port is taken")

    monkeypatch.setattr(module, "run_on_hosts", lambda *_: [Outcome("10.0.0.3", {"views": [view]})])
    monkeypatch.setattr(module, "bring_up_hosts", fail)
    with pytest.raises(ClusterError, match="the port is taken"):
        module.replace_head(paths, REQUEST, lambda outcome: None)
    with pytest.raises(InputError, match=r"Leave --replace-head out: `insitu up --hosts` starts that head"):
        module.replace_head(paths, REQUEST, lambda outcome: None)
    started = start_record(paths, "127.0.0.1:2")  # as the head does that `insitu up --hosts` starts
    assert started == read_head(paths)
    assert (started.cluster, started.epoch) == ("c" * 32, (1 << 20) + 1)
    assert started.replaces is not None and started.replaces["head"] == "127.0.0.1:1"
    assert not started.replaced_by
