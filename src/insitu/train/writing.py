"""Writes checkpoints behind the training."""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import CheckpointError, StorageFull
from insitu.train.checkpoint import Checkpoint, CheckpointStore

_LOG = logging.getLogger("insitu")

Room = dict[str, NDArray[Any]]


class BackgroundWriter:
    """Writes the checkpoints that it is given, one after the other, in a thread of its own.

    While one is being written the next waits; one that waits is given up for a newer one. Without room on
    the disk training goes on, with a warning for each checkpoint that could not be written. Any other
    failure is raised at the next `submit` or at `finish`.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._writing = False
        self._failure: CheckpointError | None = None
        self._rooms: list[Room] = []
        self._thread: threading.Thread | None = None
        self.written = 0

    def room(self, like: dict[str, NDArray[Any]]) -> Room:
        """Arrays of the same shapes and dtypes, for the next checkpoint's values: those of one that has been
        written where there are any, since new memory costs more than copying to it."""
        with self._changed:
            while self._rooms:
                room = self._rooms.pop()
                if room.keys() == like.keys() and all(
                    room[n].shape == v.shape and room[n].dtype == v.dtype for n, v in like.items()
                ):
                    return room
        return {name: np.empty(value.shape, value.dtype) for name, value in like.items()}

    def submit(self, checkpoint: Checkpoint) -> None:
        """Has `checkpoint` written; its arrays are the writer's now. Raises what went wrong before."""
        with self._changed:
            self._raise_failure()
            if self._waiting is not None:
                self._rooms.append(self._waiting.values)
            self._waiting = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="insitu-checkpoints", daemon=True)
                self._thread.start()
                atexit.register(self._wait)
            self._changed.notify_all()

    def finish(self) -> None:
        """Returns once all has been written. Raises CheckpointError for what went wrong."""
        self._wait()
        with self._changed:
            self._raise_failure()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and not self._writing)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                checkpoint, self._waiting, self._writing = self._waiting, None, True
            failure = self._write(checkpoint) if checkpoint is not None else None
            with self._changed:
                self._failure = failure or self._failure
                if checkpoint is not None:
                    self._rooms.append(checkpoint.values)
                self._writing = False
                self._changed.notify_all()

    def _write(self, checkpoint: Checkpoint) -> CheckpointError | None:
        try:
            self._store.save(checkpoint)
            self.written += 1
        except StorageFull as full:
            _LOG.warning("%s Training goes on.", full)
        except CheckpointError as error:
            return error
        except Exception as error:  # whatever a file system's package raises
            return CheckpointError(f"A checkpoint can't be written: {error!r}")
        return None
