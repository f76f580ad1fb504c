"""Files on agents that are processes: what is read after one of them, and the head, were killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import zipfile
from pathlib import Path

import pytest
from agent_hosts import LoopbackHosts, insitu, wait_until
from host_jobs import HostJobs, run_undisturbed

from insitu.cluster import InsituFileSystem, read_head
from insitu.cluster.decide import rank_nodes
from insitu.paths import Paths

NAMES = ("a", "b", "c")


@pytest.mark.hosts
def test_files_outlive_a_killed_node_and_a_killed_head(tmp_path: Path) -> None:
    with contextlib.closing(LoopbackHosts(tmp_path, NAMES)) as hosts:
        hosts.up()
        head = InsituFileSystem(home=str(hosts.head))
        data = os.urandom(5_000_000)
        head.pipe("insitu://v/deep/big", data)
        with head.open("v/log", "ab") as log:
            log.write(b"1")
            log.flush()
            assert InsituFileSystem(home=str(hosts.homes["a"])).cat("v/log") == b"1"
            log.write(b"2")
        assert head.cat("v/deep/big") == data and sum(head.count_blocks("v/deep/big").values()) == 4

        # A machine that has only address and token.
        record = read_head(Paths(hosts.head))
        assert record is not None
        token = {"INSITU_TOKEN_FILE": str(Paths(hosts.head).token)}
        outside = ("--cluster", record.address, "fs")
        listed = json.loads(
            insitu(tmp_path / "no", *outside, "ls", "-r", "insitu://v", "--json", **token).stdout
        )
        assert {each["url"]: each["bytes"] for each in listed} == {
            "insitu://v/deep/big": 5_000_000,
            "insitu://v/log": 2,
        }
        (tmp_path / "other").write_text("x" * 32)
        (tmp_path / "other").chmod(0o600)
        stranger = {"INSITU_TOKEN_FILE": str(tmp_path / "other")}
        assert "another token" in insitu(tmp_path / "no", *outside, "ls", code=1, **stranger).stderr

        # The node that leads the volume dies; its memory outlives the process, but isn't served.
        first = rank_nodes("v", NAMES)[0]  # type: ignore[arg-type]
        other = InsituFileSystem(home=str(hosts.homes[rank_nodes("v", NAMES)[1]]))  # type: ignore[arg-type]
        assert other.exists("v/log")
        os.kill(hosts.agent_pid(first), signal.SIGKILL)
        assert head.cat("v/deep/big") == data
        head.pipe("v/after", b"written by two nodes")
        assert other.cat("v/after") == b"written by two nodes"

        # So does the head. Most nodes live, so files can be changed; what begins now knows the nodes.
        os.kill(record.pid, signal.SIGKILL)
        other.mv("v/after", "v/moved")
        shown = insitu(hosts.homes[str(rank_nodes("v", NAMES)[1])], "fs", "cat", "insitu://v/moved")  # type: ignore[arg-type]
        assert shown.stdout == "written by two nodes"

        # They come back: the node learns what it has missed before it answers.
        hosts.up()
        wait_until(lambda: set(hosts.states().values()) == {"alive"}, "all nodes")
        again = InsituFileSystem(home=str(hosts.homes[first]))
        assert again.find("v") == ["v/deep/big", "v/log", "v/moved"]
        assert again.cat("v/deep/big") == data and again.cat("v/log") == b"12"

        # At the end nothing stays in memory; what there was is on the disks, and comes back.
        memory = [Paths(home).file_memory(name) for name, home in hosts.homes.items()]
        assert any(folder.exists() for folder in memory)
        insitu(hosts.head, "down")
        assert not any(folder.exists() for folder in memory)
        disks = [Paths(home).file_blocks(name) for name, home in hosts.homes.items()]
        assert sum(f.stat().st_size for disk in disks for f in disk.rglob("*") if f.is_file()) >= 10_000_000
        insitu(hosts.head, "down", "--force")


@pytest.mark.long
@pytest.mark.hosts
def test_a_job_goes_on_from_what_it_has_written_there_after_a_node_was_killed(tmp_path: Path) -> None:
    with contextlib.closing(LoopbackHosts(tmp_path, NAMES)) as hosts:
        hosts.up()
        jobs = HostJobs(hosts.head, tmp_path / "job")
        script = jobs.code / "train.py"
        there = """insitu.BackupAndRestore("insitu://ckpt/run", save_freq=2), Disturb(),
    keras.callbacks.ModelCheckpoint("insitu://ckpt/model.keras"),
    keras.callbacks.CSVLogger("insitu://ckpt/log.csv", append=True), insitu.TensorBoard("insitu://ckpt/runs")]"""
        text = script.read_text()
        script.write_text(text.replace("insitu.BackupAndRestore(save_freq=2), Disturb()]", there))
        assert script.read_text() != text
        job = jobs.start("--on-loss", "restart", workers=2, kill="worker:1")
        jobs.wait_in_the_middle(job, 2)
        first = rank_nodes("ckpt", NAMES)[0]  # type: ignore[arg-type]
        os.kill(hosts.agent_pid(first), signal.SIGKILL)
        jobs.let_go()
        found, weights = jobs.finish(job)
        assert weights == run_undisturbed(tmp_path / "alone", 2) and found["attempt"] == 2
        assert "continues from the checkpoint of epoch 1, step 2" in jobs.output(job)

        files = InsituFileSystem(home=str(hosts.head))
        lines = files.cat("ckpt/log.csv").decode().splitlines()
        assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]
        with zipfile.ZipFile(io.BytesIO(files.cat("ckpt/model.keras"))) as model:
            assert model.testzip() is None
        assert [name for name in files.find("ckpt/runs") if "tfevents" in name]
