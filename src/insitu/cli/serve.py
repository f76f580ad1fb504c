"""The command that answers REST predictions: serve."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from insitu.base.errors import InputError
from insitu.base.net.unauthenticated import is_loopback
from insitu.base.paths import Paths
from insitu.base.plugins import EXTENSIONS, load_plugin
from insitu.cli.console import print_notice
from insitu.cli.describe import complete_either

_MODULES = ("fastapi", "uvicorn")
_MIN_TOKEN = 16
_MAX_TOKEN = 4096
_WATCH_SECONDS = 5.0
"""Seconds between two looks for a newer export."""
_HELP = """
Answer REST predictions of a model, for trying it out, as TensorFlow Serving does.

MODEL is a `.keras`, `.onnx` or `.stablehlo` file, or a SavedModel's folder; or a job, of which the newest
export is taken, or the model that its script has saved last. A `.keras` file with feature columns takes the
features themselves, texts too. KERAS_BACKEND names the backend that loads it. Only this machine reaches the
server, unless --host says otherwise; then it needs TLS and a token. It needs `pip install 'insitu[ui]'`.

Examples:

    insitu serve model.keras
    insitu serve people-3fa9c1 --best --reload
    curl localhost:8501/v1/models/people:predict -d '{"instances": [{"age": 31.0, "word": "yes"}]}'
    insitu serve model.onnx --host 10.0.0.1 --certificate a.pem --key a.key --token token.txt
"""


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="JOB_OR_MODEL", help="A job, or a model's path.", autocompletion=complete_either
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(help="The model's name in addresses.", show_default="that of the job or file"),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a job: the model of its BestExporter.")] = False,
    exporter: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a job: the newest model of this exporter.")
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Of a job: answer by a newer export as soon as there is one.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address that the server listens on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Its port; 0: chosen by the system.", show_default="8501 if free"
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of a certificate for TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of its key.")] = None,
    self_signed: Annotated[
        bool, typer.Option("--self-signed", help="Make a certificate, which callers don't know.")
    ] = False,
    token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of a token that each request must bring."),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Take a SavedModel that uses files: it may do what you may.")
    ] = False,
    max_bytes: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Bytes of a request at most.")] = 16
    << 20,
) -> None:
    secret = None if token is None else read_token_file(token)
    if not is_loopback(host) and secret is None:
        raise InputError(
            f"At an address that others reach, requests bring a token: give --token FILE. Received: --host "
            f"{host} without it"
        )
    missing = [module for module in _MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise InputError(
            f"The server needs libraries that come with `pip install 'insitu[ui]'`. Received: no "
            f"{', '.join(missing)}"
        )
    from insitu.ui import UIOptions, check_options

    exports = load_plugin(EXTENSIONS, "exports")

    options = UIOptions(host, port, certificate, key, self_signed)
    check_options(options)
    path = Path(model)
    if path.exists() or path.suffix:
        if best or exporter is not None or reload:
            raise InputError(f"--best, --exporter and --reload are said of a job. Received: {model}, a path")
        if not path.exists():
            raise InputError(f"A model is a file or a folder that is there. Received: {model}, which isn't")
        chosen, first = path.stem if path.suffix else path.name, _load(path, 1, trust)
        holder = exports.ModelHolder(first, None, _WATCH_SECONDS)
    else:
        find = _find_in_job(model, best, exporter, trust)
        found = find(-1)
        if found is None:
            raise InputError(
                f"A job's model comes from its exporters or its script. Received: {model}, with none"
            )
        chosen = model
        holder = exports.ModelHolder(found, find if reload else None, _WATCH_SECONDS)
    exports.serve_model(
        _check_name(name or chosen), holder, options, print_notice, token=secret, max_bytes=max_bytes
    )


def _find_in_job(name: str, best: bool, exporter: str | None, trust: bool) -> Callable[[int], Any]:
    """Return a function that loads the newest export of a job, None if its step is the one given."""
    from insitu.cluster import find_export, find_job

    job = find_job(Paths.default(), name)
    if best and exporter is not None:
        raise InputError(f"--best names an exporter too. Received: --exporter {exporter}. Leave one out")

    def find(step: int) -> Any:
        model = find_export(job, best=best, exporter=exporter)
        return None if model.step == step else _load(model.path, model.step, trust)

    return find


def _load(path: Path, version: int, trust: bool) -> Any:
    """Return the model as the server takes it: a Served of the extension `exports`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # as in the tasks of jobs: warnings, and no news
    load_plugin(EXTENSIONS, "estimator")  # registers its layers
    exports = load_plugin(EXTENSIONS, "exports")
    return exports.Served(version, exports.load_export(path, trust=trust))


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,200}", name):
        raise InputError(
            f"A model's name is part of an address: letters, digits, '_', '-', '.'. Received: {name!r}. Give "
            "one by --name"
        )
    return name


def read_token_file(path: Path) -> str:
    """Return the token in a file that only its owner may read. Raises InputError."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            token = file.read(_MAX_TOKEN + 1).strip()
    except OSError as error:
        raise InputError(
            f"--token is a file with a token, as `openssl rand -hex 32` makes one. Received: {path} "
            f"({error.strerror})"
        ) from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise InputError(f"Only the owner may read a token. Received: {path}. Run chmod 600 {path}")
    if not re.fullmatch(rb"[\x21-\x7e]{%d,%d}" % (_MIN_TOKEN, _MAX_TOKEN), token):
        raise InputError(
            f"A token has {_MIN_TOKEN} to {_MAX_TOKEN} visible ASCII characters. Received: {path} with "
            f"{len(token)} bytes, or others. Write one by `openssl rand -hex 32`"
        )
    return token.decode()


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("serve", help=_HELP)(serve)
