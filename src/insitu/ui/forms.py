"""What users give to start a job or an import, checked field by field."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from insitu.cluster import Request
from insitu.config import DeviceSettings
from insitu.errors import InputError
from insitu.service import format_start_command
from insitu.spec import NO_CACHE

_Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
_Count = Annotated[int, Field(ge=0, le=100_000)]


class StartForm(BaseModel):
    """A job to start: the options of `insitu start`."""

    model_config = ConfigDict(extra="forbid")

    cache: _Text = Field(NO_CACHE, description="The cache to train on; - for none.")
    job_dir: Annotated[_Text, Field(min_length=1)] | None = Field(
        None, description="Folder or .zip with the script, on the server's machine."
    )
    upload: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        None, description="A .zip that was sent to /api/v1/uploads, in place of job_dir."
    )
    command: Annotated[list[_Text], Field(min_length=1, max_length=1000)] = Field(
        description="JOB_CMD and its arguments.", examples=[["train.py", "--epochs", "3"]]
    )
    nodes: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=1000)] = (
        Field(default_factory=list, description="Nodes that tasks run on; none: all.")
    )
    workers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    shards: Annotated[int, Field(ge=1, le=100_000)] | None = None
    ps: _Count | Literal["auto"] = 0
    ps_backups: _Count = 0
    chief: bool = False
    evaluator: bool = False
    name: Annotated[str, Field(max_length=90)] | None = None
    max_restarts: _Count = 3
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    stall_timeout: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 600.0
    on_loss: Literal["replace", "adopt", "restart"] = "replace"
    standby: _Count | None = None
    memory_checkpoint: bool = False
    gpus_per_worker: _Count = Field(
        0, description="GPUs of its own for each worker; 0: those that there are."
    )
    memory_per_worker: Annotated[int, Field(ge=0, le=1 << 40)] = Field(
        0, description="MiB of main memory that each worker must find free on its node; 0: any."
    )
    memory_limit: Annotated[int, Field(ge=1, le=1 << 40)] | None = Field(
        None, description="MiB that a worker may use of each GPU."
    )

    def to_request(self, job_dir: Path) -> Request:
        """Return what `insitu start` would be given."""
        options = self.model_dump(exclude={"job_dir", "upload", "command", "ps", "nodes", "memory_limit"})
        return Request(
            job_dir=job_dir,
            command=tuple(self.command),
            ps=None if self.ps == "auto" else self.ps,
            nodes=tuple(self.nodes),
            settings=DeviceSettings(memory_limit=self.memory_limit),
            **options,
        )


class ImportForm(BaseModel):
    """A cache to import: the options of `insitu import`."""

    model_config = ConfigDict(extra="forbid")

    cache: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^-\x00][^\x00]*$")]
    sources: Annotated[list[_Text], Field(max_length=1000)] = Field(
        default_factory=list, description="Files, folders or globs on the server's machine."
    )
    upload: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = Field(
        None, description="A file that was sent to /api/v1/uploads, in place of sources."
    )
    partitions: Annotated[int, Field(ge=1, le=100_000)] | None = None
    backups: Annotated[int, Field(ge=0, le=100)] = 0
    format: Literal["npy", "npz", "parquet", "csv", "arrow", "tfrecord", "ndjson"] | None = None
    key: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    label_from_filename: bool = False
    split: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    overwrite: bool = False

    def to_options(self) -> list[str]:
        """Return the options of `insitu import`."""
        options = []
        for name in ("partitions", "backups", "format", "key", "split"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                options.append(f"--{name}={value}")
        for name in ("label_from_filename", "overwrite"):
            if getattr(self, name):
                options.append(f"--{name.replace('_', '-')}")
        return options


class ScaleForm(BaseModel):
    """A number of workers."""

    model_config = ConfigDict(extra="forbid")

    workers: Annotated[int, Field(ge=1, le=100_000)]


class ResumeForm(BaseModel):
    """What a job that goes on takes of its caller's shell."""

    model_config = ConfigDict(extra="forbid")

    env: dict[_Text, _Text | None] = Field(
        default_factory=dict,
        max_length=100,
        description="Secrets that the job was started with, by name; null: it goes on without.",
    )


class LinkForm(BaseModel):
    """A link to make."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["view", "operate"] = "view"


_CHECKED = ("chief", "evaluator", "memory_checkpoint", "label_from_filename", "overwrite")


def read_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an HTML form has sent as one of the forms above takes it: empty fields are left out."""
    values: dict[str, Any] = {}
    for name, text in fields.items():
        if not isinstance(text, str) or not text.strip():
            continue
        if name in _CHECKED:
            values[name] = True
        elif name == "command":
            values[name] = split_command(text)
        elif name == "nodes":
            values[name] = text.replace(",", " ").split()
        elif name == "sources":
            values[name] = [line.strip() for line in text.splitlines() if line.strip()]
        else:
            values[name] = text.strip()
    return values


def split_command(text: str) -> list[str]:
    """Return a command as a shell splits it. Raises InputError for a quote without its end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"The command has a quote without its end. Received: {text}") from error


def format_command_line(request: Request) -> str:
    """Return the line that starts the same job in a shell."""
    return shlex.join(format_start_command(request))
