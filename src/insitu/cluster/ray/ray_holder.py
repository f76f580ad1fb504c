"""The holder: an actor of Ray that starts the agent of its node, and starts it again where it fails.

Ray pins it to the node and restarts it. It runs no code of the agent: that is a process of its own, which
ends together with the holder and with the node's raylet. So a node of Ray never has two agents, and
`ray stop` leaves none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from insitu.base.disk.access import make_folder
from insitu.base.errors import InsituError
from insitu.base.paths import HOME_ENV, Paths
from insitu.base.process.processes import ProcessIdentity, has_ended, identify_process
from insitu.cluster.decide import holders
from insitu.cluster.job_hosts import POLL_SECONDS, choose_node
from insitu.cluster.wire import AgentOptions, open_input, open_log

logger = logging.getLogger("insitu")
RAYLET_ENV = "RAY_RAYLET_PID"
"""Where Ray gives an actor the process that watches its node."""
SET_BY_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""What Ray sets in the environment of an actor, for that actor alone."""
AGENT = "insitu.cluster.nodes.agent_process"
_STEADY_SECONDS = 60.0
"""An agent that has lived so long isn't one that can't be started."""
_MAX_ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class HolderSettings:
    """What a holder is given. It goes to Ray as an argument of the actor, below what Ray takes well."""

    #: Tells these settings from others.
    serial: str
    #: The head's address, as host:port.
    head: str
    #: The version of insitu that has made them.
    version: str
    #: The cluster's token.
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class HolderAnswer:
    """What a holder says about its agent."""

    #: `HolderSettings.serial` of what it was given.
    settings: str
    #: How the agent is.
    state: holders.HolderState
    #: What the agent has joined: node, address and host; None before that.
    joined: dict[str, Any] | None = None
    #: Why the last start failed; empty where none did.
    problem: str = ""


def read_environment(raylet: ProcessIdentity | None) -> dict[str, str]:
    """Return the environment in which Ray was started on this node.

    That of an actor is different: it hides GPUs, and gives libraries one thread. Tasks must not get that.
    """
    if raylet is not None:
        with contextlib.suppress(OSError):
            pairs = Path(f"/proc/{raylet.pid}/environ").read_bytes().split(b"\0")
            return dict(os.fsdecode(pair).split("=", 1) for pair in pairs if b"=" in pair)
    return {
        name: value
        for name, value in os.environ.items()
        if name not in SET_BY_RAY and not name.startswith("RAY_")
    }


class AgentHolder:
    """Keeps one agent running. Ray calls all methods in the main thread.

    The system ends the agent with the thread that has started it, so no other one may.
    """

    def __init__(self, settings: HolderSettings) -> None:
        self._settings = settings
        self._raylet = identify_process(int(os.environ.get(RAYLET_ENV) or 0))
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = -1
        self._text = b""
        self._started_at = 0.0
        self._failure: holders.Failure | None = None
        self._state: holders.HolderState = "starting"
        self._joined: dict[str, Any] | None = None
        self._problem = ""
        if self._raylet is not None:
            threading.Thread(target=_end_with, args=(self._raylet,), daemon=True).start()
        self._start()

    def status(self) -> HolderAnswer:
        """Start the agent again where it has failed and it is time. Return how it is."""
        self._read_ready()
        if self._process is not None and self._process.poll() is not None:
            self._record_end(self._process.returncode)
        if self._process is None and self._failure is not None and time.monotonic() >= self._failure.retry_at:
            self._start()
        return HolderAnswer(self._settings.serial, self._state, self._joined, self._problem)

    def start_again(self) -> None:
        """Start an agent that was asked to end, or whose next start waits."""
        if self._process is None:
            self._start()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._failure = None if self._state == "ended" else self._failure
        self._state, self._joined, self._problem, self._text = "starting", None, "", b""
        try:
            self._spawn()
        except InsituError as error:
            self._note_failure(str(error))
        except OSError as error:
            self._note_failure(f"a process can't be started: {error}")

    def _spawn(self) -> None:
        environment = read_environment(self._raylet)
        home = Path(environment.get(HOME_ENV) or "~/.insitu").expanduser().absolute()
        paths = Paths(home)
        node = choose_node(paths, "")
        own = identify_process(os.getpid())
        tied = tuple((each.pid, each.start) for each in (own, self._raylet) if each is not None)
        options = AgentOptions(self._settings.head, tied_to=tied)
        make_folder(home, home)
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with (
                open_log(paths.agent_log(node)) as log,
                open_input(f"{self._settings.token}\n") as source,
            ):
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", AGENT),
                        *(str(home), json.dumps(asdict(options)), str(writer)),
                    ],
                    stdin=source,
                    stdout=log,
                    stderr=log,
                    cwd=home,
                    env=environment,
                    pass_fds=(writer,),
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        os.set_blocking(reader, False)
        self._ready = reader
        self._spare(self._process.pid)

    def _spare(self, agent: int) -> None:
        """Let the system end other processes first where memory runs out: Ray offers its actors for that."""
        if self._raylet is not None:
            with contextlib.suppress(OSError):
                score = Path(f"/proc/{self._raylet.pid}/oom_score_adj").read_text()
                Path(f"/proc/{agent}/oom_score_adj").write_text(score)

    def _read_ready(self) -> None:
        """Read what the agent says once it has joined, or why it can't."""
        if self._ready < 0:
            return
        try:
            part = os.read(self._ready, _MAX_ANSWER_BYTES)
        except BlockingIOError:
            return
        self._text += part
        if part and not self._text.endswith(b"\n"):
            return
        os.close(self._ready)
        self._ready = -1
        try:
            said = json.loads(self._text)
        except ValueError:
            said = {}
        if "error" in said:
            self._problem = str(said["error"])
        elif said:
            self._state, self._joined, self._problem = "joined", said, ""

    def _record_end(self, code: int) -> None:
        self._read_ready()
        if self._ready >= 0:
            os.close(self._ready)
            self._ready = -1
        self._process = None
        if code == 0 and self._joined is not None:
            self._state, self._failure, self._problem = "ended", None, ""
            return
        if time.monotonic() - self._started_at > _STEADY_SECONDS:
            self._failure = None
        how = f"the agent was ended by signal {-code}" if code < 0 else f"the agent ended with code {code}"
        self._note_failure(self._problem if self._joined is None and self._problem else how)

    def _note_failure(self, problem: str) -> None:
        self._state, self._joined, self._problem = "failed", None, problem
        self._failure = holders.record_failure(self._failure, time.monotonic())
        logger.warning("the agent isn't there: %s", problem)


def _end_with(raylet: ProcessIdentity) -> None:
    """End this process with the node's raylet. Ray itself doesn't notice one that nobody has reaped."""
    while not has_ended(raylet):
        time.sleep(POLL_SECONDS)
    os._exit(1)
