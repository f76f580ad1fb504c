"""Calls of the API by a kubeconfig, to a server that answers what a test says."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from free_ports import free_addresses
from k8s_fake import FakeApi, status_of

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.kubernetes.client import Client, KubeconfigTransport, path_of


class Handler(http.server.BaseHTTPRequestHandler):
    calls: ClassVar[list[tuple[str, str, dict[str, str], Any]]] = []
    answers: ClassVar[list[tuple[int, bytes]]] = []

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.calls.append((self.command, self.path, dict(self.headers), body and json.loads(body)))
        code, data = self.answers.pop(0) if self.answers else (200, b"{}")
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = do_POST = do_DELETE = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.calls, Handler.answers = [], []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def write_kubeconfig(
    path: Path, server: str, monkeypatch: pytest.MonkeyPatch, namespace: str = "team"
) -> None:
    context = {"cluster": "c", "user": "u", **({"namespace": namespace} if namespace else {})}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [{"name": "here", "context": context}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(config))
    use_kubeconfig(path, monkeypatch)


def use_kubeconfig(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))


@pytest.fixture
def client(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    write_kubeconfig(tmp_path / "config", server, monkeypatch)
    return Client(KubeconfigTransport(""), "")


def test_an_object_is_applied_as_the_user_of_the_context(client: Client) -> None:
    each = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "head"}}
    client.apply(each, dry_run=True)
    ((method, path, headers, body),) = Handler.calls
    assert (method, body) == ("PATCH", each)
    assert path.startswith("/api/v1/namespaces/team/services/head?fieldManager=insitu&force=true")
    assert "fieldValidation=Strict" in path and path.endswith("dryRun=All")
    assert headers["authorization"] == "Bearer secret-token"
    assert headers["Content-Type"] == "application/apply-patch+yaml"


def test_the_namespace_is_that_of_the_context_unless_it_is_given(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(tmp_path / "config", server, monkeypatch, namespace="")
    transport = KubeconfigTransport("here")
    assert Client(transport, "").namespace == "default" and Client(transport, "b").namespace == "b"


def test_paths_have_a_namespace_unless_the_kind_has_none() -> None:
    assert path_of("StatefulSet", "a") == "/apis/apps/v1/namespaces/a/statefulsets"
    assert path_of("Node", "a", "n") == "/api/v1/nodes/n"


def test_an_answer_that_may_change_is_asked_for_again(client: Client) -> None:
    Handler.answers = [status_of(503, "ServiceUnavailable", "starting"), (200, b'{"items": [{"a": 1}]}')]
    assert client.list("Pod") == [{"a": 1}] and len(Handler.calls) == 2


def test_an_object_is_not_made_twice(client: Client) -> None:
    Handler.answers = [status_of(503, "ServiceUnavailable", "starting")]
    with pytest.raises(ClusterError, match=r"must create Secret a\. Received: starting"):
        client.create({"kind": "Secret", "metadata": {"name": "a"}})
    assert len(Handler.calls) == 1


def test_a_server_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = free_addresses(1)
    write_kubeconfig(tmp_path / "config", f"http://{address}", monkeypatch)
    with pytest.raises(ClusterError, match=rf"must answer\. Received: http://{address}: .*refused"):
        Client(KubeconfigTransport(""), "").find("Pod", "a")


def test_no_kubeconfig_and_no_such_context_say_what_to_do(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_kubeconfig(tmp_path / "none", monkeypatch)
    with pytest.raises(InputError, match=r"A kubeconfig must name the cluster: \$KUBECONFIG"):
        KubeconfigTransport("")
    (tmp_path / "bad").write_text("contexts: [")
    use_kubeconfig(tmp_path / "bad", monkeypatch)
    with pytest.raises(InputError, match=r"A kubeconfig must name the cluster"):
        KubeconfigTransport("")
    write_kubeconfig(tmp_path / "config", server, monkeypatch)
    with pytest.raises(InputError, match=r"--context is a context of the kubeconfig: here\. Received: there"):
        KubeconfigTransport("there")


def test_the_client_of_kubernetes_comes_with_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kubernetes", None)
    with pytest.raises(InputError, match=r"pip install 'insitu\[kubernetes\]'"):
        KubeconfigTransport("")
    with pytest.raises(InputError, match=r"pip install 'insitu\[kubernetes\]'"):
        KubeconfigTransport.of_pod()


class Pod(socketserver.StreamRequestHandler):
    """Answers a call for a command in a container, by the WebSocket protocol of Kubernetes."""

    asked: ClassVar[list[str]] = []
    #: Frames: the number of the channel and its bytes. 1, 2: output and errors; 3: how it has ended.
    frames: ClassVar[list[tuple[int, bytes]]] = []

    def handle(self) -> None:
        lines = []
        while line := self.rfile.readline().strip():
            lines.append(line.decode())
        self.asked.append(lines[0])
        key = next(each.split(": ")[1] for each in lines if each.lower().startswith("sec-websocket-key"))
        magic = f"{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11".encode()
        accepted = base64.b64encode(hashlib.sha1(magic, usedforsecurity=False).digest()).decode()
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        protocol = "Sec-WebSocket-Protocol: v4.channel.k8s.io"
        self.wfile.write(f"{head}Sec-WebSocket-Accept: {accepted}\r\n{protocol}\r\n\r\n".encode())
        for channel, data in self.frames:
            self.wfile.write(bytes([0x82, len(data) + 1, channel]) + data)
        self.wfile.write(bytes([0x88, 0]))


@pytest.mark.parametrize(("status", "code"), [("Success", 0), ("Failure", 3)])
def test_a_command_runs_in_a_container(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end: Any = {"status": status}
    if code:
        end |= {"reason": "NonZeroExitCode", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}
    Pod.frames = [(1, b"one\n"), (2, b"wrong\n"), (1, b"two\n"), (3, json.dumps(end).encode())]
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Pod) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        write_kubeconfig(tmp_path / "config", f"http://127.0.0.1:{running.server_address[1]}", monkeypatch)
        done = Client(KubeconfigTransport(""), "").run("head-0", "head", ["insitu", "nodes", "--json"])
        running.shutdown()
        thread.join()
    assert done == (code, "one\ntwo\n", "wrong\n")
    assert Pod.asked[-1].startswith("GET /api/v1/namespaces/team/pods/head-0/exec?")
    assert "command=insitu&command=nodes&command=--json" in Pod.asked[-1]
    assert "container=head" in Pod.asked[-1]


def test_commands_in_pods_need_the_right_to(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: object) -> Any:
        raise OSError("the connection has ended")

    api.run = refuse
    with pytest.raises(ClusterError, match=r"must run in pod head-0\. Received: the connection has ended"):
        api.client().run("head-0", "head", ["true"])
