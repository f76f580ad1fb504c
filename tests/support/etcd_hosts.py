"""Hosts on the loopback interface whose metadata is in a real etcd."""

from __future__ import annotations

import contextlib
from pathlib import Path

from agent_hosts import LoopbackHosts, insitu, is_running, wait_until
from etcd_servers import Etcd

from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.wire.records import HeadRecord, read_agent, read_head


class EtcdHosts(LoopbackHosts):
    """Hosts on the loopback interface whose metadata is in etcd."""

    def __init__(self, folder: Path, names: tuple[str, ...], members: int = 1) -> None:
        super().__init__(folder, names)
        self.etcd = Etcd(folder / "etcd", members).wait()

    def begin(self) -> HeadRecord:
        """Bring up head and agents. Returns the head's record."""
        self.up("--metadata", self.etcd.url)
        record = read_head(Paths(self.head))
        assert record is not None
        return record

    def find_head(self, above: int) -> tuple[Path, HeadRecord] | None:
        """Return the home and the record of a head with a higher epoch that all agents follow."""
        for home in (self.head, *self.homes.values()):
            record = read_head(Paths(home))
            if record is not None and record.pid and record.epoch > above and is_running(record.pid):
                followed = [read_agent(Paths(h), NodeId(n)) for n, h in self.homes.items()]
                if all(each is not None and each.epoch == record.epoch for each in followed):
                    alive = [n for n in self.nodes(home).values() if n["state"] == "alive"]
                    return (home, record) if len(alive) == len(self.homes) else None
        return None

    def wait_for_head(self, before: HeadRecord) -> tuple[Path, HeadRecord]:
        found: tuple[Path, HeadRecord] = wait_until(lambda: self.find_head(before.epoch), "another head")
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.etcd.resume(0)
        for home in self.homes.values():
            insitu(home, "down", code=None)
        super().close()
        self.etcd.close()
