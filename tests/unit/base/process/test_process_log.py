"""The log of a process, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime

import pytest

from insitu.base.errors import InputError
from insitu.base.process.process_log import LOG_FORMAT, start_logging

PROGRAM = """
import logging
from insitu.base.process.process_log import start_logging
start_logging()
logging.getLogger("insitu").info("joins %s\\n\\"head\\"", 1)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("insitu").exception("it fails")
"""


def run(chosen: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, LOG_FORMAT: chosen},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


def test_each_line_is_an_object_of_json_if_asked_for() -> None:
    first, second = (json.loads(line) for line in run("json"))
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {"level": "INFO", "logger": "insitu", "message": 'joins 1\n"head"'}
    assert second["level"] == "ERROR" and "ZeroDivisionError" in second["exception"]


def test_text_is_what_there_is_else() -> None:
    assert " INFO joins 1" in run("")[0] and run("text")[1] == '"head"'


def test_other_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_FORMAT, "xml")
    with pytest.raises(InputError, match=r"text or json\. Received: 'xml'"):
        start_logging()
