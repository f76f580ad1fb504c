"""The command that serves the page: ui."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.cli.console import print_notice

_HELP = """
Serve a page in the browser: jobs with their tasks, curves, logs and recoveries; data; nodes; a form
to start jobs.

It prints a link that signs in once. Only this machine reaches the page, unless --host says otherwise; then it
needs TLS. What it changes is written to an audit log. Programs use /api/v1; their tokens are in the file
ui-USER.json in the folder $INSITU_HOME, by default ~/.insitu. It needs `pip install 'insitu[ui]'`.

Examples:

    insitu ui
    insitu ui --port 8080 --no-browser
    insitu ui --link --role view
    insitu ui --host 10.0.0.1 --certificate page.pem --key page.key
    insitu ui --proxy https://insitu.example.com
"""
_MODULES = ("fastapi", "uvicorn", "jinja2", "python_multipart")


def ui(
    host: Annotated[str, typer.Option(help="Address that the page listens on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Its port; 0: chosen by the system.", show_default="8780 if free"
        ),
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page, where there is a display.")
    ] = True,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of a certificate for TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of its key.")] = None,
    self_signed: Annotated[
        bool, typer.Option("--self-signed", help="Make a certificate, about which browsers warn.")
    ] = False,
    proxy: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the page behind a proxy that ends TLS.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Print another link of the page that runs, and end.")
    ] = False,
    no_link: Annotated[
        bool, typer.Option("--no-link", help="Print no link that signs in, such as into a log; --link does.")
    ] = False,
    role: Annotated[
        str, typer.Option(metavar="view|operate", help="With --link: what it lets do.")
    ] = "operate",
) -> None:
    if role not in ("view", "operate"):
        raise InputError(f"--role is view or operate. Received: {role}")
    if role != "operate" and not link:
        raise InputError(
            f"--role goes with --link. Received: --role {role} without it. Start `insitu ui`, then run "
            f"`insitu ui --link --role {role}`"
        )
    if link:
        from insitu.ui import request_link

        typer.echo(request_link(Paths.default(), role))
        return
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"The page needs libraries that come with `pip install 'insitu[ui]'`. Received: "
            f"no {', '.join(missing)}"
        )
    from insitu.ui import UIOptions, serve

    options = UIOptions(host, port, certificate, key, self_signed, proxy, not no_link)
    serve(Paths.default(), options, print_notice, browser and has_display() and not no_link)


def has_display() -> bool:
    """Return whether a browser could be shown."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("ui", help=_HELP)(ui)
