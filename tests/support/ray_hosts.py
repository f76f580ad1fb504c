"""Ray on the hosts of hosts_lab.py. Run as a program, this installs Ray where it is missing, or says how."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
import time
from pathlib import Path

from agent_hosts import INSITU
from hosts_lab import Host, HostsLab

RAY_VERSION = "2.60.0"
PORT = 6379
_SETTINGS = {
    # The machine is shared with others; and a host here has few processors.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "7",
}


def find_obstacle() -> str:
    """Return why Ray can't run here; "" where it can."""
    missing = [name for name in ("ray", "pandas", "PIL") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} isn't installed: pip install 'insitu[ray-data]' ray=={RAY_VERSION}"
    return ""


class RayLab:
    """A Ray cluster on some hosts of a lab; its head is on the first one."""

    def __init__(self, lab: HostsLab, processors: int = 1) -> None:
        self.lab = lab
        #: The processors that Ray counts on each host.
        self.processors = processors
        self.hosts = lab.hosts

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def start(
        self, host: Host, *, alone: bool = False, gpus: int = 0, processors: int = 0, **environment: str
    ) -> None:
        """Start Ray on a host: a head on the first one, or `alone`, else a node that joins. It believes that
        there are so many GPUs, and processors; 0: as many as on the others."""
        folder = host.disk / "ray"
        folder.mkdir(exist_ok=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        head = f"--head --port {PORT} --include-dashboard=false"
        role = head if alone or host is self.hosts[0] else f"--address {self.address}"
        settings = {**_SETTINGS, **environment}
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
        options = (
            f"--node-ip-address {host.address} --num-cpus {processors or self.processors} "
            f"--object-store-memory 80000000 --disable-usage-stats --num-gpus {gpus}"
        )
        done = self.run(
            host,
            f"mountpoint -q /tmp/ray || mount --bind {folder} /tmp/ray; "
            f"env {words} {sys.executable} -m ray.scripts.scripts start {role} {options}",
        )
        assert done.returncode == 0, (done.stdout, done.stderr)

    def run(self, host: Host, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the shell on a host."""
        return subprocess.run(
            [*self.lab.launcher.replace("{host}", host.address).split(), command],
            capture_output=True,
            text=True,
            timeout=180,
        )

    def insitu(
        self, host: Host, *arguments: str, code: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run insitu on a host; its exit code must be `code`."""
        words = shlex.join(f"{name}={value}" for name, value in environment.items())
        done = self.run(host, f"env {words} {INSITU} {shlex.join(arguments)}")
        assert code is None or done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done

    def list_actors(self) -> list[str]:
        """The names of all actors that the cluster has."""
        code = (
            f"import ray, logging; ray.init({self.address!r}, logging_level=logging.ERROR); "
            f"from ray.util import list_named_actors; print(list_named_actors(all_namespaces=True))"
        )
        done = self.run(self.hosts[0], f"{sys.executable} -c {shlex.quote(code)}")
        assert done.returncode == 0, done.stderr
        return [str(each["name"]) for each in eval(done.stdout)]


def find_processes(host: Host, text: str) -> list[int]:
    """The processes of a host whose command has this text."""
    return sorted(pid for pid, command in host.processes().items() if text in command)


def find_ours(host: Host) -> dict[int, str]:
    """The processes of insitu on a host, with the actors that Ray runs for it."""
    return {
        pid: command
        for pid, command in host.processes().items()
        if "insitu.cluster" in command or "-m insitu" in command or "ray::Agent" in command
    }


def wait_until_none(host: Host, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while left := find_ours(host):
        assert time.monotonic() < deadline, (host.name, left)
        time.sleep(0.1)


def main() -> None:
    if find_obstacle():
        wanted = [f"ray=={RAY_VERSION}", "pandas>=2,<4", "pillow>=11,<14"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *wanted]
        if subprocess.run(command).returncode:
            sys.exit(f"The tests on a Ray cluster can't run: {find_obstacle()}")


if __name__ == "__main__":
    main()
