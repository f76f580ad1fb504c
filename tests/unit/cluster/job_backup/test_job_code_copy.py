from __future__ import annotations

import base64
import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.cluster.job_backup import folder_copies
from insitu.cluster.job_backup.job_code_copy import JobFilesCopy, encode_refresh, read_job_files


@pytest.fixture
def job(tmp_path: Path) -> JobPaths:
    made = JobPaths(tmp_path / "here")
    (made.code / "parts").mkdir(parents=True)
    (made.code / "train.py").write_text("print(1)\n" * 1000)
    (made.code / "parts" / "run.sh").write_text("#!/bin/sh\n")
    (made.code / "parts" / "run.sh").chmod(0o755)
    made.secret.write_bytes(os.urandom(32))
    made.shard_maps.mkdir()
    made.shard_map("data/train").write_text('{"cache": "data/train"}')
    return made


def test_a_host_gets_code_secret_and_shards(
    job: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("insitu.cluster.job_backup.job_code_copy.PART_BYTES", 1000)
    assert folder_copies.PART_BYTES > 1000
    there = JobPaths(tmp_path / "there")
    there.root.mkdir()
    there.code.mkdir()
    (there.code / "old.py").write_text("")
    copy = JobFilesCopy(there)
    messages = list(read_job_files(job))
    assert len(messages) > 5
    for message in messages:
        copy.take(message)
    found = {str(p.relative_to(there.code)): p.read_bytes() for p in there.code.rglob("*") if p.is_file()}
    assert found == {"train.py": b"print(1)\n" * 1000, "parts/run.sh": b"#!/bin/sh\n"}
    assert os.access(there.code / "parts" / "run.sh", os.X_OK)
    assert there.secret.read_bytes() == there.signing_secret.read_bytes() == job.secret.read_bytes()
    assert stat.S_IMODE(there.secret.stat().st_mode) == 0o600
    assert there.shard_map("data/train").read_text() == '{"cache": "data/train"}'
    copy.take({"do": "refused", "cache": "data/test", "text": "no room"})
    assert there.refused_shards("data/test").read_text() == "no room"
    copy.take(encode_refresh(3, "a record"))
    assert there.refresh(3).read_text() == "a record"


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="can't be unpacked"):
        JobFilesCopy(JobPaths(tmp_path)).take({"do": "code", "part": "AAAA", "last": True})


@pytest.mark.parametrize("has_filter", [True, False])
def test_what_leaves_the_folder_is_refused(
    has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filters")
    for number, (name, link) in enumerate(
        [("../out", ""), ("x/../../out", ""), ("/out", ""), ("link", "../out"), ("link", "/out")]
    ):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            member = tarfile.TarInfo(name)
            if link:
                member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member, io.BytesIO())
        job = JobPaths(tmp_path / str(number) / "job")
        job.root.mkdir(parents=True)
        message = {"do": "code", "part": base64.b64encode(packed.getvalue()).decode(), "last": True}
        if has_filter and name == "/out":
            JobFilesCopy(job).take(message)  # the slash is left out
            assert (job.code / "out").exists()
        else:
            with pytest.raises(ClusterError, match="can't be unpacked"):
                JobFilesCopy(job).take(message)
            assert not (job.root / "out").exists()


@pytest.mark.parametrize("has_filter", [True, False])
def test_links_within_the_folder_are_kept(
    has_filter: bool, job: JobPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    (job.code / "parts" / "link.py").symlink_to("../train.py")
    there = JobPaths(tmp_path / "there")
    there.root.mkdir()
    copy = JobFilesCopy(there)
    for message in read_job_files(job):
        copy.take(message)
    assert os.readlink(there.code / "parts" / "link.py") == "../train.py"
