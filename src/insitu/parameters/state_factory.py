"""Creates the states that a server's process holds: its own, and the one that it mirrors."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from insitu.parameters import checkpoints, snapshots
from insitu.parameters.rules import ConsistencyPolicy
from insitu.parameters.server_state import MakeUpdater, ServerState

_LOG = logging.getLogger("insitu")


@dataclass(frozen=True, slots=True)
class StateFactory:
    """The settings of a job's servers that their states depend on."""

    #: The mode and its settings.
    policy: ConsistencyPolicy
    #: "refuse" gradients that aren't finite, or "clip" them.
    nan: str
    #: Makes the updater of a config that workers send.
    make_updater: MakeUpdater
    #: Folder that `Client.checkpoint` wrote to; None: states start empty.
    checkpoint: Path | None
    #: Signs checkpoints, and those that are read; None: this user's key.
    checkpoint_key: bytes | None = field(default=None, repr=False)

    def make(self, server: int) -> ServerState:
        """Return an empty state for a server. Raises InputError for bad settings."""
        return ServerState(server, self.policy, nan=self.nan, make_updater=self.make_updater)

    def restore(self, state: ServerState) -> None:
        """Fill an empty state from its newest checkpoint, where there is one. Raises CheckpointError."""
        if self.checkpoint is None:
            return
        snapshot = checkpoints.read_newest(self.checkpoint, state.server, self.checkpoint_key)
        if snapshot is not None:
            snapshots.restore(state, snapshot)
            snapshots.mark_restored(state)
            _LOG.info("Server %d starts from checkpoint %d", state.server, snapshot.meta["number"])
