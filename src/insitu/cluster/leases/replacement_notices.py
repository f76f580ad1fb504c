"""The end of a head that another one has replaced, and how it learns of that.

An agent notifies the previous head as soon as it meets it. If that has no agent any more, the new head
notifies it, at its old address.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from insitu.base.errors import ClusterError, InsituError
from insitu.base.paths import Paths
from insitu.cluster.decide import Claim, is_replaced
from insitu.cluster.wire import (
    HeadRecord,
    Message,
    ask_head,
    change_head,
    describe_replacement,
    list_agents,
    read_head,
    read_token,
)
from insitu.grid import disown_catalog

logger = logging.getLogger("insitu")
REPLACED_EXIT_CODE = 3
"""That of a head that another one has replaced."""
_ASK_SECONDS = 5.0
_AGAIN_SECONDS = 30.0


def record_replacement(paths: Paths, record: HeadRecord, message: Message) -> None:
    """Write down that the head with this record was replaced: its home changes nothing from then on. Raises
    ClusterError if that isn't so."""
    cluster, epoch, address = (message.get(name) for name in ("cluster", "epoch", "address"))
    if cluster != record.cluster or type(epoch) is not int or type(address) is not str:
        raise ClusterError("A head is replaced by one of its own cluster. Received: another one")
    if not is_replaced(Claim(record.epoch), Claim(epoch)):
        raise ClusterError(
            f"A head is replaced in a higher number of the cluster than that of epoch {record.epoch}. "
            f"Received: epoch {epoch}"
        )
    logger.warning("the head at %s has replaced this one, in epoch %d: this one ends", address, epoch)
    give_up_home(paths, address)


def give_up_home(paths: Paths, address: str) -> None:
    """Have the home of a head that leads no more change nothing. One that was only an agent's before is that
    again. `address`: that of the head that leads; empty: nobody knows."""
    record = read_head(paths)
    if (
        record is not None
        and record.hosts is None
        and paths.metadata_settings.exists()
        and list_agents(paths)
    ):
        paths.head.unlink(missing_ok=True)
    elif address:
        change_head(paths, replaced_by=address)
    paths.fence.unlink(missing_ok=True)
    with contextlib.suppress(InsituError, OSError):  # one that can't be read isn't changed, either
        disown_catalog(paths)


class ReplacementNotices:
    """The thread of a head that notifies the one that it has replaced."""

    def __init__(self, paths: Paths, record: HeadRecord) -> None:
        self._paths = paths
        self._record = record
        self._stopping = threading.Event()
        if record.replaces is not None:
            logger.warning("%s", describe_replacement(record.address, record.replaces))
            threading.Thread(target=self._tell, name="insitu-replaced", daemon=True).start()

    def close(self) -> None:
        """Have the thread end."""
        self._stopping.set()

    def _tell(self) -> None:
        record = self._record
        before = str((record.replaces or {}).get("head", ""))
        message: Message = {"do": "replaced"}
        message |= {"cluster": record.cluster, "address": record.address, "epoch": record.epoch}
        while before and before != record.address and not self._stopping.is_set():
            with contextlib.suppress(InsituError, OSError):
                token = read_token(self._paths)
                ask_head(before, token, message, _ASK_SECONDS, connect_seconds=_ASK_SECONDS)
                logger.warning("the head of before, at %s, is there again and has ended", before)
            self._stopping.wait(_AGAIN_SECONDS)
