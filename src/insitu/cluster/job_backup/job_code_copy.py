"""Carries the copy of JOB_DIR, and the few files that tasks read, to another host: messages of parts."""

from __future__ import annotations

import base64
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file, write_synced
from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.cluster.engines import Message
from insitu.cluster.job_backup.folder_copies import PART_BYTES


def read_job_files(job: JobPaths) -> Iterator[Message]:
    """Yield the messages that carry what tasks read: secrets, shard maps, code. Raises OSError."""
    yield {"do": "secret", "data": base64.b64encode(job.secret.read_bytes()).decode()}
    yield {"do": "signing_secret", "data": base64.b64encode(read_signing_secret(job)).decode()}
    for path in sorted(job.shard_maps.glob("*.json")):
        yield encode_shards(path.read_text())
    with tempfile.TemporaryFile() as packed:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(job.code, ".")
        packed.seek(0)
        while True:
            data = packed.read(PART_BYTES)
            last = len(data) < PART_BYTES
            yield {"do": "code", "part": base64.b64encode(data).decode(), "last": last}
            if last:
                return


def read_signing_secret(job: JobPaths) -> bytes:
    """Return the secret that a job signs with what it writes. Raises OSError."""
    return (job.signing_secret if job.signing_secret.exists() else job.secret).read_bytes()


def encode_shards(text: str) -> Message:
    """Return the message that carries the shard map of a cache."""
    return {"do": "shards", "cache": json.loads(text)["cache"], "text": text}


def encode_refresh(epoch: int, text: str) -> Message:
    """Return the message that carries the record of which rows are read from an epoch on."""
    return {"do": "refresh", "epoch": epoch, "text": text}


class JobFilesCopy:
    """Writes what `read_job_files` carries into a new folder of a job."""

    def __init__(self, job: JobPaths) -> None:
        self._job = job
        self._packed: IO[bytes] | None = None

    def take(self, message: Message) -> None:
        """Take in one message. Raises OSError, ClusterError."""
        match message["do"]:
            case "secret" | "signing_secret":
                path = self._job.secret if message["do"] == "secret" else self._job.signing_secret
                path.unlink(missing_ok=True)
                write_synced(path, base64.b64decode(message["data"]), PRIVATE_FILE, sync=False)
            case "shards":
                self._job.shard_maps.mkdir(exist_ok=True)
                replace_file(self._job.shard_map(str(message["cache"])), str(message["text"]).encode())
            case "refused":
                replace_file(self._job.refused_shards(str(message["cache"])), str(message["text"]).encode())
            case "refresh":
                self._job.refreshes.mkdir(mode=0o700, exist_ok=True)
                replace_file(self._job.refresh(int(message["epoch"])), str(message["text"]).encode())
            case "code":
                self._add_code(base64.b64decode(message["part"]), last=message["last"] is True)

    def _add_code(self, data: bytes, *, last: bool) -> None:
        if self._packed is None:
            self._packed = tempfile.TemporaryFile()  # noqa: SIM115
        self._packed.write(data)
        if not last:
            return
        packed, self._packed = self._packed, None
        with packed:
            packed.seek(0)
            unpack_code(packed, self._job.code)


def unpack_code(packed: IO[bytes], target: Path) -> None:
    """Unpack a copy of JOB_DIR into a folder, in the place of what is there. Raises ClusterError, OSError."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        with tarfile.open(fileobj=packed) as archive:
            _extract(archive, target)
    except tarfile.TarError as error:
        raise ClusterError(f"The copy of JOB_DIR can't be unpacked: {error}. Try again") from error


def _extract(archive: tarfile.TarFile, target: Path) -> None:
    """Unpack files and folders, and links that stay within `target`. Raises TarError for others."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(target, filter="data")
        return
    links: set[Path] = set()  # Python before 3.11.4
    for member in archive:
        path = Path(os.path.normpath(member.name))
        leads_to = Path(os.path.normpath(path.parent / member.linkname)) if member.issym() else path
        inside = not any(each.is_absolute() or ".." in each.parts for each in (path, leads_to))
        if (
            not inside
            or links & set(path.parents)
            or not (member.isreg() or member.isdir() or member.issym())
        ):
            raise tarfile.ExtractError(f"{member.name} isn't a file, folder or link within it")
        if member.issym():
            links.add(path)
    archive.extractall(target)
