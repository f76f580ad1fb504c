"""Stores of objects on the loopback interface, behind a proxy by which they fail. For `make test-stores`."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from free_ports import free_addresses
from hdfs_server import HdfsServer

START_SECONDS = 60.0
_BODY_BYTES = 100_000
"""Answers from this size on are contents of files, not lists of them."""
_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class _QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that end early."""


def _serve(handler: type[http.server.BaseHTTPRequestHandler]) -> _QuietServer:
    server = _QuietServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class FaultyProxy:
    """Stands in front of a server of HTTP, and counts the contents of files that pass."""

    def __init__(self, target: str, root: FaultyProxy | None = None) -> None:
        """`root` is the one whose settings count: by default this one."""
        self._target = target.removeprefix("http://")
        self._root = self if root is None else root
        #: Proxies of servers to which this one's sends its clients.
        self._others: dict[str, FaultyProxy] = {}
        #: How many answers with contents of files pass before something is done to one.
        self.spared = 0
        #: What is done once some contents have passed, before the rest of them.
        self.in_the_middle: Callable[[], None] | None = None
        #: How many more answers with contents of files are cut in their middle.
        self.cuts = 0
        #: What answers requests in the place of the server; 0: the server.
        self.status = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do(self) -> None:
                proxy._pass_on(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do

        self._server = _serve(Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        self.in_the_middle, self.cuts, self.status, self.spared = None, 0, 0, 0

    def _pass_on(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        given = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        if self.status:
            handler.send_response(self.status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        connection = http.client.HTTPConnection(self._target, timeout=30)
        try:
            headers = {k: v for k, v in handler.headers.items() if k.lower() not in _HOP_HEADERS}
            connection.request(handler.command, handler.path, given, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() == "location":
                value = self._lead_to_proxy(value)
            if name.lower() not in _HOP_HEADERS or (name.lower() == "content-length" and not data):
                handler.send_header(name, value)
        if data:
            handler.send_header("Content-Length", str(len(data)))
        elif answer.getheader("Content-Length") is None:
            handler.send_header("Content-Length", "0")
        handler.end_headers()
        if len(data) < _BODY_BYTES:
            handler.wfile.write(data)
            return
        self._root._send_contents(handler, data)

    def _lead_to_proxy(self, location: str) -> str:
        """Return the address of a proxy before that server."""
        protocol, _, rest = location.partition("://")
        server, _, path = rest.partition("/")
        if protocol != "http":
            return location
        with self._lock:
            if server not in self._others:
                self._others[server] = FaultyProxy(server, self)
            return f"{self._others[server].url}/{path}"

    def _send_contents(self, handler: http.server.BaseHTTPRequestHandler, data: bytes) -> None:
        handler.wfile.write(data[: len(data) // 2])
        with self._lock:
            spare, self.spared = self.spared > 0, max(0, self.spared - 1)
            cut = self.cuts > 0 and not spare
            self.cuts -= cut
            if self.in_the_middle is not None and not spare:
                do, self.in_the_middle = self.in_the_middle, None
                do()
        if cut:
            handler.close_connection = True
            return
        handler.wfile.write(data[len(data) // 2 :])

    def close(self) -> None:
        for each in (self._server, *(other._server for other in self._others.values())):
            each.shutdown()
            each.server_close()


def request(method: str, url: str, data: bytes | None = None, **headers: str) -> bytes:
    """Return what a server answers."""
    asked = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return bytes(answer.read())


class Store:
    """A store of objects: what a test puts there, and where insitu finds it."""

    #: What stands before the name of an object.
    prefix: str
    #: What commands and agents need.
    environment: dict[str, str]
    #: What must appear nowhere.
    secrets: tuple[str, ...] = ()
    #: The same with another key; empty: this store asks for none.
    wrong: Mapping[str, str] = MappingProxyType({})
    proxy: FaultyProxy

    def put(self, name: str, data: bytes) -> None:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.proxy.close()


class _Program:
    """A server of its own, with a log."""

    def __init__(self, command: list[str], url: str, log: Path, **environment: str) -> None:
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(urllib.error.HTTPError):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    request("GET", url)
                    return
                assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
                continue
            return  # an error is an answer, too

    def close(self) -> None:
        self._process.kill()
        self._process.wait(START_SECONDS)


class S3(Store):
    """Moto's server, which asks for signatures that are right."""

    def __init__(self, folder: Path) -> None:
        import boto3

        (port,) = (address.rpartition(":")[2] for address in free_addresses(1))
        server = f"http://127.0.0.1:{port}"
        program = str(Path(sys.executable).with_name("moto_server"))
        self._server = _Program(
            [program, "-p", port],
            f"{server}/moto-api/",
            folder / "moto.log",
            INITIAL_NO_AUTH_ACTION_COUNT="99",
        )
        self.proxy = FaultyProxy(server)
        some = {"region_name": "us-east-1", "endpoint_url": server}
        iam = boto3.client("iam", aws_access_key_id="x", aws_secret_access_key="y", **some)
        iam.create_user(UserName="u")
        key = iam.create_access_key(UserName="u")["AccessKey"]
        allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="u", PolicyName="p", PolicyDocument=policy)
        names = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
        request("POST", f"{server}/moto-api/reset-auth", b"0", **{"Content-Type": "text/plain"})
        self._client = boto3.client("s3", **names, **some)
        self._client.create_bucket(Bucket="bucket")
        self.prefix = "s3://bucket/"
        self.secrets = (key["SecretAccessKey"],)
        self.environment = {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            "AWS_REGION": "us-east-1",
        }
        self.wrong = {"AWS_SECRET_ACCESS_KEY": "TheKeyOfSomebodyElse"}

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket="bucket", Key=name, Body=data)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket="bucket", Key=name)

    def close(self) -> None:
        super().close()
        self._server.close()


class Gcs(Store):
    """An emulator of Google's store."""

    def __init__(self, folder: Path) -> None:
        (port,) = (address.rpartition(":")[2] for address in free_addresses(1))
        self._at = f"http://127.0.0.1:{port}"
        program = str(Path(sys.executable).with_name("gcp-storage-emulator"))
        command = [program, "start", "--host", "127.0.0.1", "--port", port, "--in-memory"]
        self._server = _Program([*command, "--default-bucket", "bucket"], self._at, folder / "gcs.log")
        self.proxy = FaultyProxy(self._at)
        self.prefix = "gs://bucket/"
        self.environment = {"STORAGE_EMULATOR_HOST": self.proxy.url}

    def put(self, name: str, data: bytes) -> None:
        name = urllib.parse.quote(name, safe="")
        url = f"{self._at}/upload/storage/v1/b/bucket/o?uploadType=media&name={name}"
        request("POST", url, data, **{"Content-Type": "application/octet-stream"})

    def delete(self, name: str) -> None:
        request("DELETE", f"{self._at}/storage/v1/b/bucket/o/{urllib.parse.quote(name, safe='')}")

    def close(self) -> None:
        super().close()
        self._server.close()


class WebHdfs(Store):
    """HDFS by its interface for HTTP."""

    def __init__(self, folder: Path) -> None:
        self._server = HdfsServer(folder)
        self._at = f"http://127.0.0.1:{self._server.web_port}"
        self.proxy = FaultyProxy(self._at)
        self.prefix = f"webhdfs://{self.proxy.url.removeprefix('http://')}/"
        self.environment = {}

    def put(self, name: str, data: bytes) -> None:
        at = f"{self._at}/webhdfs/v1/{name}?op=CREATE&overwrite=true&noredirect=true&user.name=u"
        request("PUT", json.loads(request("PUT", at))["Location"], data)

    def delete(self, name: str) -> None:
        request("DELETE", f"{self._at}/webhdfs/v1/{name}?op=DELETE&user.name=u")

    def close(self) -> None:
        super().close()
        self._server.close()


class Hdfs(WebHdfs):
    """HDFS by its own protocol, which hdfs-native speaks without Java. No proxy knows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prefix = f"hdfs://127.0.0.1:{self._server.port}/"


class Web(Store):
    """A server of files over HTTP, which answers requests for ranges or doesn't."""

    ranges = True

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, bytes] = {}
        #: Of each file, what tells it from others of its name.
        self.marks: dict[str, str] = {}
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                store.answer(self)

            do_HEAD = do_POST = do_GET

        self._server = _serve(Handler)
        self.at = f"http://127.0.0.1:{self._server.server_port}"
        self.proxy = FaultyProxy(self.at)
        self.prefix = f"{self.proxy.url}/"
        self.environment = {}

    def put(self, name: str, data: bytes) -> None:
        self.files[name] = data
        self.marks[name] = f"{time.monotonic_ns():x}"

    def delete(self, name: str) -> None:
        del self.files[name]

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Let the server itself, without its proxy, speak TLS."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        name = urllib.parse.unquote(handler.path.partition("?")[0]).strip("/")
        below = sorted(each for each in self.files if each.startswith(f"{name}/"))
        if name in self.files:
            self.send_file(handler, name)
        elif below:
            links = "".join(f'<a href="/{each}">{each}</a>\n' for each in below)
            self.send(handler, 200, links.encode(), {"Content-Type": "text/html"})
        else:
            self.send(handler, 404, b"")

    def send_file(self, handler: http.server.BaseHTTPRequestHandler, name: str) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{self.marks[name]}"', "Content-Type": "application/octet-stream"}
        wanted = handler.headers.get("Range") if self.ranges else None
        if self.ranges:
            headers["Accept-Ranges"] = "bytes"
        if wanted is None:
            self.send(handler, 200, data, headers)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(data)), len(data) - 1)
        headers["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
        self.send(handler, 206, data[begin : end + 1], headers)

    def send(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
    ) -> None:
        handler.send_response(status)
        for key, value in (headers or {}).items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def close(self) -> None:
        super().close()
        self._server.shutdown()
        self._server.server_close()


class WebWithoutRanges(Web):
    ranges = False


class Hub(Web):
    """The few calls of Hugging Face's hub that its file system makes: one data set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prefix = "hf://datasets/me/data/"
        self.secrets = ("hf_" + "SecretOfTheHub",)
        self.environment = {
            "HF_ENDPOINT": self.proxy.url,
            "HF_TOKEN": self.secrets[0],
            "HF_HOME": str(folder),
        }
        self.wrong = {"HF_TOKEN": "hf_" + "TheTokenOfSomebodyElse"}

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        given = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        path, _, query = urllib.parse.unquote(handler.path).partition("?")
        repository, _, rest = path.partition("/me/data")
        if handler.headers.get("Authorization") != f"Bearer {self.secrets[0]}":
            self.send(handler, 401, b"", {"X-Error-Code": "RepoNotFound"})
        elif "/me/data" not in path:
            self.send(handler, 404, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository == "/datasets" and rest.startswith("/resolve/"):
            name = rest.split("/", 3)[3]
            if name in self.files:
                self.send_file(handler, name)
            else:
                self.send(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})
        elif rest.startswith("/tree/"):
            folder = [*rest.split("/", 3), ""][3].strip("/")
            found = self._list(folder, "recursive=true" in query.lower())
            self._send_json(handler, 200 if found or not folder else 404, found)
        elif rest.startswith("/paths-info/"):
            wanted = urllib.parse.parse_qs(given.decode()).get("paths") or json.loads(given)["paths"]
            self._send_json(handler, 200, [each for each in self._list("", True) if each["path"] in wanted])
        else:
            facts = {"id": "me/data", "sha": "a" * 40, "siblings": [], "private": False, "tags": []}
            self._send_json(handler, 200, facts | {"downloads": 0, "likes": 0})

    def _list(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        """Return what the hub says of what is in a folder, or below it."""
        above = f"{folder}/" if folder else ""
        below = [name for name in sorted(self.files) if name.startswith(above)]
        folders = {above + "/".join(name[len(above) :].split("/")[:-1]) for name in below} - {above}
        listed = [{"type": "directory", "path": each, "size": 0, "oid": "d" * 40} for each in sorted(folders)]
        listed += [
            {"type": "file", "path": name, "size": len(self.files[name]), "oid": self.marks[name]}
            for name in below
        ]
        return [each for each in listed if recursive or "/" not in str(each["path"])[len(above) :]]

    def _send_json(self, handler: http.server.BaseHTTPRequestHandler, status: int, value: Any) -> None:
        headers = {"Content-Type": "application/json"}
        if status == 404:
            headers["X-Error-Code"] = "EntryNotFound"
        self.send(handler, status, json.dumps(value).encode(), headers)
