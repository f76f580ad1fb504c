"""Imports onto hosts made of namespaces, whose links are shaped to 10 Gbit/s: MB/s of the sources.

*import* streams rows from here to the hosts, encrypted; at its end they are in partitions, whose checksums
were compared, and on the disks. *nodes* has the hosts read the same files themselves, which all of them see.
*socket* sends the bytes of the files through one plain connection to the first host, which writes and syncs
them: nothing is checked or encrypted. *rsync* does so with its own checksums, where it is installed. All
hosts share the processors and the disk of this machine, which may be slower than the links. Processor
seconds are those of the whole machine meanwhile, with the system's own; nothing else should run.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import common
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "support"))

from agent_hosts import INSITU, insitu  # noqa: E402
from hosts_lab import Host, HostsLab, find_obstacle  # noqa: E402

RATE = "10gbit"
FILES = 3
_RECEIVER = """
import os, socket, sys
with socket.create_server((sys.argv[1], 0)) as server, open(sys.argv[2], "wb") as file:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    buffer = memoryview(bytearray(1 << 20))
    while size := connection.recv_into(buffer):
        file.write(buffer[:size])
    file.flush()
    os.fsync(file.fileno())
    connection.sendall(b"!")
"""
_DAEMON = "use chroot = no\nuid = 0\ngid = 0\n[d]\npath = {folder}\nread only = no\n"


def shape(lab: HostsLab) -> None:
    """Limit what each host receives and sends."""
    limit = ("root", "tbf", "rate", RATE, "burst", "4mb", "latency", "20ms")
    for host in lab.hosts:
        subprocess.run(["tc", "qdisc", "add", "dev", host.link, *limit], check=True)
        inside = ["ip", "netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", "eth0", *limit]
        subprocess.run(inside, check=True)


@contextmanager
def running(lab: HostsLab, host: Host, command: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command on a host until the end of the block."""
    launcher = lab.launcher.replace("{host}", host.address).split()
    with subprocess.Popen([*launcher, f"exec {command}"], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def send_plainly(lab: HostsLab, files: list[Path]) -> float:
    """Return the seconds that one plain connection takes."""
    host = lab.hosts[0]
    program = lab.folder / "receive.py"
    program.write_text(_RECEIVER)
    target = host.disk / "plain"
    with running(lab, host, f"{sys.executable} {program} {host.address} {target}") as receiver:
        assert receiver.stdout is not None
        port = int(receiver.stdout.readline())

        def send() -> None:
            with socket.create_connection((host.address, port)) as connection:
                for path in files:
                    with path.open("rb") as file:
                        connection.sendfile(file)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(1) == b"!"

        return common.timed(send)


def send_by_rsync(lab: HostsLab, files: list[Path]) -> float:
    """Return the seconds that rsync takes, without a shell between."""
    if shutil.which("rsync") is None:
        raise common.Unavailable("rsync isn't installed")
    host = lab.hosts[0]
    folder = host.disk / "rsync"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = lab.folder / "rsyncd.conf"
    settings.write_text(_DAEMON.format(folder=folder))
    command = f"rsync --daemon --no-detach --address {host.address} --port 8730 --config {settings}"
    with running(lab, host, command):
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection((host.address, 8730)).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        send = ["rsync", "--whole-file", "--fsync", *map(str, files), f"rsync://{host.address}:8730/d/"]
        return common.timed(lambda: subprocess.run(send, check=True))


def busy_seconds() -> float:
    """Return what all processors of the machine have been busy for."""
    user, nice, system, _, _, interrupts, soft, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, interrupts, soft))) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    if (obstacle := find_obstacle()) or shutil.which("tc") is None:
        raise SystemExit(f"Hosts can't be made here: {obstacle or 'tc is missing (Debian: iproute2)'}")
    machine = common.machine()
    megabytes = 24 if options.quick else 3 << 10
    with tempfile.TemporaryDirectory() as temporary, HostsLab(Path(temporary) / "lab", 3) as lab:
        folder, head = Path(temporary), Path(temporary) / "head"
        draw = np.random.default_rng(0)
        files = []
        for number in range(FILES):
            files.append(folder / f"x-{number}.npy")
            np.save(files[-1], draw.integers(0, 255, ((megabytes << 10) // FILES, 1 << 10), dtype=np.uint8))
        size = sum(path.stat().st_size for path in files)
        shape(lab)
        (folder / "hosts.txt").write_text("".join(f"{host.address}\n" for host in lab.hosts))
        launch = ("--hosts", str(folder / "hosts.txt"), "--launcher", lab.launcher, "--insitu", INSITU)
        insitu(head, "up", *launch)

        def run_import(read_on: str) -> float:
            command = [sys.executable, "-m", "insitu", "import", "d", *map(str, files), "--overwrite"]
            environment = {**os.environ, "INSITU_HOME": str(head)}
            run = lambda: subprocess.run(  # noqa: E731
                [*command, "--read-on", read_on], env=environment, check=True, capture_output=True
            )
            return size / 1e6 / common.timed(run)

        contenders: dict[str, Callable[[], float]] = {
            "import": lambda: run_import("here"),
            "nodes": lambda: run_import("nodes"),
            "socket": lambda: size / 1e6 / send_plainly(lab, files),
            "rsync": lambda: size / 1e6 / send_by_rsync(lab, files),
        }
        used = {name: common.Result(name, "s of processors a GB") for name in contenders}

        def run_counted(name: str) -> float:
            before = busy_seconds()
            figure = contenders[name]()
            used[name].figures.append((busy_seconds() - before) / (size / 1e9))
            return figure

        try:
            rounds = options.rounds or (1 if options.quick else 5)
            results = common.alternate(
                {name: partial(run_counted, name) for name in contenders}, "MB/s", rounds
            )
        finally:
            insitu(head, "down", "--force", code=None)
    print(common.machine_line(machine))
    print(f"\n{size / 1e6:.0f} MB in {FILES} files, 3 hosts, links of {RATE}, of which 80 % are 1,000 MB/s\n")
    print(common.results_table(results, "socket", form="{:.0f}".format))
    for name, result in results.items():
        used[name].missing = result.missing
    print()
    print(common.results_table(used, "socket", more_is_better=False, form="{:.2f}".format))
    saved = {"results": common.results_json(results), "processors": common.results_json(used)}
    common.save_json(options.json, "host_import", machine, **saved)


if __name__ == "__main__":
    main()
