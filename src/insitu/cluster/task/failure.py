"""Records the exception that ended a task, for the controller to decide by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path

from insitu.cluster.decide import Failure
from insitu.context import context
from insitu.durable import replace_file

MAX_MESSAGE_LENGTH = 2000


def _follow_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, then what it was raised from or during, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_bare_exit(error: BaseException) -> bool:
    """Return whether the script ended itself with a number, as by `sys.exit(3)`."""
    return isinstance(error, SystemExit) and isinstance(error.code, int)


def compute_fingerprint(error: BaseException) -> str:
    """Return a digest of the types of the chain and of each frame's file, line and function.

    It is equal for equal tracebacks.

    Messages are left out, since they may hold addresses and numbers that differ from run to run. A code that
    the script has chosen to exit with is none of these.
    """
    digest = hashlib.sha256()
    if _is_bare_exit(error):
        digest.update(f"exit {error}\n".encode())
    for link in _follow_causes(error):
        digest.update(f"{type(link).__module__}.{type(link).__qualname__}\n".encode())
        for frame in traceback.extract_tb(link.__traceback__):
            digest.update(f"{frame.filename}:{frame.lineno}:{frame.name}\n".encode())
    return digest.hexdigest()[:16]


def make_writable(text: str) -> str:
    """Return a text that UTF-8 can hold: names of files in other bytes come as halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def describe_failure(error: BaseException) -> Failure:
    from insitu.errors import InsituError, PeerLost

    final = any(isinstance(link, InsituError) and link.is_final for link in _follow_causes(error))
    return Failure(
        type=type(error).__name__,
        # The exit code is known anyway.
        message="" if _is_bare_exit(error) else make_writable(str(error)[:MAX_MESSAGE_LENGTH]),
        fingerprint=compute_fingerprint(error),
        peer_lost=not final and any(isinstance(link, PeerLost) for link in _follow_causes(error)),
        final=final,
    )


def write_failure(error: BaseException) -> None:
    """Publish the record of `error`. Outside a job, or on a full disk, the traceback must do."""
    me = context()
    if me.job is None:
        return
    path = me.job.failure(me.task)
    failure = describe_failure(error)
    record = {
        name: getattr(failure, name) for name in ("type", "message", "fingerprint", "peer_lost", "final")
    }
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(record).encode())


def read_failure(path: Path) -> Failure | None:
    """Return the record at `path`, or None where there is none that can be read."""
    try:
        return Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
