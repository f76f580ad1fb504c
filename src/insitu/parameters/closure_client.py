"""A worker's access to the queue of closures, which the first server holds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from insitu.errors import InputError
from insitu.parameters.client import Client
from insitu.parameters.closure_queue import JoinRecord
from insitu.parameters.rules import Message


class ClosureClient:
    """Takes closures, and tells what came of them. See `closure_queue`."""

    def __init__(self, client: Client, worker: int, incarnation: int) -> None:
        self._client = client
        self._who = {"worker": worker, "incarnation": incarnation}

    def take(self, limit: int) -> int | None:
        """Return the number of a closure below `limit` to run; -1 while others run the last ones; None once
        all have ended."""
        answer = self._request("take", limit=limit)
        return None if answer.meta["complete"] else int(answer.meta["number"])

    def finish(self, number: int, result: bytes, delta: NDArray[np.float64], *, failed: bool = False) -> None:
        """Tell what a closure returned, or how it failed, and what it has added to summed variables."""
        arrays = (np.frombuffer(result, np.uint8), delta)
        self._request("finish", *arrays, number=number, failed=failed)

    def result(self, number: int) -> tuple[bytes, bool] | None:
        """Return what a closure returned, and whether it failed; None while it hasn't ended.

        Raises InputError for a result that isn't kept any more.
        """
        answer = self._request("result", number=number)
        if not answer.meta["ended"]:
            return None
        if not answer.arrays:
            raise InputError(
                "Results are kept up to 256 MiB, the newest first. Received: a fetch of the result of "
                f"function {number}, which was dropped. Fetch sooner, or return less."
            )
        return answer.arrays[0].tobytes(), bool(answer.meta["failed"])

    def join(self, number: int, limit: int, digest: str) -> JoinRecord:
        """Return what all workers find at join `number`. Call it once all closures below `limit` have
        ended. Raises InputError where other workers have scheduled others."""
        answer = self._request("join", number=number, limit=limit, digest=digest)
        return JoinRecord(limit, digest, answer.arrays[0], int(answer.meta["failed"]))

    def _request(self, operation: str, *arrays: NDArray[Any], **fields: Any) -> Message:
        meta = {"do": operation, **self._who, **fields}
        message: Message = self._client.request(self._client.connections[0], "closure", meta, arrays).result()
        return message
