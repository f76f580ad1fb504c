"""Records the exception that ended a task, for the controller to decide by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from insitu.base.context import context
from insitu.base.disk.durable import replace_file
from insitu.base.errors import DefinitionMismatch, InputError, InsituError, PeerLost
from insitu.cluster.decide import Failure

MAX_MESSAGE_LENGTH = 2000
USAGE_ERROR = 2
"""The exit code of programs, such as those that use argparse, for arguments that they don't know."""
_MISTAKES = (
    InputError,
    DefinitionMismatch,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors that a script raises again if nothing else has changed. OSError and RuntimeError aren't among them,
since they may come by chance."""


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


def _is_mistake(error: BaseException) -> bool:
    """Return whether `error`, and all that it came from, are kinds of mistakes of Python or insitu."""
    if isinstance(error, SystemExit):
        return error.code == USAGE_ERROR
    kinds = {type(link) for link in _follow_causes(error)}
    return all(
        issubclass(kind, _MISTAKES) and kind.__module__.partition(".")[0] in ("builtins", "insitu")
        for kind in kinds
    )


def describe_failure(error: BaseException) -> Failure:
    final = any(isinstance(link, InsituError) and link.is_final for link in _follow_causes(error))
    return Failure(
        type=type(error).__name__,
        # The exit code is known anyway.
        message="" if _is_bare_exit(error) else make_writable(str(error)[:MAX_MESSAGE_LENGTH]),
        fingerprint=compute_fingerprint(error),
        peer_lost=not final and any(isinstance(link, PeerLost) for link in _follow_causes(error)),
        final=final,
        mistake=_is_mistake(error),
    )


def write_failure(error: BaseException) -> None:
    """Publish the record of `error`. Outside a job, or on a full disk, the traceback must do."""
    me = context()
    if me.job is None:
        return
    path = me.job.failure(me.task)
    failure = describe_failure(error)
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(asdict(failure)).encode())


def read_failure(path: Path) -> Failure | None:
    """Return the record at `path`, or None if there is none that can be read."""
    try:
        return Failure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
