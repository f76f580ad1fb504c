"""Servers of Apache Ignite on loopback: `make ignite` starts some, `make ignite-down` ends them.

    python tests/support/ignite_servers.py up --nodes 3 [--tls] [--authentication]
    python tests/support/ignite_servers.py down

Tests start their own with `IgniteServers`. Jars come from Maven Central by `mvn`, once, into .cache/ignite.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from free_ports import free_addresses
from hosts_lab import Host

from insitu.extensions.ignite.address import ConnectionSettings, read_settings
from insitu.extensions.ignite.connection import Connection, ConnectionFailed, ServerFailure
from insitu.extensions.ignite.protocol import GET_ENDPOINTS, decode_endpoints, encode_endpoints

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "ignite"
CACHE = Path(os.environ.get("INSITU_IGNITE_CACHE", ROOT / ".cache" / "ignite"))
JARS = CACHE / "lib"
STATE = CACHE / "servers.json"
START_SECONDS = 120.0
KEY_STORE_PASSWORD = b"insitu"
INSTALL = (
    "Servers of Apache Ignite need Java 11 to 21 (JDK) and Maven: install them, such as by `apt install "
    "openjdk-17-jdk-headless maven`"
)
_OPENED = {
    "java.base": "jdk.internal.access jdk.internal.misc sun.nio.ch sun.util.calendar java.io java.nio "
    "java.net "
    "sun.reflect.generics.reflectiveObjects java.util java.util.concurrent java.util.concurrent.locks "
    "java.util.concurrent.atomic java.lang java.lang.invoke java.lang.reflect java.math java.time java.text",
    "java.management": "com.sun.jmx.mbeanserver sun.management",
    "jdk.internal.jvmstat": "sun.jvmstat.monitor",
    "jdk.management": "com.sun.management.internal",
    "java.sql": "java.sql",
}
OPENS = [
    f"--add-opens={module}/{package}=ALL-UNNAMED"
    for module, packages in _OPENED.items()
    for package in packages.split()
]


def find_missing() -> str:
    """Return what to install; empty where all is there."""
    return "" if shutil.which("java") and shutil.which("mvn") else INSTALL


def fetch_jars() -> str:
    """Fetch the jars unless they are there. Returns the class path."""
    done = JARS / ".complete"
    if not done.exists():
        JARS.mkdir(parents=True, exist_ok=True)
        command = ["mvn", "--batch-mode", "--quiet", "-f", str(FILES / "pom.xml")]
        command += ["dependency:copy-dependencies", f"-DoutputDirectory={JARS}"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=600)
        done.touch()
    return f"{JARS}/*"


def run_java(source: Path, *arguments: str, timeout: float = 300) -> str:
    """Run a Java program of one file with the classes of Ignite. Returns what it prints."""
    command = ["java", "-Xmx1g", *OPENS, "-DIGNITE_QUIET=true", "-DIGNITE_UPDATE_NOTIFIER=false"]
    command += ["-cp", fetch_jars(), str(source), *arguments]
    # Ignite's client notes the names of classes in the current folder.
    done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.name} failed: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def find_ports(count: int) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in free_addresses(count)]


class IgniteServers:
    """Servers of one cluster. Use it in a `with` statement, which ends them."""

    def __init__(
        self,
        folder: Path,
        *,
        tls: bool = False,
        client_certificates: bool = False,
        authentication: bool = False,
        region_mib: int = 128,
        heap_mib: int = 512,
        outlive: bool = False,
        hosts: Mapping[int, Host] | None = None,
    ) -> None:
        """With `outlive` the servers run on after this process, else they end with it. `hosts`: where each of
        them runs; None: all on this one, on loopback."""
        self._hosts = hosts or {}
        self.folder = folder
        self._tls, self._authentication, self._region_mib = tls, authentication, region_mib
        self._client_certificates, self._heap_mib = client_certificates, heap_mib
        ends_with_parent = shutil.which("setpriv") and not outlive
        self._prefix = ["setpriv", "--pdeathsig", "KILL"] if ends_with_parent else []
        (self._discovery,) = find_ports(1)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ports: dict[int, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = folder / "server.pem"
        self._make_key_store()

    def __enter__(self) -> IgniteServers:
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self.processes):
            self.kill(number)

    def _make_key_store(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.authority.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self.key = self.folder / "server.key"
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        encryption = serialization.BestAvailableEncryption(KEY_STORE_PASSWORD)
        (self.folder / "server.p12").write_bytes(
            pkcs12.serialize_key_and_certificates(b"server", key, certificate, None, encryption)
        )

    def start(self, *numbers: int) -> None:
        """Start these servers and wait until all that run are one cluster."""
        for number in numbers:
            self._launch(number)
        deadline = time.monotonic() + START_SECONDS
        while not self._is_whole():
            for number, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"server {number} ended: {self.log(number)[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(self.processes)} servers didn't find each other: {self.log(numbers[0])}"
                )
            time.sleep(0.25)

    def _launch(self, number: int) -> None:
        thin, communication = find_ports(2)
        work = self.folder / f"work-{number}"
        addresses = sorted({host.address for host in self._hosts.values()}) or ["127.0.0.1"]
        ports = f"{self._discovery}..{self._discovery + 20}"
        properties = {
            "node.id": f"node-{number}",
            "thin.port": thin,
            "discovery.port": self._discovery,
            "discovery.addresses": ",".join(f"{each}:{ports}" for each in addresses),
            "local.host": self.host(number),
            "communication.port": communication,
            "region.bytes": self._region_mib << 20,
            "tls": str(self._tls).lower(),
            "authentication": str(self._authentication).lower(),
            "client.certificates": str(self._client_certificates).lower(),
            "key.store": self.folder / "server.p12",
            "IGNITE_QUIET": "false",
            "IGNITE_UPDATE_NOTIFIER": "false",
            "work.folder": work,
            "java.net.preferIPv4Stack": "true",
        }
        command = [
            "java",
            "-Xms128m",
            f"-Xmx{self._heap_mib}m",
            f"-XX:MaxDirectMemorySize={256 + self._region_mib}m",
            *OPENS,
        ]
        command += [f"-D{name}={value}" for name, value in properties.items()]
        command += ["-cp", fetch_jars(), "org.apache.ignite.startup.cmdline.CommandLineStartup"]
        with (self.folder / f"server-{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [*self._prefix, *self._enter(number), *command, str(FILES / "server.xml")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.ports[number] = thin

    def host(self, number: int) -> str:
        """Return the address of the host of a server."""
        return self._hosts[number].address if number in self._hosts else "127.0.0.1"

    def _enter(self, number: int) -> list[str]:
        """Return the command that runs another one on the host of a server."""
        if number not in self._hosts:
            return []
        return ["nsenter", "-t", str(self._hosts[number].pid), *["-m", "-p", "-u", "-i", "-n"], *self._prefix]

    def settings(self) -> ConnectionSettings:
        return read_settings(self.environment())

    def environment(self) -> Mapping[str, str]:
        """Return the settings of clients."""
        found = {"INSITU_IGNITE_TIMEOUT": "20"}
        if self._tls:
            found |= {"INSITU_IGNITE_CA": str(self.authority), "INSITU_IGNITE_SERVER_NAME": "localhost"}
        if self._client_certificates:
            found |= {"INSITU_IGNITE_CERT": str(self.authority), "INSITU_IGNITE_KEY": str(self.key)}
        if self._authentication:
            found |= {"INSITU_IGNITE_USERNAME": "ignite", "INSITU_IGNITE_PASSWORD": "ignite"}
        return found

    def _is_whole(self) -> bool:
        """Return whether all servers answer and each knows the others."""
        # A client that comes during its first exchange of partitions may end a server of Ignite.
        if not all("Node started :" in self.log(number) for number in self.ports):
            return False
        for number, port in self.ports.items():
            try:
                connection = Connection((self.host(number), port), self.settings())
            except ConnectionFailed:
                return False
            try:
                found = decode_endpoints(connection.request(GET_ENDPOINTS, encode_endpoints()))
            except (ConnectionFailed, ServerFailure):
                return False
            finally:
                connection.close()
            if len(found) != len(self.ports):
                return False
        return True

    def log(self, number: int) -> str:
        return (self.folder / f"server-{number}.log").read_text(errors="replace")

    def kill(self, number: int) -> None:
        """End a server at once, as the loss of its machine does."""
        process = self.processes.pop(number)
        self.ports.pop(number, None)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def address(self, cache: str, *numbers: int) -> str:
        """Return the address of a cache, by these servers or all of them."""
        chosen = numbers or sorted(self.ports)
        return f"ignite://{','.join(f'{self.host(n)}:{self.ports[n]}' for n in chosen)}/{cache}"


def _up(options: argparse.Namespace) -> None:
    if STATE.exists():
        raise SystemExit(f"Servers run already, by {STATE}. End them: make ignite-down")
    servers = IgniteServers(
        CACHE / "servers",
        tls=options.tls,
        authentication=options.authentication,
        region_mib=options.region_mib,
        heap_mib=options.heap_mib,
        outlive=True,
    )
    try:
        servers.start(*range(options.nodes))
    except BaseException:
        servers.__exit__()
        raise
    STATE.write_text(json.dumps([process.pid for process in servers.processes.values()]))
    for name, value in servers.environment().items():
        print(f"export {name}={value}")
    print(f"{options.nodes} servers run: insitu describe {servers.address('CACHE')}")


def _down() -> None:
    for pid in json.loads(STATE.read_text()) if STATE.exists() else []:
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and b"CommandLineStartup" in command.read_bytes():
            os.killpg(pid, signal.SIGKILL)
    STATE.unlink(missing_ok=True)
    shutil.rmtree(CACHE / "servers", ignore_errors=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["fetch", "up", "down"])
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--region-mib", type=int, default=512)
    parser.add_argument("--heap-mib", type=int, default=512)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--authentication", action="store_true")
    options = parser.parse_args(arguments)
    if options.command == "down":
        _down()
        return
    if missing := find_missing():
        raise SystemExit(missing)
    fetch_jars()
    if options.command == "up":
        _up(options)


if __name__ == "__main__":
    main(sys.argv[1:])
