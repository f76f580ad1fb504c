"""Real etcds on loopback, for tests. `make ready-etcd` fetches Debian's; ETCD names another binary."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_addresses

_FETCHED = Path(__file__).parents[2] / "build/etcd/usr/bin/etcd"
ETCD = os.environ.get("ETCD") or shutil.which("etcd") or (str(_FETCHED) if _FETCHED.exists() else None)
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="no etcd: `make ready-etcd` fetches Debian's, or name a binary by ETCD"
)


class Etcd:
    """`count` members of one etcd."""

    def __init__(
        self, folder: Path, count: int = 1, options: Sequence[str] = (), scheme: str = "http"
    ) -> None:
        self.folder, self.options, self.scheme = folder, options, scheme
        self.clients, self.peers = free_addresses(count), free_addresses(count)
        self.processes = [self._start(index) for index in range(count)]
        self.url = f"etcd://{','.join(self.clients)}"

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        assert ETCD is not None
        client, peer = f"{self.scheme}://{self.clients[index]}", f"http://{self.peers[index]}"
        members = ",".join(f"n{i}=http://{each}" for i, each in enumerate(self.peers))
        command = [ETCD, "--name", f"n{index}", "--data-dir", str(self.folder / f"n{index}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", members]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"n{index}.log").open("ab") as log:
            return subprocess.Popen([*command, *self.options], stdout=log, stderr=log)

    def ask(self, index: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(f"http://{self.clients[index]}/v3/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))

    def wait(self) -> Etcd:
        """Wait until each member can write."""
        for index in range(len(self.processes)):
            deadline = time.monotonic() + 60
            while True:
                try:
                    self.ask(index, "kv/put", {"key": "d2FpdA==", "value": ""})
                    break
                except OSError:
                    assert time.monotonic() < deadline, (self.folder / f"n{index}.log").read_text()[-2000:]
                    time.sleep(0.05)
        return self

    def find_leader(self) -> int:
        """Return the index of the member that leads."""
        states = [self.ask(index, "maintenance/status", {}) for index in range(len(self.processes))]
        ids = [state["header"]["member_id"] for state in states]
        return ids.index(states[0]["leader"])

    def silence(self, index: int) -> None:
        """Make a member silent: its connections stay, and it says nothing."""
        process = self.processes[index]
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def resume(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGCONT)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def add_users(etcd: Etcd, users: Mapping[str, bytes], password: str) -> None:
    """Have an etcd want users: `root`, and some who may read and write keys that begin so."""
    etcd.ask(0, "auth/user/add", {"name": "root", "password": "all"})
    etcd.ask(0, "auth/user/grant", {"user": "root", "role": "root"})
    for user, prefix in users.items():
        etcd.ask(0, "auth/user/add", {"name": user, "password": password})
        etcd.ask(0, "auth/role/add", {"name": user})
        first, end = (b64encode(each).decode() for each in (prefix, prefix[:-1] + b"0"))
        allowed = {"permType": "READWRITE", "key": first, "range_end": end}
        etcd.ask(0, "auth/role/grant", {"name": user, "perm": allowed})
        etcd.ask(0, "auth/user/grant", {"user": user, "role": user})
    etcd.ask(0, "auth/enable", {})


def make_certificates(folder: Path) -> None:
    """Make an authority, and a certificate of 127.0.0.1 and one of a user that it has signed."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl(*new, "-x509", "-days", "30", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    for name in ("server", "client"):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        openssl(*new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30", "-extfile", "names"]
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
