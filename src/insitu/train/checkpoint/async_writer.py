"""Write checkpoints in a thread, while training continues."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

from insitu.base.errors import CheckpointError, StorageFull
from insitu.train.checkpoint.state_buffer import StateBuffer
from insitu.train.checkpoint.store import Checkpoint, CheckpointStore, EncodedCheckpoint

WRITE_TIMEOUT = 600.0
"""Seconds that writing one checkpoint may take, at the end of a fit and of the process."""
_LOG = logging.getLogger("insitu")
_running: list[AsyncCheckpointWriter] = []
"""Writers of this process that have something to write."""


def wait_for_writers(store: CheckpointStore) -> None:
    """Return once no writer of this process writes to the folder of `store`.

    The writer of a fit that failed may still write its last checkpoint when the next fit begins. Raises
    CheckpointError if its storage doesn't answer.
    """
    for writer in list(_running):
        if writer.store.path == store.path and not writer.wait():
            raise writer.make_timeout_error()


class AsyncCheckpointWriter:
    """Writes the checkpoints that it is given, one after the other, in a thread of its own.

    While one is being written the next waits; a newer one replaces the one that waits. If the disk is full,
    training continues, with a warning for each checkpoint that could not be written. Any other failure is
    raised by the next `submit` or by `finish`.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        """The checkpoints that it writes."""
        self._changed = threading.Condition()
        self._waiting: EncodedCheckpoint | None = None
        """The checkpoint that the thread writes next."""
        self._failure: CheckpointError | None = None
        """The thread's last failure, until it is raised."""
        self._free_buffers: list[StateBuffer] = []
        self._thread: threading.Thread | None = None
        """Lives while there is something to write: it would keep the buffers after the fit."""
        self._done = 0
        """Checkpoints that were written, or failed to be."""
        self.written = 0
        """Checkpoints that were published."""

    def submit(self, checkpoint: Checkpoint) -> None:
        """Copy `checkpoint` and have the copy written. Raises an earlier failure."""
        with self._changed:
            self._raise_failure()
            buffer = self._free_buffers.pop() if self._free_buffers else StateBuffer()
        encoded = EncodedCheckpoint.encode(checkpoint, buffer)
        with self._changed:
            if self._waiting is not None:
                self._free_buffers.append(self._waiting.buffer)
            self._waiting = encoded
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="insitu-checkpoints", daemon=True)
                self._thread.start()
                _running.append(self)
                atexit.register(self._wait_at_exit)
            self._changed.notify_all()

    def finish(self) -> None:
        """Return once everything is written. Raises CheckpointError for a failure, also if the storage
        doesn't answer."""
        if not self.wait():
            raise self.make_timeout_error()
        with self._changed:
            self._raise_failure()

    def wait(self) -> bool:
        """Return True once everything is written, or has failed to be; False after `WRITE_TIMEOUT` seconds in
        which no checkpoint was done."""
        with self._changed:
            done = -1
            while self._thread is not None:
                if done == self._done:
                    return False
                done = self._done
                self._changed.wait_for(self._is_done_since(done), WRITE_TIMEOUT)
        return True

    def _is_done_since(self, done: int) -> Callable[[], bool]:
        return lambda: self._done != done or self._thread is None

    def make_timeout_error(self) -> CheckpointError:
        """Return the error for a storage that doesn't answer, for the caller to raise."""
        return CheckpointError(
            f"A checkpoint must be written within {WRITE_TIMEOUT:g} s. Received: no answer from "
            f"{self.store.path}. The last published one stays valid. See whether that storage can be "
            f"reached, or save to another place."
        )

    def _wait_at_exit(self) -> None:
        if not self.wait():
            _LOG.error("%s", self.make_timeout_error())

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _work(self) -> None:
        while (encoded := self._take()) is not None:
            failure = self._write(encoded)
            with self._changed:
                self._failure = failure or self._failure
                self._free_buffers.append(encoded.buffer)
                self._done += 1
                self._changed.notify_all()

    def _take(self) -> EncodedCheckpoint | None:
        """Return what waits. If nothing does, the thread ends."""
        with self._changed:
            encoded, self._waiting = self._waiting, None
            if encoded is None:
                self._thread = None
                _running.remove(self)
                atexit.unregister(self._wait_at_exit)
                self._changed.notify_all()
            return encoded

    def _write(self, encoded: EncodedCheckpoint) -> CheckpointError | None:
        try:
            self.store.publish(encoded)
            self.written += 1
        except StorageFull as full:
            _LOG.warning("%s Training continues.", full)
        except CheckpointError as error:
            return error
        except Exception as error:  # the packages of file systems raise errors of their own
            return CheckpointError(f"A checkpoint can't be written: {error!r}")
        return None
