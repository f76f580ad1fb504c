"""Runs the server of the page until the user ends it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from insitu.base.disk.access import PRIVATE_FILE, make_folder
from insitu.base.disk.durable import staged_file
from insitu.base.errors import ClusterError, InputError
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.paths import HOME_ENV, Paths
from insitu.base.process.processes import ProcessIdentity, has_ended, identify_process, read_boot

if TYPE_CHECKING:
    import uvicorn

DEFAULT_PORT = 8780
"""Tried first if no port is given; if it is in use, another one is chosen."""
_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class UIOptions:
    """Options of `insitu ui`."""

    #: The address or name that is listened on.
    host: str = "127.0.0.1"
    #: The port; None: DEFAULT_PORT or another one, 0: chosen by the system.
    port: int | None = None
    #: PEM file of a certificate, with those that it depends on.
    certificate: Path | None = None
    #: PEM file of its key.
    key: Path | None = None
    #: Whether a certificate is made that browsers don't know.
    self_signed: bool = False
    #: The address under which a proxy that ends TLS shows the page, such as `https://insitu.example.com`.
    proxy: str | None = None
    #: Whether it prints a link that signs in. A log keeps it, so a page that is served for others doesn't.
    prints_link: bool = True

    @property
    def encrypted(self) -> bool:
        """Whether this server itself speaks TLS."""
        return self.self_signed or self.certificate is not None


def check_options(options: UIOptions) -> None:
    """Raise InputError for options that would let the page be used, or read on the way, by anybody."""
    if (options.certificate is None) != (options.key is None):
        raise InputError("--certificate and --key go together. Received: one of them")
    if options.self_signed and options.certificate is not None:
        raise InputError("--self-signed makes a certificate. Received: --self-signed with --certificate")
    if options.proxy is not None:
        parts = urlsplit(options.proxy)
        if (
            parts.scheme != "https"
            or not parts.netloc
            or parts.path.strip("/")
            or parts.query
            or parts.username
        ):
            raise InputError(
                f"--proxy is the address that users open, such as https://insitu.example.com. Received: "
                f"{options.proxy}"
            )
    if not is_loopback(options.host) and not options.encrypted and options.proxy is None:
        raise InputError(
            f"An address that others reach needs TLS: give --certificate FILE --key FILE, or --self-signed; "
            f"or --proxy URL where a proxy of yours ends TLS. Received: --host {options.host} without any"
        )


def find_origins(options: UIOptions, port: int) -> frozenset[str]:
    """Return the origins under which browsers reach the server on `port`."""
    scheme = "https" if options.encrypted else "http"
    names = {options.host}
    if is_loopback(options.host):
        names |= {"127.0.0.1", "localhost"}
    elif options.host in ("0.0.0.0", "::"):
        names = {socket.gethostname(), socket.getfqdn(), *_list_addresses()}
    origins = {f"{scheme}://{_bracket(name.lower())}:{port}" for name in names}
    if options.proxy is not None:
        origins.add(options.proxy.rstrip("/").lower())
    # Browsers leave the port out if it is that of the scheme.
    short = {o.removesuffix(":443" if o.startswith("https:") else ":80") for o in origins}
    return frozenset(origins | short)


def _list_addresses() -> set[str]:
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in families and "%" not in address.address
    }


def _bracket(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def open_socket(options: UIOptions, default: int = DEFAULT_PORT, what: str = "The page") -> socket.socket:
    """Return a listening socket; without a port at `default`, or another one. Raises InputError if the
    address can't be listened on."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    ports = [options.port] if options.port is not None else [default, 0]
    for port in ports:
        try:
            return socket.create_server((options.host, port), family=family, backlog=256)
        except OSError as error:
            if port == ports[-1]:
                raise InputError(
                    f"{what} needs an address and a port of this machine that nobody uses. Received: "
                    f"{options.host} port {port} ({error.strerror}). Leave --port out to have one chosen"
                ) from error
    raise ClusterError("no port was tried")


def serve(paths: Paths, options: UIOptions, notify: Callable[[str], None], open_page: bool) -> None:
    """Serve the page until SIGINT or SIGTERM. `notify` gets the link; `open_page` shows it in a browser.

    Raises InputError for options that can't be used, and if a page of this home runs already.
    """
    check_options(options)
    make_folder(paths.home, paths.home)
    _check_alone(paths)
    listening = open_socket(options)
    port = int(listening.getsockname()[1])
    with contextlib.ExitStack() as stack:
        stack.callback(listening.close)
        # uvicorn raises the signal again at its end, which would skip the removal below.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        with contextlib.suppress(KeyboardInterrupt):
            server = _make_server(paths, options, port, stack, notify, open_page)
            server.run(sockets=[listening])


