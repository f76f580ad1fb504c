"""Several hosts on one machine, made of namespaces: network, processes, mounts, host name, shared memory.

Each has an address of IPv4 and one of IPv6 on a common bridge, a /dev/shm and an INSITU_HOME of its own. The
tests themselves run beside them, at `HostsLab.gateway`. Needs root and iproute2; run as a program, this
installs the latter where it can, and says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

INIT = Path(__file__).with_name("host_init.py")
_SECONDS = 60.0
_NAMESPACE = re.compile(r"insitu-lab-(\d+)-\d+")


def find_obstacle() -> str:
    """Return why hosts can't be made here; "" where they can."""
    if os.geteuid() != 0:
        return "hosts are made of namespaces, which needs root"
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} must be installed (Debian: iproute2, util-linux)"
    name = f"insitu-lab-{os.getpid()}-999"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    try:
        link = ("link", "add", "eth0", "netns", name, "type", "veth", "peer", "eth1", "netns", name)
        linked = subprocess.run(["ip", *link], capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"links can't be made here: {linked.stderr.strip()}" if linked.returncode else ""


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


class Host:
    """One host. Its disk outlives it."""

    shared_size = "1g"

    def __init__(self, lab: HostsLab, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"{lab.prefix}.{number}"
        self.address6 = f"{lab.prefix6}::{number:x}"
        self.namespace = f"insitu-lab-{os.getpid()}-{number}"
        self.link = f"il{os.getpid()}-{number}"
        self._bridge = lab.bridge
        self.disk = lab.folder / self.name
        self.home = self.disk / "insitu"
        self._init: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def attach(self) -> None:
        """Give it a network of its own and a link to the bridge."""
        _ip("netns", "add", self.namespace)
        peer = ("peer", "name", "eth0", "netns", self.namespace)
        _ip("link", "add", self.link, "type", "veth", *peer)
        _ip("link", "set", self.link, "master", self._bridge)
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad")
        for device in ("eth0", "lo"):
            _ip("-n", self.namespace, "link", "set", device, "up")

    def detach(self) -> None:
        """Remove its network, once it is off."""
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", self.link], capture_output=True)

    def start(self) -> None:
        """Switch it on."""
        self.disk.mkdir(parents=True, exist_ok=True)
        _ip("link", "set", self.link, "up")
        script = (
            f"hostname {self.name} && mount -t tmpfs -o size={self.shared_size} tmpfs /dev/shm && "
            f"exec {sys.executable} -S -E {INIT}"
        )
        unshare = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        self._init = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *unshare, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._init.stdout is not None and self._init.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(children[0])
        (self.disk / "pid").write_text(str(self.pid))

    def kill(self) -> None:
        """Cut its power: nothing is said to anybody."""
        assert self._init is not None
        self.cut()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.wait(_SECONDS)
        for stream in (self._init.stdin, self._init.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._init = None

    def cut(self) -> None:
        """Take its link away."""
        _ip("link", "set", self.link, "down")

    def heal(self) -> None:
        """Give it its link back."""
        _ip("link", "set", self.link, "up")

    def wait_for_link(self) -> None:
        """Wait until the launcher sees its link: the kernel tells a second late that it is up."""
        deadline = time.monotonic() + _SECONDS
        while Path(f"/sys/class/net/{self.link}/operstate").read_text() != "up\n":
            assert time.monotonic() < deadline, f"{self.link} doesn't come up"
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """The processes that run on it, beside the first one: command lines by number."""
        own = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if os.stat(entry / "ns" / "pid").st_ino == own:
                        found[int(entry.name)] = (
                            (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        )
        return found

    def listeners(self) -> list[str]:
        """The addresses on which something on it listens, as the system writes them."""
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]
        ]
        return [words[1] for words in lines if words[3] == "0A"]

    def shared_memory(self) -> list[str]:
        return os.listdir(f"/proc/{self.pid}/root/dev/shm")

    def clear(self) -> None:
        """End what runs on it and empty its disk and shared memory, after a test."""
        if self._init is None or self._init.poll() is not None:
            self._init = None
            self.start()
        self.heal()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _SECONDS
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.02)
        shutil.rmtree(self.home, ignore_errors=True)
        for name in self.shared_memory():
            shutil.rmtree(f"/proc/{self.pid}/root/dev/shm/{name}", ignore_errors=True)


class HostsLab:
    """A bridge with `count` hosts."""

    def __init__(self, folder: Path, count: int) -> None:
        _remove_leftovers()
        self.folder = folder
        own = os.getpid()
        #: The beginnings of addresses, drawn by the process so that two of them don't meet.
        self.prefix = f"10.{64 + own % 64}.{own // 64 % 250}"
        self.prefix6 = f"fd00:{own & 0xFFFF:x}:{(own >> 16) + 1:x}"
        self.gateway, self.gateway6 = f"{self.prefix}.254", f"{self.prefix6}::fe"
        self.bridge = f"il{own}"
        self.hosts = [Host(self, number) for number in range(1, count + 1)]

    def __enter__(self) -> HostsLab:
        try:
            _ip("link", "add", self.bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            _ip("addr", "add", f"{self.gateway6}/64", "dev", self.bridge, "nodad")
            _ip("link", "set", self.bridge, "up")
            for host in self.hosts:
                host.attach()
                host.start()
            self._write_launcher()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            with contextlib.suppress(AssertionError, OSError):
                host.kill()
            host.detach()
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    @property
    def launcher(self) -> str:
        """A launcher for `insitu up`: like ssh, it fails where the host can't be reached."""
        return f"{self.folder / 'launch'} {{host}}"

    def _write_launcher(self) -> None:
        """Write the program that runs a command on the host with an address."""
        cases = "".join(
            f"  {host.address}|{host.address6}) disk={host.disk}; link={host.link};;\n" for host in self.hosts
        )
        program = self.folder / "launch"
        up = (
            'case $(cat /sys/class/net/$link/operstate) in up) ;; *) echo "$1 times out" >&2; exit 255;; esac'
        )
        enter = "nsenter -t $(cat $disk/pid) -m -p -u -i -n env HOME=$disk INSITU_HOME=$disk/insitu"
        program.write_text(
            f'#!/bin/sh\ncase $1 in\n{cases}  *) echo "no route to $1" >&2; exit 255;;\nesac\n{up}\n'
            f'exec {enter} sh -c "$2"\n'
        )
        program.chmod(0o755)

    def clear(self) -> None:
        """Bring all hosts into the state of before a test."""
        for host in self.hosts:
            host.clear()


def _remove_leftovers() -> None:
    """Remove the hosts of processes that have ended."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for found in _NAMESPACE.finditer(listed):
        if not Path(f"/proc/{found[1]}").exists():
            subprocess.run(["ip", "netns", "del", found[0]], capture_output=True)
            subprocess.run(["ip", "link", "del", f"il{found[1]}"], capture_output=True)


def main() -> None:
    """Install what is missing where that is possible; say what else is."""
    if os.geteuid() == 0 and shutil.which("ip") is None and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "--yes", "--quiet", "iproute2"], stdout=subprocess.DEVNULL)
    obstacle = find_obstacle()
    if obstacle:
        sys.exit(f"Several hosts can't be made here: {obstacle}")


if __name__ == "__main__":
    main()
