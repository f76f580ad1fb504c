"""Slurm on the hosts of `hosts_lab.py`: its controller on the first one, slurmd and munged on each.

Needs Debian's slurm-wlm (or slurmctld, slurmd, slurm-client) and munge. Each host has a /run of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from hosts_lab import Host, HostsLab

_PATH = f"{os.environ['PATH']}:/usr/sbin"
_SECONDS = 120.0
KILL_WAIT = 20
"""Seconds between Slurm's SIGTERM and its SIGKILL; 30 where nobody has set it."""
# Without cgroups: then Slurm itself ends what is below a step's processes alone, the hardest case for others.
_CONFIG = """
ClusterName=lab
SlurmctldHost={first}({address})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def find_obstacle() -> str:
    """Return what to install; "" where all is there."""
    names = ("slurmctld", "slurmd", "munged", "sbatch")
    missing = [name for name in names if shutil.which(name, path=_PATH) is None]
    return f"{', '.join(missing)} must be installed (Debian: slurm-wlm, munge)" if missing else ""


STORE = "/mnt/insitu"
"""The INSITU_HOME of agents, on a disk of each host."""


class SlurmHosts:
    """The hosts of a lab as nodes of Slurm. Commands run on the first one."""

    def __init__(self, lab: HostsLab, folder: Path) -> None:
        self.hosts, self.folder = lab.hosts, folder
        (folder / "state").mkdir(parents=True)
        first, processors = lab.hosts[0], os.cpu_count()
        lines = [f"NodeName={h.name} NodeAddr={h.address} CPUs={processors}" for h in lab.hosts]
        values = {"first": first.name, "address": first.address, "nodes": "\n".join(lines)}
        (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, kill_wait=KILL_WAIT, **values))
        names = "".join(f"{host.address} {host.name}\n" for host in lab.hosts)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        for host in lab.hosts:
            host.kill()
            host.start()
            self._start(host, controller=host is first)
        self._wait_for_nodes()

    def _start(self, host: Host, controller: bool) -> None:
        munged = (
            f"munged --force --key-file={self.folder}/munge.key --log-file={self.folder}/{host.name}.munge"
        )
        (host.disk / "local").mkdir(exist_ok=True)
        host.home = host.disk / "local" / "insitu"
        own = f"mount --bind {host.disk / 'local'} /mnt && mount --bind {self.folder}/hosts /etc/hosts"
        own += " && mount -t tmpfs tmpfs /run && mkdir /run/munge && "
        seed = f" --seed-file={self.folder}/{host.name}.seed"
        start = f"{own}{munged}{seed} && {'slurmctld && ' if controller else ''}slurmd -N {host.name}"
        done = self._run_on(host, start)
        assert done.returncode == 0, (start, done.stdout, done.stderr)

    def _run_on(self, host: Host, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "HOME": str(host.disk),
            "KERAS_BACKEND": "jax",
            **environment,
        }
        return subprocess.run(
            [
                "nsenter",
                *f"-t {host.pid} -m -p -u -i -n".split(),
                "bash",
                "-c",
                f"cd {self.folder} && {command}",
            ],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )

    def run(self, command: str, **environment: str) -> str:
        """Run a command on the first host. Returns its output."""
        done = self._run_on(self.hosts[0], command, **environment)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + _SECONDS
        while (said := self._run_on(self.hosts[0], "sinfo --noheader --format '%D %t'").stdout.split()) != [
            str(len(self.hosts)),
            "idle",
        ]:
            assert time.monotonic() < deadline, said
            time.sleep(0.2)

    def leftovers(self, host: Host) -> list[str]:
        """What runs on a host beside Slurm and munge."""
        own = ("munged", "slurmctld", "slurmd", "slurmscriptd")
        commands = [command for command in host.processes().values() if command.strip()]
        return [each for each in commands if Path(each.lstrip(": ").split()[0]).name not in own]

    def state(self, job: str) -> str:
        """What Slurm says of a job, such as COMPLETED."""
        return self.run(f"scontrol show job {job}").partition("JobState=")[2].split()[0]
