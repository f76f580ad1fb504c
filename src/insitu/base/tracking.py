"""Where a job's metrics go: an experiment tracker, named by a URI such as `mlflow:http://host:5000#census`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.base.errors import InputError

TRACK_ENV = "INSITU_TRACK"
"""The URI of `insitu start --track`, in the environment of tasks."""
RUN_FILE, OUTBOX_FILE, SENT_FILE, STATUS_FILE = "run.json", "outbox.jsonl", "sent", "status.json"
"""Files of a run's folder: what it is; its records; how many bytes of them are sent; its link or problem."""

_FORM = re.compile(r"(?P<tracker>[A-Za-z][A-Za-z0-9_.-]*)(:(?P<address>[^#]*))?(#(?P<experiment>.*))?")
_LOGIN = re.compile(r"//[^/@\s]+@")
_SECRET_WORDS = "token|secret|passw|key|credential"
_SECRET_FIELD = re.compile(rf"([?&;][^=&\s]*(?:{_SECRET_WORDS})[^=&\s]*=)[^&\s#]+", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(rf"{_SECRET_WORDS}|pwd|pass$", re.IGNORECASE)
_LEAST_SECRET = 6
"""Characters of a variable's value that is taken out of messages: shorter ones are in many words."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """A tracker, as a URI names it."""

    #: The name of the tracker: a plug-in of `insitu.trackers`.
    tracker: str
    #: Its address, as the tracker's own library takes it; empty: that of its own settings.
    address: str = ""
    #: The experiment or project; empty: named by the job.
    experiment: str = ""


def parse_tracking(uri: str) -> Tracking:
    """Return what `TRACKER[:ADDRESS][#EXPERIMENT]` says. Raises InputError, without the URI if that has a
    secret."""
    found = _FORM.fullmatch(uri.strip())
    if _LOGIN.search(uri) or _SECRET_FIELD.search(uri):
        raise InputError(
            "The URI of a tracker is written to the job's folder, so it has no password and no token. "
            "Received: one with such (not shown). Leave it out, and set it in a variable of the environment "
            "that the tracker's library reads, such as MLFLOW_TRACKING_TOKEN or WANDB_API_KEY"
        )
    if found is None:
        raise InputError(
            "A tracker is named by TRACKER[:ADDRESS][#EXPERIMENT], such as mlflow:http://host:5000#census. "
            f"Received: {uri!r}"
        )
    return Tracking(found["tracker"], found["address"] or "", found["experiment"] or "")


def check_tracking(uri: str) -> str:
    """Return the URI of a tracker as it is. Raises InputError."""
    parse_tracking(uri)
    return uri.strip()


def hide_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return a message without logins, tokens in URLs, and values of variables named like secrets."""
    text = _SECRET_FIELD.sub(r"\1***", _LOGIN.sub("//***@", text))
    for name, value in environ.items():
        if _SECRET_VARIABLE.search(name) and len(value) >= _LEAST_SECRET and not os.path.exists(value):
            text = text.replace(value, "***")
    return text


def read_sent(folder: Path) -> int:
    """Return how many bytes of a run's records the tracker has."""
    try:
        return int((folder / SENT_FILE).read_text())
    except (OSError, ValueError):
        return 0


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a job in the form of docs/reference/json.md. `folder`: that of the job's runs."""
    found = []
    for each in sorted(folder.glob(f"*/{RUN_FILE}")):
        try:
            run = json.loads(each.read_text())
            status = json.loads((each.parent / STATUS_FILE).read_text())
        except FileNotFoundError:
            status = {}
        except (OSError, ValueError):
            continue
        try:
            with (each.parent / OUTBOX_FILE).open("rb") as file:
                file.seek(read_sent(each.parent))
                waiting = sum(1 for _ in file)
        except OSError:
            waiting = 0
        found.append(
            {
                "tracker": run["tracker"],
                "experiment": run["experiment"],
                "run": run["name"],
                "link": status.get("link") or None,
                "waiting": waiting,
                "problem": status.get("problem") or None,
            }
        )
    return found
