"""Servers of OpenSSH on the hosts of `hosts_lab.py`, and a user beside them who reaches these by plain `ssh`.

Hosts and user have files of their own in the place of /etc/passwd, /etc/hosts and /run, so what belongs to
this machine, such as /root/.ssh, is neither read nor written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from hosts_lab import Host, HostsLab

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
PASSWORD_PORT = 2222
_SECONDS = 250
_CONFIG = """
Port {port}
HostKey {folder}/{host}.key
AuthorizedKeysFile {folder}/user/.ssh/id_ed25519.pub
StrictModes no
UsePAM no
PidFile none
PermitRootLogin yes
Banner {folder}/banner
{further}
"""
_ONLY_PASSWORDS = "PubkeyAuthentication no\nPasswordAuthentication yes"
ACCOUNTS = {
    # A host's shell reads this file for each command that ssh brings.
    "root": "PATH={bin}:$PATH",
    "bare": "",
    "chatty": "echo Welcome; echo '{{\"load\": 3}}'; PATH={bin}:$PATH",
    "leaving": "echo 'This machine is closed today'; exit 0",
}
"""Accounts of each host: what their ~/.bashrc says. All are the super-user, who alone can read this tree."""


def find_obstacle() -> str:
    """Return what to install; "" where all is there."""
    return "" if SSHD and shutil.which("ssh") else "OpenSSH must be installed (Debian: openssh-server)"


class SshHosts:
    """The hosts of a lab, each with an sshd, and the home of the user who starts `insitu up`."""

    def __init__(self, lab: HostsLab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.user = folder / "user"
        (self.user / ".ssh").mkdir(parents=True, mode=0o700)
        (folder / "banner").write_text("Authorized use only.\nAll is watched.\n" * 3)
        self._make_key(self.user / ".ssh" / "id_ed25519")
        for host in lab.hosts:
            self._make_key(folder / f"{host.name}.key")
            self._start(host)
        keys = [
            f"{host.name},{host.address},{host.address6} {(folder / f'{host.name}.key.pub').read_text()}"
            for host in lab.hosts
        ]
        (self.user / ".ssh" / "known_hosts").write_text("".join(keys))
        passwd = folder / "passwd"
        passwd.write_text(f"root:x:0:0::{self.user}:/bin/bash\nsshd:x:101:65534::/run/sshd:/bin/false\n")
        names = folder / "names"
        names.write_text("127.0.0.1 localhost\n")
        with names.open("a") as file:
            file.writelines(f"{host.address} {host.name}\n" for host in lab.hosts)
        self._mounts = f"mount --bind {passwd} /etc/passwd && mount --bind {names} /etc/hosts"

    @staticmethod
    def _make_key(path: Path) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def home(self, host: Host, account: str = "root") -> Path:
        """The home of an account on a host."""
        return self.folder / host.name / account

    def _start(self, host: Host) -> None:
        """Switch a host on anew, and start its servers."""
        host.kill()
        host.start()
        lines = [
            "sshd:x:101:65534::/run/sshd:/bin/false",
            f"closed:x:0:0::{self.folder}:/usr/sbin/nologin",
        ]
        for account, profile in ACCOUNTS.items():
            home = self.home(host, account)
            home.mkdir(parents=True)
            (home / ".bashrc").write_text(profile.format(bin=Path(sys.executable).parent) + "\n")
            lines.insert(0, f"{account}:x:0:0::{home}:/bin/bash")
        lines.sort(key=lambda line: not line.startswith("root:"))  # the first one of user 0 is whoami's
        passwd = self.folder / f"{host.name}.passwd"
        passwd.write_text("\n".join(lines) + "\n")
        # A home of files alone: host.home is that of root, whose store `host.clear` removes.
        host.home = self.home(host) / ".insitu"
        run = f"mount --bind {passwd} /etc/passwd && mount -t tmpfs tmpfs /run && mkdir /run/sshd"
        for port, further in ((22, ""), (PASSWORD_PORT, _ONLY_PASSWORDS)):
            config = self.folder / f"{host.name}.{port}"
            config.write_text(_CONFIG.format(port=port, folder=self.folder, host=host.name, further=further))
            run += f" && {SSHD} -f {config}"
        subprocess.run(["nsenter", *f"-t {host.pid} -m -p -u -i -n".split(), "sh", "-c", run], check=True)

    def configure(self, text: str) -> None:
        """Write the user's ~/.ssh/config."""
        (self.user / ".ssh" / "config").write_text(text)

    def run(self, home: Path, *command: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command as that user, with this INSITU_HOME; its exit code must be `code`."""
        with_mounts = ["unshare", "--mount", "sh", "-c", f'{self._mounts} && exec "$@"', "sh", *command]
        done = subprocess.run(
            with_mounts,
            env={**os.environ, "INSITU_HOME": str(home), "HOME": str(self.user)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        assert done.returncode == code, (command, done.returncode, done.stdout, done.stderr)
        return done

    def insitu(self, home: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(home, sys.executable, "-m", "insitu", *arguments, code=code)