def _check_alone(paths: Paths) -> None:
    """Raise InputError if a page of this user and home answers: --link and programs find just one."""
    try:
        link = request_link(paths, "operate")
    except (InputError, ClusterError):
        return
    raise InputError(
        "A user has one page for a home. Received: a second one. Open the one that runs, or end it "
        f"first: {link}"
    )


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _make_server(
    paths: Paths,
    options: UIOptions,
    port: int,
    stack: contextlib.ExitStack,
    notify: Callable[[str], None],
    open_page: bool,
) -> uvicorn.Server:
    import uvicorn

    from insitu.ui.access import Access
    from insitu.ui.app import make_application
    from insitu.ui.boards import Boards
    from insitu.ui.guard import AuditLog
    from insitu.ui.started_commands import StartedCommands
    from insitu.ui.state import UIState
    from insitu.ui.uploads import Uploads

    user = os.geteuid()
    access, uploads = Access(), Uploads()
    commands = StartedCommands({**os.environ, HOME_ENV: str(paths.home)})
    stack.callback(uploads.close)
    boards = Boards({**os.environ, HOME_ENV: str(paths.home)})
    stack.callback(commands.close)
    stack.callback(boards.close)
    scheme = "https" if options.encrypted else "http"
    url = (options.proxy or f"{scheme}://{_bracket(_name_for_users(options.host))}:{port}").rstrip("/")
    state = UIState(
        paths=paths,
        access=access,
        cookie=f"insitu-session-{port}",
        secure=url.startswith("https:"),
        url=url,
        uploads=uploads,
        commands=commands,
        boards=boards,
    )
    app = make_application(state, AuditLog(paths.ui_audit(user)), find_origins(options, port))
    server = uvicorn.Server(make_config(app, options, notify))
    state.ends = lambda: server.should_exit
    # Jobs that ended long ago are read once, before somebody waits for them.
    threading.Thread(target=state.index.list, daemon=True).start()
    record = {"url": url, "port": port, "host": options.host, "tls": options.encrypted, **_identify_itself()}
    record |= {"operate": access.make_bearer("operate"), "view": access.make_bearer("view")}
    _write_record(paths.ui(user), record)
    stack.callback(_remove_record, paths.ui(user), os.getpid())
    link = f"{url}/login?token={access.make_link('operate', time.monotonic())}"
    once = "The link works once, within 15 minutes; `insitu ui --link` prints another one."
    notify(f"The page: {link if options.prints_link else url}")
    notify(f"{once if options.prints_link else '`insitu ui --link` prints a link.'} Ctrl-C ends the page.")
    if open_page:
        import webbrowser

        webbrowser.open(link)
    return server


def make_config(app: Any, options: UIOptions, notify: Callable[[str], None]) -> uvicorn.Config:
    """Return how uvicorn serves: it trusts no header of a proxy, and bounds callers and their silence."""
    import uvicorn

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        timeout_keep_alive=10,
        timeout_graceful_shutdown=3,
        limit_concurrency=1000,
    )
    with _tls_files(options, notify) as files:
        if files is not None:
            config.ssl_certfile, config.ssl_keyfile = str(files[0]), str(files[1])
        config.load()
        if config.ssl is not None:
            config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return config


def _name_for_users(host: str) -> str:
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


@contextlib.contextmanager
def _tls_files(options: UIOptions, notify: Callable[[str], None]) -> Iterator[tuple[Path, Path] | None]:
    """Yield the files of certificate and key, None without TLS. A key that is made stays on no disk."""
    if options.certificate is not None and options.key is not None:
        for file in (options.certificate, options.key):
            if not os.access(file, os.R_OK):
                raise InputError(
                    f"--certificate and --key are PEM files. Received: {file}, which can't be read"
                )
        yield options.certificate, options.key
    elif options.self_signed:
        from insitu.base.net.certificates import make_certificate

        made = make_certificate(_name_for_users(options.host))
        notify(
            f"SHA-256 of its certificate, to compare in the browser: {hashlib.sha256(made.der).hexdigest()}"
        )
        with tempfile.TemporaryDirectory(prefix="insitu-tls-") as folder:
            certificate, key = Path(folder, "certificate.pem"), Path(folder, "key.pem")
            certificate.write_text(made.pem)
            key.touch(PRIVATE_FILE)
            key.write_text(made.key_pem)
            yield certificate, key
    else:
        yield None


def _identify_itself() -> dict[str, Any]:
    """Return an id that differs from a later process' with the same number."""
    itself = identify_process(os.getpid())
    return {"pid": os.getpid(), "start": 0 if itself is None else itself.start, "boot": read_boot()}


def _is_running(record: dict[str, Any]) -> bool:
    """Return whether the page that has written a record runs on this machine: else somebody else may have its
    port, who must not receive its secret or be shown."""
    identity = ProcessIdentity(int(record["pid"]), int(record["start"]))
    return record["boot"] == read_boot() and not has_ended(identity)


def _write_record(path: Path, record: dict[str, Any]) -> None:
    with staged_file(path) as staged:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE_FILE)
        with open(descriptor, "w") as file:
            os.fchmod(descriptor, PRIVATE_FILE)
            json.dump(record, file, indent=1)
        staged.replace(path)


def _remove_record(path: Path, pid: int) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        if json.loads(path.read_text())["pid"] == pid:
            path.unlink()


def request_link(paths: Paths, role: str) -> str:
    """Return another link of the server that runs for this home. Raises InputError if none does."""
    path = paths.ui(os.geteuid())
    try:
        record = json.loads(path.read_text())
        if not _is_running(record):
            raise ProcessLookupError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            "--link asks the page that runs. Received: none of this home on this machine. Start `insitu ui`"
        ) from error
    host = record["host"] if record["host"] not in ("0.0.0.0", "::") else "127.0.0.1"
    if record["tls"]:
        # The certificate may be one that no authority knows; the connection stays on this machine.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, record["port"], timeout=_TIMEOUT, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, record["port"], timeout=_TIMEOUT)
    headers = {
        "Authorization": f"Bearer {record['operate']}",
        "Content-Type": "application/json",
        "Host": urlsplit(record["url"]).netloc,
    }
    try:
        connection.request("POST", "/api/v1/links", json.dumps({"role": role}), headers)
        answer = connection.getresponse()
        body = answer.read()
    except OSError as error:
        raise ClusterError(f"The page of process {record['pid']} doesn't answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 201:
        raise ClusterError(
            f"The page of process {record['pid']} made no link: {body.decode(errors='replace')}"
        )
    return str(json.loads(body)["url"])
