"""Files on agents that are processes: what is read after one of them, and the head, were killed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_hosts import LoopbackHosts, insitu, is_running, wait_until
from host_jobs import HostJobs, run_undisturbed

from insitu.base.errors import ClusterError, GridError, InputError
from insitu.base.paths import Paths
from insitu.cluster import InsituFileSystem, read_head
from insitu.grid.shared_files import FileManifest, parse_manifest

NAMES = ("a", "b", "c")


def retry(change: Callable[[], object]) -> None:
    """Do something until it is done, as a writer does that is to get done."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            change()
            return
        except ClusterError:
            assert time.monotonic() < deadline


@pytest.mark.long
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

        # An agent dies; its memory outlives the process, but isn't served.
        first, *others = NAMES
        other = InsituFileSystem(home=str(hosts.homes[others[0]]))
        assert other.exists("v/log")
        os.kill(hosts.agent_pid(first), signal.SIGKILL)
        assert head.cat("v/deep/big") == data
        head.pipe("v/after", b"written by two nodes")
        assert other.cat("v/after") == b"written by two nodes"

        # So does the head. What is open is read on. Nothing is changed, and each call says why.
        with other.open("v/deep/big", block_size=1) as opened:
            os.kill(record.pid, signal.SIGKILL)
            assert opened.read() == data
        with pytest.raises(ClusterError, match=r"the head was heard \d+ s ago.*insitu up"):
            other.mv("v/after", "v/moved")
        shown = insitu(hosts.homes[others[0]], "fs", "cat", "insitu://v/after", code=None)
        assert shown.returncode and "the head was heard" in shown.stderr

        # They come back, with all that was acknowledged. A writer that waits meanwhile gets done.
        late = threading.Thread(target=lambda: retry(lambda: other.pipe("v/late", b"late")))
        late.start()
        hosts.up()
        wait_until(lambda: set(hosts.states().values()) == {"alive"}, "all nodes")
        late.join()
        again = InsituFileSystem(home=str(hosts.homes[first]))
        assert again.find("v") == ["v/after", "v/deep/big", "v/late", "v/log"]
        assert again.cat("v/deep/big") == data and again.cat("v/log") == b"12"

        # At the end nothing stays in memory; what there was is on the disks, and comes back.
        memory = [Paths(home).file_memory(name) for name, home in hosts.homes.items()]
        assert any(folder.exists() for folder in memory)
        insitu(hosts.head, "down")
        assert not any(folder.exists() for folder in memory)
        disks = [Paths(home).file_blocks(name) for name, home in hosts.homes.items()]
        assert sum(f.stat().st_size for disk in disks for f in disk.rglob("*") if f.is_file()) >= 10_000_000
        assert Paths(hosts.head).metadata.exists()
        insitu(hosts.head, "down", "--force")
        assert not list(hosts.head.glob("metadata*"))


@pytest.mark.long
@pytest.mark.hosts
def test_an_agent_that_is_silent_holds_up_nobody(tmp_path: Path) -> None:
    with contextlib.closing(LoopbackHosts(tmp_path, NAMES)) as hosts:
        hosts.up()
        system = InsituFileSystem(home=str(hosts.head))
        written = {f"v/{n}": os.urandom(1000) for n in range(8)}
        system.pipe(written)
        for name in NAMES:
            # A process of the silent agent's host asks it first.
            own = InsituFileSystem(home=str(hosts.homes[name]))
            assert own.cat("v/0") == written["v/0"]
            pid = hosts.agent_pid(name)
            os.kill(pid, signal.SIGSTOP)
            try:
                for step in range(2):
                    began = time.monotonic()
                    own.pipe("v/x", b"%d" % step)
                    took = [time.monotonic() - began]
                    for path, data in written.items():
                        began = time.monotonic()
                        assert own.cat(path) == data
                        took.append(time.monotonic() - began)
                    assert own.cat("v/x") == b"%d" % step
                    # An answer of the silent one would be waited for 5 s; a check for its death is 15 s away.
                    assert max(took) < 4.0 if step == 0 else sum(took) < 4.0, (name, step, took)
            finally:
                os.kill(pid, signal.SIGCONT)
            wait_until(lambda: set(hosts.states().values()) == {"alive"}, "all nodes")

        # A silent head: what is open is read, and all else says why in time.
        record = read_head(Paths(hosts.head))
        assert record is not None
        with own.open("v/1", "rb") as opened:
            os.kill(record.pid, signal.SIGSTOP)
            try:
                assert opened.read() == written["v/1"]
                with pytest.raises(ClusterError, match="head"):
                    own.cat("v/0")
            finally:
                os.kill(record.pid, signal.SIGCONT)
        retry(lambda: own.pipe("v/0", b"again"))
        assert own.cat("v/0") == b"again"
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
        os.kill(hosts.agent_pid(NAMES[0]), signal.SIGKILL)
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


