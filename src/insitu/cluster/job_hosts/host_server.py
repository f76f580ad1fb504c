"""Runs the tasks of one job on one host, for the job's supervisor on the head's machine.

`python -P -m insitu.cluster.job_hosts.host_server HOME NODE JOB ADDRESS HOST TIED_TO`, with the cluster's
token as its input, is started by the host's agent. It dials the supervisor at ADDRESS, gets the job's files,
and performs its calls. Tasks listen at HOST. It ends with the connection, with a process of TIED_TO, or when
the supervisor has said nothing for `LEASE_SECONDS`: then it is cut off, and others have taken over. Nothing
that it started outlives it.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from insitu.base.disk.access import make_sticky_folder
from insitu.base.errors import ClusterError, InsituError
from insitu.base.net.ports import format_address, hold_port
from insitu.base.paths import HOME_ENV, JobPaths, Paths
from insitu.base.process.process_log import start_logging
from insitu.base.process.processes import (
    ProcessIdentity,
    adopt_orphans,
    end_all_children,
)
from insitu.base.progress import Progress
from insitu.base.roster import CONNECTING, JOINING, RECOVERING, Roster
from insitu.base.spec import NO_CACHE, NodeId, TaskId, check_simple_name
from insitu.cluster.engines import (
    Channel,
    ChannelClosed,
    Command,
    EngineServer,
    LocalEngine,
    Message,
    Output,
    Wakeup,
    decode_command,
)
from insitu.cluster.job_backup import (
    FolderCopy,
    JobCopyFolder,
    JobFilesCopy,
    Mark,
    list_changes,
    read_parts,
    scan_folder,
)
from insitu.cluster.job_hosts.places import end_place
from insitu.cluster.job_hosts.port_probe import PortProbe
from insitu.cluster.job_hosts.tied import tie_to
from insitu.cluster.leases import accept_term, parse_term
from insitu.cluster.wire import (
    adapt_environment,
    dial,
    is_own_folder,
    open_holder,
    read_holder,
    take_process_lock,
)
from insitu.exchange import connect_within, parse_address
from insitu.grid import Catalog, is_in_etcd

logger = logging.getLogger("insitu")
LEASE_SECONDS = 60.0
"""Seconds without a word of the supervisor after which the tasks of this host are ended."""
BEAT_SECONDS = 1.0
REPORT_SECONDS = 0.25
FAST_REPORT_SECONDS = 0.02
"""Seconds between two looks at the tasks' progress, while one of them waits for others, and shortly after."""
_SHORTLY = 1.0
"""Seconds after such a wait in which the next step is expected, which ends a recovery."""
COPY_SECONDS = 0.5
_MAX_UNSENT_BYTES = 1 << 22
_CATALOG_SECONDS = 15.0
"""Seconds in which the copy of the catalogue comes that names the job's cache."""
_WAITING = (RECOVERING, CONNECTING, JOINING)


