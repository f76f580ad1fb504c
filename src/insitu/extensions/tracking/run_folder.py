"""The folder of a run: its records, and the process that sends them."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from insitu.base.disk.durable import replace_file
from insitu.base.process.script_end import call_at_script_end, runs_script
from insitu.base.tracking import OUTBOX_FILE, RUN_FILE, Tracking, hide_secrets, read_sent
from insitu.extensions.tracking.trackers import RunSpec, Status

END = b"e"
"""What the sender reads once a script has ended well. Without it the end of its input means a kill."""
_MODULE = "insitu.extensions.tracking.sender"
_IDLE_SECONDS = 15.0
"""How long a script that has ended waits for a sender that sends nothing."""
_POLL_SECONDS = 0.05


def choose_folder(runs: Path, tracking: Tracking) -> Path:
    """Return the folder of a run in that of a job's runs: one for each tracker and experiment."""
    digest = hashlib.sha256(json.dumps(asdict(tracking), sort_keys=True).encode()).hexdigest()[:8]
    return runs / f"{tracking.tracker}-{digest}"


class RunFolder:
    """Appends the records of a run, each step of a metric once, and has them sent.

    No method raises: a training goes its way if the disk is full or a tracker is unreachable.
    """

    def __init__(self, folder: Path, tracking: Tracking, spec: RunSpec) -> None:
        self._folder = folder
        self._sender: subprocess.Popen[bytes] | None = None
        self._broken = False
        #: The largest step of each metric that is in the outbox. Written by `log_metrics`.
        self.last_steps: dict[str, int] = {}
        #: Whether parameters are in the outbox.
        self.has_parameters = False
        #: When the job's first process began this run, in seconds since 1970.
        self.began = time.time()
        with self._harmless():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            run = {"tracker": tracking.tracker, **asdict(spec), "began": self.began}
            if (folder / RUN_FILE).exists():
                self.began = float(json.loads((folder / RUN_FILE).read_text())["began"])
            else:
                replace_file(folder / RUN_FILE, json.dumps(run).encode())
            self._read_outbox()
            self._start_sender()
            (call_at_script_end if runs_script() else atexit.register)(self.finish)
        #: Called by `finish` for the files that are logged at the end.
        self.list_files: Any = list

    def _read_outbox(self) -> None:
        """Learn what earlier processes of the job have logged. A line that was cut short is dropped."""
        path = self._folder / OUTBOX_FILE
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        for line in data[:whole].splitlines():
            record = json.loads(line)
            self.has_parameters |= record["kind"] == "parameters"
            for name in record["values"] if record["kind"] == "metrics" else ():
                self.last_steps[name] = max(record["step"], self.last_steps.get(name, -1))

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        if not self.has_parameters:
            self.has_parameters = True
            self._append({"kind": "parameters", "values": dict(values)})

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics that aren't logged yet for this step or a later one."""
        left = {name: value for name, value in values.items() if self.last_steps.get(name, -1) < step}
        if left:
            self.last_steps |= dict.fromkeys(left, step)
            self._append({"kind": "metrics", "step": step, "at": time.time(), "values": left})

    def finish(self, status: Status = "finished") -> None:
        """Log files and the end, and wait as long as the sender sends."""
        with self._harmless():
            for path in self.list_files():
                self._append({"kind": "file", "path": str(path)})
            self._append({"kind": "end", "status": status})
        sender = self._sender
        if sender is None:
            return
        with self._harmless():
            _end_input(sender)
            if not _wait_while_sending(sender, self._folder):
                sender.kill()
                sender.wait()
                self._say(
                    "the tracker doesn't take all records. They stay in the job's folder: `insitu track JOB` "
                    "sends them later"
                )

    def _append(self, record: Mapping[str, Any]) -> None:
        if self._broken:
            return
        with self._harmless():
            with (self._folder / OUTBOX_FILE).open("ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
            if self._sender is not None and self._sender.stdin is not None:
                try:
                    os.write(self._sender.stdin.fileno(), b".")
                except OSError:  # it has died, or its pipe is full: it looks by itself every second
                    if self._sender.poll() is not None:
                        self._start_sender()

    def _start_sender(self) -> None:
        self._sender = start_sender(self._folder)
        if self._sender.stdin is not None:
            os.set_blocking(self._sender.stdin.fileno(), False)

    @contextlib.contextmanager
    def _harmless(self) -> Any:
        """Say once why nothing more is logged, rather than end the training."""
        try:
            yield
        except Exception as error:
            if not self._broken:
                self._broken = True
                self._say(f"nothing more is tracked: {type(error).__name__}: {error}")

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"insitu: {hide_secrets(text, os.environ)}\n")


def start_sender(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start the process that sends what is in a run's folder."""
    # A sender is no task: what it opens isn't the script's.
    kept = ("INSITU_HOME",)
    environment = {n: v for n, v in os.environ.items() if not n.startswith("INSITU_") or n in kept}
    command = [sys.executable, "-m", _MODULE, str(folder), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)


def _end_input(sender: subprocess.Popen[bytes]) -> None:
    if sender.stdin is not None:
        with contextlib.suppress(OSError):
            os.set_blocking(sender.stdin.fileno(), True)
            os.write(sender.stdin.fileno(), END)
        with contextlib.suppress(OSError):
            sender.stdin.close()


def _wait_while_sending(sender: subprocess.Popen[bytes], folder: Path) -> bool:
    """Wait until the sender ends, as long as it sends. Return whether it has sent all."""
    sent, since = read_sent(folder), time.monotonic()
    while sender.poll() is None:
        now = read_sent(folder)
        if now != sent:
            sent, since = now, time.monotonic()
        if time.monotonic() - since > _IDLE_SECONDS:
            return False
        time.sleep(_POLL_SECONDS)
    return sender.returncode == 0


def send_waiting(folder: Path, status: Status | None) -> bool:
    """Send what waits in the folder of a run, and its end if the job has ended as `status` says.

    Return whether all is sent now.
    """
    outbox = folder / OUTBOX_FILE
    lines = outbox.read_bytes().splitlines() if outbox.exists() else []
    if status is not None and not any(json.loads(line)["kind"] == "end" for line in lines[-1:]):
        with outbox.open("ab") as file:
            file.write(json.dumps({"kind": "end", "status": status}).encode() + b"\n")
    sender = start_sender(folder, "--once")
    _end_input(sender)
    return sender.wait() == 0