@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.timeout(900)
def test_a_job_trains_on_while_the_head_is_silent_and_dead(tmp_path: Path) -> None:
    """And publishes all that it has written then: checkpoints, models, logs, event files."""
    with contextlib.closing(LoopbackHosts(tmp_path, NAMES)) as hosts:
        hosts.up()
        jobs = HostJobs(hosts.head, tmp_path / "job")
        script = jobs.code / "train.py"
        there = """insitu.BackupAndRestore("insitu://ckpt/run", save_freq=2), Disturb(),
    keras.callbacks.ModelCheckpoint("insitu://ckpt/model.keras"), Silence(),
    keras.callbacks.CSVLogger("insitu://ckpt/log.csv", append=True), insitu.TensorBoard("insitu://ckpt/runs")]"""
        silence = '''class Silence(keras.callbacks.Callback):
    """Has the test make the head silent after the first epoch, and kill it after the second."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch in (1, 2) and me.is_chief:
            (folder / f"epoch-{epoch}").touch()
            while not (folder / f"done-{epoch}").exists():
                time.sleep(0.02)


callbacks ='''
        text = script.read_text()
        text = text.replace("insitu.BackupAndRestore(save_freq=2), Disturb()]", there)
        text = text.replace("callbacks =", silence, 1)
        script.write_text(text)
        job = jobs.start(workers=2)
        record = read_head(Paths(hosts.head))
        assert record is not None
        for epoch, number in ((1, signal.SIGSTOP), (2, signal.SIGKILL)):
            wait_until(
                lambda epoch=epoch: (jobs.meeting / f"epoch-{epoch}").exists() or jobs.assert_running(job),
                f"epoch {epoch}",
                120.0,
            )
            os.kill(record.pid, number)
            if epoch == 2:
                time.sleep(300.0)  # no race: what waits longer than any deadline for the head continues, too
            (jobs.meeting / f"done-{epoch}").touch()
            if epoch == 1:
                jobs.wait_in_the_middle(job, 2)
                jobs.let_go()
        said = wait_until(lambda: "The script has ended" in jobs.output(job), "the end of the script", 120.0)
        assert said and jobs.output(job).count("Training continues") == 1
        hosts.up()
        found, weights = jobs.finish(job)
        assert weights == run_undisturbed(tmp_path / "alone", 2) and found["attempt"] == 1
        assert "Published what waited for the head" in jobs.output(job)

        files = InsituFileSystem(home=str(hosts.head))
        lines = files.cat("ckpt/log.csv").decode().splitlines()
        assert [line.split(",")[0] for line in lines] == ["epoch", "0", "1", "2", "3"]
        with zipfile.ZipFile(io.BytesIO(files.cat("ckpt/model.keras"))) as model:
            assert model.testzip() is None
        (events,) = (name for name in files.find("ckpt/runs") if "tfevents" in name)
        assert files.size(events) > 0
        saved = sorted(path.split("/")[-2] for path in files.find("ckpt/run") if path.endswith("state.json"))
        assert len(saved) == 2 and saved[-1].startswith("epoch-00004")
        assert not [left for home in hosts.homes.values() for left in home.glob("unpublished/*")]
        insitu(hosts.head, "down", "--force")


@pytest.mark.long
@pytest.mark.hosts
def test_names_come_back_from_the_nodes_after_the_home_of_the_head_was_lost(tmp_path: Path) -> None:
    with contextlib.closing(LoopbackHosts(tmp_path, NAMES)) as hosts:
        hosts.up()
        files = InsituFileSystem(home=str(hosts.head))
        written = {f"v/d/{n}": os.urandom(100) for n in range(20)}
        files.pipe(written)
        files.pipe("v/big", os.urandom(9_000_000))
        files.mv("v/d/0", "v/moved")
        files.pipe("w/x", b"old")
        expected = {path: files.cat(path) for volume in "vw" for path in files.find(volume)}

        def list_manifests() -> list[FileManifest]:
            found = []
            for name, home in hosts.homes.items():
                for path in Paths(home).file_memory(name).glob("*/*-*-*"):
                    with contextlib.suppress(OSError, InputError):
                        found.append(parse_manifest(path.read_bytes()))
            return found

        def is_up_to_date() -> bool:
            found = list_manifests()
            paths = {f"{each.volume}/{each.path}" for each in found if each.path}
            return paths == expected.keys() and all(each.is_confirmed for each in found)

        wait_until(is_up_to_date, "manifests", 120.0)

        # The head is lost right after a file was written, and one removed.
        files.pipe("w/x", b"new")
        files.pipe("w/late", b"late")
        files.rm("v/d/1")
        expected |= {"w/x": b"new", "w/late": b"late"}
        record = read_head(Paths(hosts.head))
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(record.pid), "the end of the head")
        shutil.rmtree(hosts.head)
        first = next(iter(hosts.homes))
        hosts.move_head(tmp_path / "another-head", first)
        again = InsituFileSystem(home=str(hosts.head))
        for call in (lambda: again.find("v"), lambda: again.pipe("v/new", b"new")):
            with pytest.raises(GridError, match=r"3 node.*lost with the head of before.*`insitu repair`"):
                call()

        shown = insitu(hosts.head, "repair", code=1)
        assert "no terminal" in shown.stderr and "insitu://v/moved" in shown.stdout
        dry = json.loads(insitu(hosts.head, "repair", "--dry-run", "--json").stdout)["files"]
        assert dry["empty"] and not dry["done"]
        assert {each["url"].partition("//")[2] for each in dry["found"]} == expected.keys()
        assert sorted(dry["unconfirmed"]) == ["insitu://w/late", "insitu://w/x"]
        assert dry["as_of"]["v"] and not any(dry["missing"].values())
        done = insitu(hosts.head, "repair", "--yes")
        assert f"{len(expected)} files of insitu:// were put back" in done.stderr
        found = {path: again.cat(path) for volume in "vw" for path in again.find(volume)}
        # That it was removed nobody had told the nodes.
        assert found == expected
        again.pipe("v/new", b"new")
        assert not json.loads(insitu(hosts.head, "repair", "--json").stdout)["files"]["empty"]
        insitu(hosts.head, "down", "--force")
