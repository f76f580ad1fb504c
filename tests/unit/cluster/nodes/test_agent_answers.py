"""What an agent answers about files, as the head asks for it by the server of the agent's store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from partition_servers import SECRET, certificate

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import EPOCHS_OF_A_NUMBER
from insitu.cluster.files import RemotePeers, View
from insitu.cluster.leases.followed_head import FollowedHead
from insitu.cluster.nodes.agent import AgentAnswers
from insitu.cluster.nodes.agent_files import AgentFiles
from insitu.grid.serving import PartitionServer
from insitu.grid.shared_files import checksum_block

NODE = NodeId("a")


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    """An agent that follows a head of number 2."""
    paths = Paths(tmp_path)
    paths.node(NODE).mkdir(parents=True)
    followed = FollowedHead(paths, NODE)
    followed.record_joined({"cluster": "c", "epoch": 2 * EPOCHS_OF_A_NUMBER, "instance": "x"}, "h:1")
    files = AgentFiles(paths, NODE)
    answers = AgentAnswers(paths, followed, files)
    server = PartitionServer(paths, NODE, SECRET, certificate(), files=answers.answer)
    yield View({NODE: server.address})
    server.stop()
    files.close(delete=True)


def test_a_head_that_was_replaced_drops_no_block(view: View) -> None:
    data, key = b"block", "0" * 32
    fields = {"volume": "v", "keys": [key]}
    with contextlib.ExitStack() as stack:
        heads = [RemotePeers(SECRET, number=number) for number in (1, 2)]
        for each in heads:
            stack.callback(each.close)
        old, new = (each.find(NODE, view) for each in heads)
        old.act("put", {"volume": "v", "key": key, "checksum": checksum_block(data)}, data)
        with pytest.raises(InputError, match="one of number 1, whose head was replaced"):
            old.act("drop", fields)
        assert old.act("get", {"volume": "v", "key": key})[1] == data
        assert new.act("drop", fields)[0]["dropped"] == 1