class HostServer(EngineServer):
    """Performs the supervisor's calls, and reports events here without being asked."""

    def __init__(
        self,
        paths: Paths,
        node: NodeId,
        host: str,
        job: JobPaths,
        engine: LocalEngine,
        channel: Channel,
        wakeup: Wakeup,
        witness: HostWitness,
    ) -> None:
        super().__init__(engine, channel, wakeup)
        self._witness = witness
        self._paths = paths
        self._node = node
        self._job = job
        #: True if the job's folder is the supervisor's own: nothing is copied then.
        self._shares_folder = is_whole_job(paths, job)
        self._host = host
        self._probe = PortProbe()
        self._heard = time.monotonic()
        self._tasks: dict[TaskId, Progress | None] = {}
        """The tasks launched here, with the last record that was reported."""
        self._files = JobFilesCopy(job)
        self._copy = FolderCopy(job.root)
        self._job_copy = JobCopyFolder(paths, job.root.name)
        self._copy_failed = False
        self._known: dict[str, Mark] = {} if self._shares_folder else scan_folder(job.root, {})
        self._sending: Iterator[Message] = iter(())
        self._unpublished: Roster | None = None
        self._beat_at = self._report_at = self._copy_at = self._fast_until = 0.0

    def serve(self) -> None:
        """Return once the supervisor has closed, or is lost. Nothing runs any more then."""
        try:
            while not self._is_closed:
                self._serve_once()
                if time.monotonic() - self._heard > LEASE_SECONDS:
                    logger.warning(
                        "%s: no supervisor for %g s, its tasks end", self._job.root.name, LEASE_SECONDS
                    )
                    return
            self._engine.close()
            self._send_rest()
        except ChannelClosed:
            pass
        finally:
            self._engine.close()
            self._job_copy.drop()

    def _serve_once(self) -> None:
        self._wakeup.watch(self._channel, writable=self._channel.unsent_bytes > 0)
        if self._channel.unsent_bytes < _MAX_UNSENT_BYTES:
            for event in self._engine.wait(self._compute_pause()):
                if isinstance(event, Output):
                    self._tell_output(event)
                else:
                    self._tell_end(event.task, event.code)
        else:
            _poll(self._channel, BEAT_SECONDS)
        if signal.SIGTERM in self._wakeup.take_signals():
            raise ChannelClosed
        self._take_messages()
        self._report_states()
        self._send_changes()

    def _take_messages(self) -> None:
        self._channel.flush()
        while messages := self._channel.receive():
            self._heard = time.monotonic()
            for message in messages:
                self._perform(message)

    def _compute_pause(self) -> float:
        now = time.monotonic()
        if any(record is not None and record.place in _WAITING for record in self._tasks.values()):
            self._fast_until = now + _SHORTLY
        interval = FAST_REPORT_SECONDS if now < self._fast_until else REPORT_SECONDS
        self._report_at = min(self._report_at, now + interval)
        return max(0.0, min(self._report_at, self._beat_at, self._copy_at) - now)

    # Events here

    def _tell_output(self, event: Output) -> None:
        data = base64.b64encode(event.data).decode()
        self._channel.send({"output": str(event.task), "data": data})

    def _tell_end(self, task: TaskId, code: int) -> None:
        self._report_states(now=True)
        failure = self._engine.read_failure(task) if code else None
        self._channel.send({
            "ended": str(task),
            "code": code,
            "failure": dataclasses.asdict(failure) if failure else None,
        })  # fmt: skip

    def _report_states(self, *, now: bool = False) -> None:
        """Send the records of tasks that have changed, and each second how processes and node are."""
        at = time.monotonic()
        report: Message = {}
        if now or at >= self._report_at:
            self._report_at = at + REPORT_SECONDS
            if self._unpublished is not None:
                self._publish(self._unpublished)
            self._tell_what_is_wanted()
            for node in self._witness.take_seen():
                self._channel.send({"seen": node})
            found = self._engine.read_progress(list(self._tasks))
            changed = {t: record for t, record in found.items() if record != self._tasks[t]}
            self._tasks |= changed
            # This host's clock says nothing to another one, but how old a record is does.
            report["progress"] = [
                [str(t), dataclasses.astuple(dataclasses.replace(r, at=at - r.at))]
                for t, r in changed.items()
            ]
        if at >= self._beat_at:
            self._beat_at = at + BEAT_SECONDS
            states = self._engine.process_states(list(self._tasks))
            report["processes"] = [[str(t), dataclasses.astuple(s)] for t, s in states.items()]
            report["node"] = dataclasses.astuple(self._engine.node_states([self._node])[self._node])
        if report.get("progress") or "node" in report:
            self._channel.send({"report": report})

    def _tell_what_is_wanted(self) -> None:
        """Notify the supervisor of which other caches tasks want to know their shards, and for which epochs
        they want rows to be read again."""
        for path in self._job.shard_maps.glob("*.wanted"):
            with contextlib.suppress(OSError):
                self._channel.send({"wanted": path.read_text()})
                path.unlink()
        for path in self._job.refreshes.glob("*.wanted"):
            with contextlib.suppress(OSError):
                self._channel.send({"wanted_refresh": int(path.read_text())})
                path.unlink()

    def _send_changes(self) -> None:
        """Send a part of what tasks have written, if there is room."""
        while not self._shares_folder and self._channel.unsent_bytes < _MAX_UNSENT_BYTES // 2:
            message = next(self._sending, None)
            if message is not None:
                self._channel.send(message)
            elif time.monotonic() < self._copy_at:
                return
            else:
                self._copy_at = time.monotonic() + COPY_SECONDS
                self._sending = self._list_changes()

    def _list_changes(self) -> Iterator[Message]:
        """Yield the messages that carry what has changed since the last look."""
        found = scan_folder(self._job.root, self._known)
        changed, removed = list_changes(found, self._known)
        self._known = found
        if removed:
            yield {"removed": removed}
        for path, start in changed:
            yield from read_parts(self._job.root, path, start)

    def _send_rest(self) -> None:
        """Send what has changed until the end, as long as the supervisor takes it."""
        if not self._shares_folder:
            for message in itertools.chain(self._sending, self._list_changes()):
                self._channel.send(message)
                self._wait_for_room(_MAX_UNSENT_BYTES // 2)
        self._wait_for_room(1)

    def _wait_for_room(self, limit: int) -> None:
        """Wait until less than `limit` bytes are unsent. Raises ChannelClosed if nobody takes them."""
        deadline = time.monotonic() + LEASE_SECONDS
        while (before := self._channel.unsent_bytes) >= limit:
            if time.monotonic() > deadline:
                raise ChannelClosed
            _poll(self._channel, BEAT_SECONDS)
            self._channel.receive()
            self._channel.flush()
            if self._channel.unsent_bytes != before:
                deadline = time.monotonic() + LEASE_SECONDS

    # Calls of the supervisor

    def _perform(self, message: Message) -> None:
        match message["do"]:
            case "beat":
                pass
            case "secret" | "signing_secret" | "shards" | "refused" | "refresh" | "code":
                self._files.take(message)
            case "file":
                path = self._copy.take(message)
                if path is not None:
                    self._record_copied(path)
            case "removed":
                for path in message["paths"]:
                    self._copy.remove(path)
                    self._known.pop(path, None)
            case "again":
                self._known.pop(str(message["path"]), None)
            case "copy":
                self._keep_copy(message)
            case "close":  # the job is over
                self._job_copy.remove()
                self._paths.job_term(self._job.root.name).unlink(missing_ok=True)
                if "code" in message:
                    end_place(self._paths, self._job.root.name, message["code"])
                super()._perform(message)
            case "begin":
                self._channel.send(self._begin(message))
            case "look":
                self._witness.look(str(message["node"]), str(message["address"]))
            case "listen" | "reach":
                self._channel.send(self._probe_ports(message))
            case "roster":
                self._publish(Roster.from_json(message["roster"]))
            case "launch":
                self._probe.close()
                self._launch_task(message)
            case "standby":
                self._engine.keep_standby(int(message["count"]), self._adapt(message))
            case _:
                super()._perform(message)

    def _keep_copy(self, message: Message) -> None:
        """Keep the files for another machine to resume. A host that can't, as with a full disk, says so."""
        if self._copy_failed:
            return
        try:
            self._job_copy.take(message)
        except (ClusterError, OSError, KeyError, TypeError, ValueError) as error:
            self._copy_failed = True
            self._job_copy.remove()
            self._channel.send({"copy_failed": f"{type(error).__name__}: {error}"})

    def _record_copied(self, path: str) -> None:
        """Remember that this file needn't be sent back."""
        with contextlib.suppress(OSError):
            found = (self._job.root / path).stat()
            self._known[path] = Mark(found.st_ino, found.st_size, found.st_mtime_ns)

    def _begin(self, message: Message) -> Message:
        """Answer once the catalogue of this home has the version of the cache that the job reads."""
        cache, version = str(message["cache"]), int(message["version"])
        deadline = time.monotonic() + _CATALOG_SECONDS
        while cache != NO_CACHE:
            try:
                Catalog(self._paths).get(cache, version)
                break
            except InsituError as error:
                if time.monotonic() > deadline:
                    return {"error": f"{self._node} has no copy of the catalogue with {cache}: {error}"}
            time.sleep(0.1)
        return {}

    def _probe_ports(self, message: Message) -> Message:
        """Listen as a task would, or say whose addresses can't be reached from here."""
        try:
            if message["do"] == "listen":
                return {"address": self._probe.listen(self._host)}
            return {"unreachable": self._probe.find_unreachable(message["addresses"])}
        except (ClusterError, OSError) as error:
            return {"error": str(error)}

    def _publish(self, roster: Roster) -> None:
        """Write the roster for the tasks here; if that fails, try again with the next report."""
        try:
            self._engine.publish_roster(roster)
            self._unpublished = None
        except ClusterError as error:
            if self._unpublished is None:
                logger.warning("%s: the roster can't be written yet: %s", self._job.root.name, error)
            self._unpublished = roster

    def _launch_task(self, message: Message) -> None:
        task = TaskId.parse(message["task"])
        try:
            self._engine.clear_records([task])
        except ClusterError as error:
            self._channel.send({"error": str(error)})
            return
        self._tasks[task] = None
        command = self._adapt(message)
        adapted = {"arguments": list(command.arguments), "environment": command.environment}
        super()._perform({**message, **adapted})

    def _adapt(self, message: Message) -> Command:
        """Return the command of a task as one of this host: with its Python, home, paths."""
        command = decode_command(message)
        environment = adapt_environment(command.environment, os.environ)
        environment[HOME_ENV] = str(self._paths.home)
        return Command((sys.executable, *command.arguments[1:]), environment)


def _poll(channel: Channel, seconds: float) -> None:
    poll = select.poll()
    poll.register(channel, select.POLLIN | (select.POLLOUT if channel.unsent_bytes else 0))
    poll.poll(seconds * 1000)


def take_engine_lock(paths: Paths, node: NodeId, job: JobPaths) -> int:
    """Make the job's folder of this host, and hold it. A server before this one, which the supervisor has
    given up, is killed, and what it has left is removed. Returns the lock. Raises ClusterError."""
    make_sticky_folder(paths.home, paths.jobs)
    shares_folder = is_whole_job(paths, job)
    job.root.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(job.root):
        raise ClusterError(
            f"What is in a job's folder is run, so only its user may write there. Received: {job.root}, "
            f"which somebody else has made, or may write to. Have it removed, and start the job again"
        )
    path = job.engine_lock(node)
    lock = take_process_lock(path)
    if lock is None:
        end_server(path)
        lock = take_process_lock(path)
    if lock is None:
        raise ClusterError(
            f"One process runs the tasks of a job on a host. Received: another one holds {path}"
        )
    if not shares_folder:
        for entry in job.root.iterdir():
            if entry != path:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return lock


def is_whole_job(paths: Paths, job: JobPaths) -> bool:
    """Return whether a job's folder is the supervisor's own: no copy, and nothing to be removed. A home that
    had a head has such folders, too, after `insitu down --force`; one that etcd has made a head's has
    those of hosts."""
    return job.spec.exists() or (paths.head.exists() and not is_in_etcd(paths))


def end_server(lock: Path) -> bool:
    """Kill the process of this host that holds the lock, with its tasks. Returns whether there was one.

    Raises InputError for one of another user.
    """
    holder = read_holder(lock)
    process = open_holder(holder) if holder is not None and holder.is_here else None
    if process is None:
        return False
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(LEASE_SECONDS * 1000)
    finally:
        os.close(process)
    return True


def remove_copy(paths: Paths, node: NodeId, job: JobPaths) -> None:
    """Remove what this host has of a job, unless the folder is the supervisor's own."""
    if is_whole_job(paths, job):
        job.engine_lock(node).unlink(missing_ok=True)
        return
    shutil.rmtree(job.memory, ignore_errors=True)
    shutil.rmtree(job.root, ignore_errors=True)


def run(paths: Paths, node: NodeId, job_id: str, address: str, host: str, token: str) -> None:
    """Serve until the job's supervisor ends it, or is lost. Raises InsituError."""
    job = paths.job(job_id)
    wakeup = Wakeup(signal.SIGCHLD, signal.SIGTERM)
    witness = HostWitness(host)
    info: dict[str, Any] = {
        "role": "engine",
        "node": node,
        "job": job_id,
        "shares_folder": is_whole_job(paths, job),
        "door": witness.address,
    }
    connection = dial(address, token, info, "supervisor")
    try:
        # Before the server of another supervisor is ended here, which may be the one to follow.
        make_sticky_folder(paths.home, paths.job_copies)
        accept_term(paths.job_term(job_id), parse_term(connection.head.get("term")), job_id)
        lock = take_engine_lock(paths, node, job)
        try:
            for folder in (job.code, job.checkpoints, job.ledger):
                folder.mkdir(exist_ok=True)
            engine = LocalEngine(job, wakeup.fileno(), reap_orphans=True, host=host)
            HostServer(paths, node, host, job, engine, connection.channel, wakeup, witness).serve()
        finally:
            end_all_children()
            remove_copy(paths, node, job)
            os.close(lock)
    finally:
        witness.close()
        # The other end learns by this that nothing is left.
        connection.channel.shut_down()
        connection.channel.close()


# Says whether another host of a job can be reached from here, and lets those reach this one


LOOK_SECONDS = 2.0
"""Seconds in which the system of another host answers. Longer ones come too late to matter."""
_BACKLOG = 16


class HostWitness:
    """Owned by the server of one host. The *door* is a port at which nothing is read: that its system answers
    is all that others want to know. Raises ClusterError if there is no port for it."""

    def __init__(self, host: str) -> None:
        self._door = hold_port(host)
        self._door.setblocking(False)
        self._door.listen(_BACKLOG)
        #: The address at which others try to reach this host.
        self.address = format_address(host, self._door.getsockname()[1])
        self._under_way: set[str] = set()
        self._reached: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def look(self, node: str, address: str) -> None:
        """Try to reach the door of `node`; `take_seen` says how that went. One that is tried already isn't
        tried twice."""
        if node not in self._under_way:
            self._under_way.add(node)
            threading.Thread(target=self._try, args=(node, address), daemon=True).start()

    def _try(self, node: str, address: str) -> None:
        try:
            with contextlib.closing(connect_within(*parse_address(address), LOOK_SECONDS)):
                self._reached.put((node, True))
        except ConnectionRefusedError:
            self._reached.put((node, True))  # its system lives, and says so
        except Exception:
            self._reached.put((node, False))

    def take_seen(self) -> list[str]:
        """Return the nodes that have been reached since the last call. Callers at the door are let go."""
        with contextlib.suppress(OSError):
            while True:
                self._door.accept()[0].close()
        seen = []
        with contextlib.suppress(queue.Empty):
            while True:
                node, is_there = self._reached.get_nowait()
                self._under_way.discard(node)
                if is_there:
                    seen.append(node)
        return seen

    def close(self) -> None:
        """Close the door."""
        self._door.close()


def main(arguments: list[str]) -> int:
    home, node, job_id, address, host, tied_to = arguments
    start_logging()
    token = sys.stdin.read().strip()
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        check_simple_name("A node's name", node)
        tie_to(ProcessIdentity(*each) for each in json.loads(tied_to))
        run(Paths(Path(home)), NodeId(node), job_id, address, host, token)
    except (InsituError, OSError) as error:
        logger.error("%s: %s", job_id, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
