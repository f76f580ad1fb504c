"""`insitu --url https://HOST:PORT start`: sends a job to a page elsewhere, which starts it there."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from insitu.cli import INTERRUPTED
from insitu.cli.console import print_notice
from insitu.errors import InputError, InsituError
from insitu.paths import Paths

if TYPE_CHECKING:
    from insitu.cli.rest import RestClient

Follow = Callable[["RestClient", str], int]

HELP = """
Send JOB_DIR to the page, and start JOB_CMD there on a cache of the page.

JOB_DIR is a folder or a .zip of this machine. What is left out of a folder, and how much it may hold, is as
for `insitu start` without --url. Prints the job's id first, then the training's output, and ends with its
exit code; Ctrl-C leaves the job running. Needs a token with the role operate.

Examples:

    insitu --url https://grid-1:8780 start digits/train ./my_job train.py --epochs 3
    insitu --url https://grid-1:8780 start --detach --workers 2 - job.zip train.py
"""

_Cache = Annotated[str, typer.Argument(metavar="CACHE", help="The cache to train on; - for none.")]
_JobDir = Annotated[Path, typer.Argument(metavar="JOB_DIR", help="Folder or .zip with the script.")]
_Command = Annotated[list[str], typer.Argument(metavar="JOB_CMD [JOB_ARGS]", help="What to run in JOB_DIR.")]
_Workers = Annotated[
    int | None, typer.Option(help="Worker tasks.", show_default="one per node that owns data")
]
_Node = Annotated[
    list[str] | None, typer.Option(help="A node to run on; may be repeated.", show_default="all")
]
_Shards = Annotated[int | None, typer.Option(help="Shards to train on.")]
_Ps = Annotated[
    str | None, typer.Option(metavar="M|auto", help="Parameter server tasks; auto: one on each node.")
]
_PsBackups = Annotated[int | None, typer.Option(help="Mirrors of each server.")]
_Chief = Annotated[bool, typer.Option("--chief", help="Add a chief, which trains as well.")]
_Evaluator = Annotated[bool, typer.Option("--evaluator", help="Add a scorer of checkpoints.")]
_Name = Annotated[str | None, typer.Option(help="Beginning of the job's id.")]
_Detach = Annotated[bool, typer.Option("--detach", help="Don't stream the output.")]
_MaxRestarts = Annotated[
    int | None, typer.Option(help="How often a failed job is started again.", show_default="3")
]
_Seed = Annotated[int | None, typer.Option(help="What all randomness follows from.")]
_Threads = Annotated[int | None, typer.Option(help="Backend threads per replica.")]
_StallTimeout = Annotated[
    float | None, typer.Option(metavar="SEC", help="A job without progress for so long has failed.")
]
_OnLoss = Annotated[
    str | None, typer.Option(metavar="replace|adopt|restart", help="What to do when a worker is lost.")
]
_Standby = Annotated[int | None, typer.Option(help="Warmed processes that can take a lost worker's place.")]
_MemoryCheckpoint = Annotated[
    bool, typer.Option("--memory-checkpoint", help="Keep checkpoints in memory, too.")
]
_GpusPerWorker = Annotated[
    int | None, typer.Option(metavar="N", help="GPUs that each worker has for itself.")
]
_MemoryPerWorker = Annotated[
    int | None, typer.Option(metavar="MIB", help="Main memory that each worker must find free.")
]
_MemoryLimit = Annotated[int | None, typer.Option(metavar="MIB", help="Memory to take of each GPU.")]


def make_start(find_client: Callable[[], RestClient], follow: Follow) -> Callable[..., None]:
    """Return the command. `follow` prints a job's output to its end, and returns the exit code for that."""

    def start(
        cache: _Cache,
        job_dir: _JobDir,
        command: _Command,
        workers: _Workers = None,
        node: _Node = None,
        shards: _Shards = None,
        ps: _Ps = None,
        ps_backups: _PsBackups = None,
        chief: _Chief = False,
        evaluator: _Evaluator = False,
        name: _Name = None,
        detach: _Detach = False,
        max_restarts: _MaxRestarts = None,
        seed: _Seed = None,
        threads: _Threads = None,
        stall_timeout: _StallTimeout = None,
        on_loss: _OnLoss = None,
        standby: _Standby = None,
        memory_checkpoint: _MemoryCheckpoint = False,
        gpus_per_worker: _GpusPerWorker = None,
        memory_per_worker: _MemoryPerWorker = None,
        memory_limit: _MemoryLimit = None,
    ) -> None:
        given = {key: value for key, value in locals().items() if key in _OPTIONS}
        fields = {key: value for key, value in given.items() if value is not None and value is not False}
        fields |= {"cache": cache, "command": command, "nodes": node or []}
        client = find_client()
        job = send_job(client, job_dir, fields)
        if detach:
            return
        try:
            code = follow(client, job)
        except KeyboardInterrupt:
            print_notice(
                f"\nDetached; {job} goes on. `insitu --url {client.url} logs -f {job}` follows it, "
                f"`insitu --url {client.url} stop {job}` stops it."
            )
            code = INTERRUPTED
        raise typer.Exit(code)

    return start


_OPTIONS = (
    *("workers", "shards", "ps", "ps_backups", "chief", "evaluator", "name", "max_restarts", "seed"),
    *("threads", "stall_timeout", "on_loss", "standby", "memory_checkpoint", "gpus_per_worker"),
    *("memory_per_worker", "memory_limit"),
)
"""Fields of the form that options of the same names fill in."""


def send_job(client: RestClient, job_dir: Path, fields: dict[str, Any]) -> str:
    """Send a job's folder and start the job. Returns its id, which is printed.

    Raises InputError where the token, the folder or a field can't be used, and what the page answers.
    """
    session = client.get("session")
    if session["role"] != "operate":
        raise InputError(
            f"A job is started with a token of the role operate. Received: one of the role "
            f"{session['role']}. The file ui-USER.json of the page has both"
        )
    with tempfile.TemporaryDirectory(prefix="insitu-start-") as folder:
        archive = pack_job(job_dir, Path(folder))
        # Without a cache the job is named after it.
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", job_dir.absolute().stem).lstrip(".-")[:90]
        upload = client.send("uploads", file=archive, name=f"{stem or 'job'}.zip")["upload"]
    try:
        started = client.post("jobs", **fields, upload=upload)
    except BaseException:
        with contextlib.suppress(InsituError):
            client.delete("uploads", str(upload))
        raise
    job_id = str(started["job_id"])
    print_notice(job_id)
    return job_id


def pack_job(job_dir: Path, folder: Path) -> Path:
    """Return a .zip of JOB_DIR: itself where it is one, else one that is made in `folder`.

    Raises JobSpecError for what `insitu start` would refuse.
    """
    from insitu.cluster import pack_code

    return pack_code(job_dir, folder, Paths.default().home)
