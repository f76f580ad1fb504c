"""Where the page listens, and who is let near it."""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from insitu.base.errors import InputError
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.paths import Paths
from insitu.ui import running
from insitu.ui.running import (
    UIOptions,
    check_options,
    find_origins,
    open_socket,
    request_link,
    serve,
)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.example.com"])
def test_an_address_that_others_reach_needs_tls_or_a_proxy(host: str) -> None:
    with pytest.raises(InputError, match="needs TLS"):
        check_options(UIOptions(host))
    check_options(UIOptions(host, self_signed=True))
    check_options(UIOptions(host, proxy="https://insitu.example.com"))
    check_options(UIOptions(host, certificate=Path("a"), key=Path("b")))


@pytest.mark.parametrize(
    "proxy", ["http://insitu.example.com", "insitu.example.com", "https://a/b", "https://u@a", "https://a?x"]
)
def test_a_proxy_ends_tls_at_an_origin(proxy: str) -> None:
    with pytest.raises(InputError, match="--proxy"):
        check_options(UIOptions(proxy=proxy))


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="go together"):
        check_options(UIOptions(certificate=Path("a")))
    with pytest.raises(InputError, match="--self-signed"):
        check_options(UIOptions(certificate=Path("a"), key=Path("b"), self_signed=True))


def test_loopback_is_known() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "localhost.example.com", "")))


def test_origins_name_the_port_and_the_proxy() -> None:
    assert find_origins(UIOptions(), 81) == {"http://127.0.0.1:81", "http://localhost:81"}
    # A browser leaves the port out that its scheme has.
    assert find_origins(UIOptions("127.0.0.1"), 80) >= {"http://localhost", "http://localhost:80"}
    assert find_origins(UIOptions("10.0.0.1", self_signed=True), 443) == {
        "https://10.0.0.1",
        "https://10.0.0.1:443",
    }
    assert "https://a.example" in find_origins(UIOptions(proxy="https://a.example:443"), 9)
    with_proxy = find_origins(UIOptions(proxy="https://Insitu.example.com/"), 80)
    assert "https://insitu.example.com" in with_proxy
    assert find_origins(UIOptions("10.0.0.1", self_signed=True), 9) == {"https://10.0.0.1:9"}
    assert "http://[::1]:9" in find_origins(UIOptions("::1"), 9)
    assert not any("0.0.0.0" in origin for origin in find_origins(UIOptions("0.0.0.0", self_signed=True), 9))


def test_a_port_that_is_taken_is_named() -> None:
    with open_socket(UIOptions(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}"):
            open_socket(UIOptions(port=port))


def test_a_link_needs_a_page_that_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Start `insitu ui`"):
        request_link(Paths(tmp_path), "view")


def test_a_second_page_of_a_home_is_refused_with_a_link(tmp_path: Path) -> None:
    asked: list[str] = []

    class Links(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.headers["Authorization"])
            body = b'{"url": "http://127.0.0.1:1/login?token=other"}'
            self.send_response(201)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Links) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        record = {
            "host": "127.0.0.1",
            "port": port,
            "tls": False,
            "url": f"http://127.0.0.1:{port}",
            "operate": "abc",
            **running._identify_itself(),
        }
        path = Paths(tmp_path).ui(os.geteuid())
        for gone in ({"start": 1}, {"pid": 1 << 30}, {"boot": "before"}, {"pid": "x"}):
            # Somebody else may listen there by now.
            path.write_text(json.dumps(record | gone))
            with pytest.raises(InputError, match="none of this home on this machine"):
                request_link(Paths(tmp_path), "view")
        assert asked == []
        path.write_text(json.dumps(record))
        with pytest.raises(InputError, match="first: http://127"):
            serve(Paths(tmp_path), UIOptions(port=0), print, open_page=False)
        server.shutdown()
    assert asked == ["Bearer abc"]


@pytest.mark.parametrize("prints_link", [True, False])
def test_a_log_need_not_keep_a_link_that_signs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prints_link: bool
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    said: list[str] = []
    serve(Paths(tmp_path), UIOptions(port=0, prints_link=prints_link), said.append, open_page=False)
    assert ("token=" in "".join(said)) == prints_link and "insitu ui --link" in said[1]
