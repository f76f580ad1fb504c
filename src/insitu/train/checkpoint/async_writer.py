"""Writes checkpoints behind the training."""

from __future__ import annotations

import atexit
import logging
import threading

from insitu.errors import CheckpointError, StorageFull
from insitu.train.checkpoint.state_buffer import Image
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore, Packed

_LOG = logging.getLogger("insitu")


class BackgroundWriter:
    """Writes the checkpoints that it is given, one after the other, in a thread of its own.

    While one is being written the next waits; one that waits is given up for a newer one. Without room on
    the disk training goes on, with a warning for each checkpoint that could not be written. Any other
    failure is raised at the next `submit` or at `finish`.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._changed = threading.Condition()
        self._waiting: Packed | None = None
        self._writing = False
        self._failure: CheckpointError | None = None
        self._images: list[Image] = []
        self._thread: threading.Thread | None = None
        self.written = 0

    def submit(self, checkpoint: Checkpoint) -> None:
        """Copies `checkpoint` and has the copy written. Raises what went wrong before."""
        with self._changed:
            self._raise_failure()
            image = self._images.pop() if self._images else Image()
        packed = Packed.of(checkpoint, image)
        with self._changed:
            if self._waiting is not None:
                self._images.append(self._waiting.image)
            self._waiting = packed
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
                packed, self._waiting, self._writing = self._waiting, None, True
            failure = self._write(packed) if packed is not None else None
            with self._changed:
                self._failure = failure or self._failure
                if packed is not None:
                    self._images.append(packed.image)
                self._writing = False
                self._changed.notify_all()

    def _write(self, packed: Packed) -> CheckpointError | None:
        try:
            self._store.publish(packed)
            self.written += 1
        except StorageFull as full:
            _LOG.warning("%s Training goes on.", full)
        except CheckpointError as error:
            return error
        except Exception as error:  # whatever a file system's package raises
            return CheckpointError(f"A checkpoint can't be written: {error!r}")
        return None
