"""The part of an agent that watches who is head if etcd holds the metadata.

It has the agent follow the head that etcd names. If there is none, it tries to win the key, and starts a head
in the agent's own home, which outlives the agent. The decisions are in `decide/leadership.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from insitu.base.errors import ClusterError, InsituError, RevisionCompacted
from insitu.base.paths import Paths
from insitu.base.spec import NodeId
from insitu.cluster.decide import Candidacy, SeenKey, choose_as_agent
from insitu.cluster.failover.head_starting import start_elected_head
from insitu.cluster.leases import FollowedHead, Lead, give_up_home, read_clock, win
from insitu.cluster.wire import is_locked, read_agent, read_head
from insitu.metadata import (
    HEAD_KEY,
    Change,
    LeaderKey,
    MetadataSettings,
    MetadataStore,
    Record,
    open_etcd,
    parse_settings,
    read_leader,
    read_settings,
    write_settings,
)

logger = logging.getLogger("insitu")
_AGAIN_SECONDS = 1.0


class HeadWatch:
    """A thread of its own, once it is known which etcd it is."""

    def __init__(
        self, paths: Paths, node: NodeId, followed: FollowedHead, find_host: Callable[[], str]
    ) -> None:
        """`find_host` says at which address a head listens that is started here; "": none is."""
        self._paths, self._node, self._followed = paths, node, followed
        self._find_host = find_host
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._candidacy = Candidacy(0, False)
        self._said = ""

    def take_settings(self, message: Mapping[str, Any]) -> None:
        """Keep which etcd holds the metadata, as the head says it to one that joins; none if it was moved to
        the head's home. Raises ClusterError."""
        if message.get("metadata") is None:
            self._forget_settings()
            return
        try:
            settings = parse_settings(message["metadata"])
        except ValueError as error:
            raise ClusterError(f"A head says which etcd holds the metadata. Received: {error}") from error
        if settings != read_settings(self._paths):
            write_settings(self._paths, settings)
        self.start()

    def _forget_settings(self) -> None:
        """Have this home be an agent's alone. That of a head which `insitu up` has started stays as it is."""
        own = read_head(self._paths)
        if not self._paths.metadata_settings.exists() or (own is not None and own.hosts is not None):
            return
        if own is not None and not is_locked(self._paths.head_lock):
            give_up_home(self._paths, "")
        if not self._paths.head.exists():
            self._paths.metadata_settings.unlink()

    def start(self) -> None:
        """Begin, if it is known which etcd it is."""
        if self._thread is None and self._paths.metadata_settings.exists():
            self._thread = threading.Thread(target=self._run, name="insitu-leader", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Have the thread end."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                settings = read_settings(self._paths)
                if settings is not None:
                    with contextlib.closing(open_etcd(settings)) as store:
                        self._watch(store, settings)
            except RevisionCompacted:
                continue
            except (InsituError, OSError) as error:
                self._say(f"etcd doesn't say which head leads: {error}")
            except Exception as error:  # the next time may be better
                self._say(f"etcd isn't watched: {type(error).__name__}: {error}")
            self._closing.wait(_AGAIN_SECONDS)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            logger.warning("%s", text)

    def _watch(self, store: MetadataStore, settings: MetadataSettings) -> None:
        found, revision = store.get([HEAD_KEY])
        key = read_leader(found.get(HEAD_KEY))
        self._said = ""
        self._act(store, settings, key)
        for changes in store.watch(HEAD_KEY, revision):
            if self._closing.is_set() or not self._paths.metadata_settings.exists():
                return
            for change in changes:
                key = _read_change(change)
            self._act(store, settings, key)

    def _act(self, store: MetadataStore, settings: MetadataSettings, key: LeaderKey | None) -> None:
        record = read_agent(self._paths, self._node)
        if record is None or record.cluster != settings.cluster:
            return
        host = self._find_host()
        self._candidacy = Candidacy(record.epoch, bool(host), self._candidacy.again_at)
        seen = None if key is None else SeenKey(key.epoch, key.address, key.is_down)
        action = choose_as_agent(self._candidacy, seen, read_clock())
        if key is not None and key.address:
            self._give_up_home(key)
        if action == "follow" and key is not None:
            self._followed.accept({"address": key.address, "epoch": key.epoch, "instance": key.instance})
        elif action == "win":
            self._lead(store, host, record.epoch)

    def _give_up_home(self, key: LeaderKey) -> None:
        """Have this home be no head's any more if its head was killed, and so couldn't do it itself. That
        comes before the agent gets the catalogue of the head that leads."""
        own = read_head(self._paths)
        is_known = own is None or own.epoch >= key.epoch or own.replaced_by == key.address
        if not is_known and not is_locked(self._paths.head_lock):
            give_up_home(self._paths, key.address)

    def _lead(self, store: MetadataStore, host: str, epoch: int) -> None:
        """Win the key and start a head here. Another agent may be faster."""
        try:
            won = win(store, epoch)
        except ClusterError:
            return
        logger.warning("no head leads the cluster, so one is started here")
        lead = Lead(store, won)
        try:
            address = start_elected_head(self._paths, host, won.encode())
            logger.warning("the head at %s leads", address)
            lead.close()
        except (InsituError, OSError) as error:
            logger.warning("no head can be started here, another agent may: %s", error)
            self._candidacy = self._candidacy.fail(read_clock())
            lead.resign()


def _read_change(change: Change) -> LeaderKey | None:
    value = change.value
    return None if value is None else read_leader(Record(change.key, value, change.revision))
