"""`insitu fs` on the stores of one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_line
import pytest

from insitu.base.errors import InputError
from insitu.base.paths import Paths
from insitu.base.spec import TaskId
from insitu.cluster.files import WaitingFolder
from insitu.cluster.files.waiting_changes import WaitingChange
from insitu.grid import bring_up
from insitu.grid.shared_files import Entry


def run(*arguments: str, given: bytes | None = None, code: int = 0) -> Any:
    result = command_line.run("fs", *arguments, input=given)
    assert result.exit_code == code
    return result


@pytest.fixture(autouse=True)
def paths(home: Path) -> Paths:
    bring_up(Paths(home), 2)
    return Paths(home)


def test_files_are_copied_shown_and_removed(tmp_path: Path, paths: Paths) -> None:
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"a" * 1000)
    (folder / "deep" / "b").write_bytes(b"b")
    run("cp", str(folder / "a.txt"), "insitu://runs")
    run("cp", "-r", "--copies", "1", str(folder), "insitu://runs/")
    run("cp", "-", "insitu://runs/state", given=b"done")
    listed = json.loads(run("ls", "-r", "insitu://runs", "--json").stdout)
    assert [(each["url"], each["bytes"], each["copies"]) for each in listed] == [
        ("insitu://runs/a.txt", 1000, 2),
        ("insitu://runs/run/a.txt", 1000, 1),
        ("insitu://runs/run/deep/b", 1, 1),
        ("insitu://runs/state", 4, 2),
    ]
    assert run("cat", "insitu://runs/state", "insitu://runs/run/deep/b").stdout_bytes == b"doneb"
    found = json.loads(run("stat", "insitu://runs/a.txt", "--json").stdout)
    assert found["nodes"] == {"node-0": 1, "node-1": 1} and found["blocks"] == 1
    assert "node-0 (1), node-1 (1)" in run("stat", "insitu://runs/a.txt").stdout
    usage = json.loads(run("du", "--json").stdout)
    assert usage["paths"] == [{"url": "insitu://runs", "files": 4, "bytes": 2005, "bytes_with_copies": 3009}]
    assert sum(node["memory"] for node in usage["nodes"]) == 3009
    assert "IN MEMORY" in run("du", "insitu://runs").stdout and "insitu://runs/" in run("ls").stdout
    run("mv", "insitu://runs/run", "insitu://runs/moved")
    back = tmp_path / "back"
    run("cp", "-r", "insitu://runs/moved", str(back))
    assert (back / "a.txt").read_bytes() == b"a" * 1000 and (back / "deep" / "b").read_bytes() == b"b"
    run("cp", "insitu://runs/state", f"{tmp_path}/")
    assert (tmp_path / "state").read_bytes() == b"done"
    report = json.loads(run("repair", "insitu://runs", "--json").stdout)
    assert report == {"copied": 0, "bytes": 0, "removed": 0, "failed": 0, "lost": []}
    run("rm", "-r", "insitu://runs")
    assert run("ls").stdout == ""


def test_the_limit_of_memory_is_set_and_kept_to(paths: Paths, tmp_path: Path) -> None:
    run("memory", "node-0", "0")
    run("memory", "node-1", "0")
    assert json.loads(run("memory", "--json").stdout) == [
        {"node": "node-0", "limit": 0},
        {"node": "node-1", "limit": 0},
    ]
    run("cp", "-", "insitu://v/x", given=b"x" * 100)
    usage = json.loads(run("du", "--json").stdout)
    assert [(node["memory"], node["disk"]) for node in usage["nodes"]] == [(0, 100), (0, 100)]
    run("memory", "node-0", "default")
    assert json.loads(run("memory", "node-0", "--json").stdout)[0]["limit"] > 0


def test_what_is_lost_is_named_with_exit_code_1(paths: Paths) -> None:
    run("cp", "--copies", "1", "-", "insitu://v/x", given=b"x" * 100)
    for node in ("node-0", "node-1"):
        for block in paths.file_memory(node).glob("*/*"):
            block.unlink()
    assert "lost: x" in run("repair", "v", code=1).stderr


def test_a_folder_is_removed_with_r_alone() -> None:
    run("cp", __file__, "insitu://v/folder/x")
    with pytest.raises(InputError, match="with -r"):
        run("rm", "insitu://v/folder")
    run("rm", "-r", "insitu://v/folder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cat", "insitu://v/no"), "insitu://v/no: No such file or directory. `insitu fs ls` shows"),
        (("ls", "insitu://no"), "insitu://no: No such file"),
        (("mv", "insitu://v/no", "insitu://v/x"), "insitu://v/no: No such file"),
        (("ls", "/tmp"), "insitu://VOLUME/PATH"),
        (("cp", "a", "b"), "One of both"),
        (("cp", "/no/such/file", "insitu://v/x"), "No such file"),
        (("ls", "-r", "insitu://no"), "No such file"),
        (("cp", "-", "insitu://v"), "needs a name"),
        (("cp", __file__, "insitu://"), "Name one"),
        (("cp", "-r", "insitu://", "copies"), "Name one"),
        (("cp", "/", "insitu://v/x"), "with -r"),
        (("rm", "insitu://v/no"), "insitu://v/no: No such file"),
        (("rm", "-r", "insitu://no"), "insitu://no: No such file"),
        (("stat", "insitu://v/no"), "insitu://v/no: No such file"),
        (("rm", "-r", "insitu://"), "one by one"),
        (("stat", "insitu://v/../x"), "neither '.' nor '..'"),
        (("memory", "node-9"), "node-0, node-1"),
        (("publish", "/no/such"), "unpublished in which changes"),
    ],
)
def test_wrong_requests_are_explained(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError) as refused:
        run(*arguments)
    assert words in str(refused.value)


def test_a_path_of_this_machine_is_not_looked_for_in_the_cluster() -> None:
    with pytest.raises(InputError, match=r"^/no/such: No such file or directory$"):
        run("cp", "/no/such", "insitu://v/x")


def test_what_a_task_could_not_publish_is_published(paths: Paths) -> None:
    folder = WaitingFolder(paths.unpublished("j-1", TaskId("worker", 0)), paths.home)
    late = lambda path: WaitingChange("publish", "runs", path, time.time(), Entry(0, time.time()))  # noqa: E731
    for number, change in enumerate((late("a"), late("a/b"), late("c")), 1):
        folder.save(replace(change, number=number))
    command = [sys.executable, "-m", "insitu", "fs", "publish", str(folder.path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "another one does" in refused.stderr
    os.close(folder._lock or 0)
    said = run("publish", str(folder.path), code=1).output
    assert said.count(".refused") == 1 and "2 changes" in said
    assert {each["url"] for each in json.loads(run("ls", "-r", "insitu://runs", "--json").stdout)} == {
        "insitu://runs/a",
        "insitu://runs/c",
    }
