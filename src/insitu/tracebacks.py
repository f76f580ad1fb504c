"""Shortens tracebacks that end a script, so that they show the user's lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from insitu.errors import InsituError

FULL_ENV = "INSITU_FULL_TRACEBACKS"
"""The environment variable that leaves tracebacks as they are."""
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def shorten_traceback(error: BaseException) -> None:
    """Take insitu's own frames out of the tracebacks of `error` and of what it was raised from.

    Of a refusal, an InsituError, all of them: its message says what is wrong, and the last line that is shown
    is the one to change. Of any other error those before a line of the user's, as where `strategy.run` runs a
    step: an error in insitu itself keeps what shows where.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _shorten(link.__traceback__, whole=isinstance(link, InsituError))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _shorten(traceback: TracebackType | None, *, whole: bool) -> TracebackType | None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    own = [frame.tb_frame.f_code.co_filename.startswith(_OWN) for frame in frames]
    if all(own):
        return frames[0] if frames else None
    last = len(own) - 1 - own[::-1].index(False)
    shown = [frame for index, frame in enumerate(frames) if not own[index] or (index > last and not whole)]
    result = None
    for frame in reversed(shown):
        result = TracebackType(result, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return result


def shorten_printed_tracebacks() -> None:
    """Have Python print shortened tracebacks at the end of a script. Done once."""
    report: Callable[..., Any] = sys.excepthook
    if getattr(report, "shortens", False) or os.environ.get(FULL_ENV):
        return

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shorten_traceback(error)
        report(kind, error, error.__traceback__)

    excepthook.shortens = True  # type: ignore[attr-defined]
    sys.excepthook = excepthook
