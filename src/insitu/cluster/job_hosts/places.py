"""What an agent and a *place* beside it, such as another pod with the same disk, say to each other by files.

Where tasks don't run beside their agent, somebody else makes a place on its node that has what they need and
the node's home. In it `keep_server` runs the job's server for whichever supervisor the agent names:

HOME/places/JOB.json   {"address": of the supervisor, "id": of this order}, by the agent;
                       {"code": of the job, null if it isn't known}, by the server once the job is over
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE, make_folder
from insitu.base.disk.durable import replace_file
from insitu.base.paths import Paths

_LOOK_SECONDS = 0.3
_AGAIN_SECONDS = 5.0
"""After how long a server is started again for a supervisor that it has lost, or couldn't reach."""
_KEEP_SECONDS = 30 * 86400.0
_TERMINATED = 128 + signal.SIGTERM


def _order_of(paths: Paths, job_id: str) -> Path:
    return paths.home / "places" / f"{job_id}.json"


def order_server(paths: Paths, job_id: str, address: str) -> None:
    """Have the place of a job run a server for the supervisor at an address. Raises OSError."""
    order = _order_of(paths, job_id)
    make_folder(paths.home, order.parent)
    text = json.dumps({"address": address, "id": secrets.token_hex(8)})
    replace_file(order, text.encode(), mode=PRIVATE_FILE)


def end_place(paths: Paths, job_id: str, code: object) -> None:
    """Have the place of a job end, if it has one, with the job's exit code."""
    order = _order_of(paths, job_id)
    if order.exists():
        text = json.dumps({"code": code if isinstance(code, int) else None})
        replace_file(order, text.encode(), mode=PRIVATE_FILE)


def drop_old_orders(paths: Paths) -> None:
    """Remove orders of jobs whose places were removed before they ended."""
    before = time.time() - _KEEP_SECONDS
    for order in (paths.home / "places").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):
            if order.stat().st_mtime < before:
                order.unlink()


def _read_order(order: Path) -> dict[str, Any]:
    try:
        found = json.loads(order.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_server(
    paths: Paths, job_id: str, start: Callable[[str], subprocess.Popen[bytes]], ending: threading.Event
) -> int:
    """Run the server of a job in this place until the job is over. Returns the job's exit code.

    `start` starts a server for the supervisor at an address. `ending`: the place has to go; the server ends
    with all of its tasks, and the job continues elsewhere, or in another place. Raises ClusterError, OSError.
    """
    order = _order_of(paths, job_id)
    done, again_at = "", 0.0
    while not ending.is_set():
        found = _read_order(order)
        if "code" in found:
            order.unlink(missing_ok=True)
            return found["code"] if isinstance(found["code"], int) else 1
        this = str(found.get("id", ""))
        if not this or (this == done and time.monotonic() < again_at):
            ending.wait(_LOOK_SECONDS)
            continue
        server = start(str(found["address"]))
        while server.poll() is None and not ending.wait(_LOOK_SECONDS):
            pass
        if server.poll() is None:
            server.terminate()
        server.wait()
        done, again_at = this, time.monotonic() + _AGAIN_SECONDS
    return _TERMINATED
