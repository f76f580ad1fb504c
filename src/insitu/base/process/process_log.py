"""The log of a process of a cluster: lines of text, or of JSON if INSITU_LOG_FORMAT asks for that."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime

from insitu.base.errors import InputError

LOG_FORMAT = "INSITU_LOG_FORMAT"
FORMATS = ("text", "json")


def start_logging() -> None:
    """Have this process log to its standard error. Raises InputError."""
    chosen = os.environ.get(LOG_FORMAT) or FORMATS[0]
    if chosen not in FORMATS:
        raise InputError(f"{LOG_FORMAT} is {' or '.join(FORMATS)}. Received: {chosen!r}. Set one of them")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if chosen == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON of a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return an object with `time` (ISO 8601, UTC), `level`, `logger`, `message`, and, if there is one,
        `exception`."""
        found = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found)
