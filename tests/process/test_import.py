"""`insitu import` as a real process: killed at any point, on a full disk, twice at once."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from command_line import CliRunner

from insitu.base.context import Context
from insitu.base.paths import Paths
from insitu.grid import Catalog, bring_up, dataset
from insitu.grid.partitions import file_checksum

DEADLINE = 60

POINTS = {
    "before the first partition is complete": "row_router.PartitionBuilders, '_close', 0",
    "after half of the partitions": "row_router.PartitionBuilders, '_close', 4",
    "before the second block is written": "insitu.grid.partitions.writer, '_write_all', 1",
    "before the stores are renamed": "import_targets.ImportOwners, 'put_in_place', 0",
    "after one store is renamed": "import_targets, 'sync_folder', 2",
    "after all stores are renamed": "importer.Catalog, 'publish', 0",
    "inside the transaction": "importer.Catalog, '_drop_unused', 0",
    "just after the transaction": "importer.Catalog, 'remove_files', 0",
}

CHILD = """
import os, signal, sys
import insitu.grid.importing.importer as importer, insitu.grid.intake.import_plan
import insitu.grid.partitions.writer
import insitu.grid.importing.import_journal, insitu.grid.importing.import_targets as import_targets
import insitu.grid.importing.row_router as row_router
from insitu.base.paths import Paths

importer.BLOCK_BYTES = 4000
insitu.grid.intake.import_plan.BUFFER_BYTES = 0  # so that partitions have several blocks

def kill_at(owner, name, calls_before):
    original, calls = getattr(owner, name), []
    def wrapped(*arguments, **options):
        if len(calls) == calls_before:
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(name)
        return original(*arguments, **options)
    setattr(owner, name, wrapped)

kill_at({point})
insitu.grid.import_cache(Paths.default(), "a", sys.argv[1:], overwrite=True, backups=1)
"""


@pytest.fixture
def paths(home: Path) -> Paths:
    return Paths(home)


def write_source(folder: Path) -> str:
    np.save(folder / "a.npy", np.arange(20_000).reshape(-1, 4))
    return str(folder / "a.npy")


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_source(tmp_path)


def insitu(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "insitu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, **options)  # type: ignore[call-overload,no-any-return]


def succeed(*arguments: str) -> str:
    done = insitu(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(paths: Paths) -> list[Path]:
    found = (p for folder in (paths.nodes, paths.staging) for p in folder.rglob("*") if p.is_file())
    noted = ("store-id", "manifest.json")
    return sorted(p for p in found if p.suffix != ".verified" and p.name not in noted)


def check_whole(paths: Paths, version: int) -> None:
    """The latest version is `version`, and each of its copies is as it was written."""
    cache = Catalog(paths).get("a")
    assert cache.version == version and cache.rows == 5000
    for info in cache.partitions:
        for owner in info.owners:
            assert file_checksum(paths.partition(owner, "a", version, info.index)) == info.checksum


def run(*arguments: str) -> Result:
    """Run a command in this process. What a killed import has left is the same to it."""
    done = CliRunner().run(arguments)
    assert done.exit_code == 0, (done.stderr, done.exception)
    return done


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The checksums of the partitions of an import that nothing kills."""
    folder = tmp_path_factory.mktemp("unbroken")
    source = write_source(folder)
    bring_up(Paths(folder / "home"), 2)
    child = CHILD.replace("kill_at({point})", "")
    environment = {**os.environ, "INSITU_HOME": str(folder / "home")}
    subprocess.run([sys.executable, "-c", child, source], env=environment, check=True, timeout=DEADLINE)
    return [info.checksum for info in Catalog(Paths(folder / "home")).get("a").partitions]


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_the_cache_is_whole_and_the_next_import_cleans_up(
    point: str, paths: Paths, source: str
) -> None:
    run("up", "--nodes", "2")
    run("import", "a", source, "--backups", "1")
    killed = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{point}", POINTS[point]), source],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    check_whole(paths, 2 if point == "just after the transaction" else 1)
    assert len(files(paths)) > 16, "the kill came too early or too late to leave anything"
    (listed,) = json.loads(run("caches", "--json").stdout)
    assert listed["rows"] == 5000
    run("import", "a", source, "--backups", "1", "--overwrite")
    check_whole(paths, listed["version"] + 1)
    assert len(files(paths)) == 16


@pytest.mark.parametrize(
    "point",
    [
        "insitu.grid.partitions.writer, '_write_all', 30",
        *(POINTS[name] for name in POINTS if "transaction" not in name and "second block" not in name),
    ],
)
def test_killed_anywhere_an_import_goes_on_and_makes_the_same_files(
    point: str, paths: Paths, source: str, unbroken: list[str]
) -> None:
    run("up", "--nodes", "2")
    child = CHILD.replace("{point}", point).replace("backups=1", "backups=1, resume=True")
    child = child.replace(
        "def kill_at", "insitu.grid.importing.import_journal.JOURNAL_BYTES = 1\n\ndef kill_at"
    )
    killed = subprocess.run([sys.executable, "-c", child, source], capture_output=True, timeout=DEADLINE)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    listed = run("caches")
    assert "An interrupted import into a keeps" in listed.stderr and "--resume" in listed.stderr
    run("import", "a", source, "--backups", "1", "--overwrite", "--resume")
    check_whole(paths, 1)
    assert [info.checksum for info in Catalog(paths).get("a").partitions] == unbroken
    assert len(files(paths)) == 16


CHOSEN = (
    *("--row-id", "id", "--where", "x > 700 and x != 4000", "--drop-nulls", "y", "--sample", "0.8"),
    *("--fill", "z=mean", "--rename", "x=number", "--without", "w", "--backups", "1"),
)
"""Options that choose and number rows."""


@pytest.mark.parametrize("written", [1, 14])
def test_a_killed_import_continues_with_the_rows_that_its_options_choose(
    written: int, paths: Paths, tmp_path: Path
) -> None:
    lines = [f"{x},{'' if x % 11 == 5 else x * 0.5},{'' if x % 13 else x},w" for x in range(9000)]
    (tmp_path / "a.csv").write_text("x,y,z,w\n" + "\n".join(lines) + "\n")
    run("up", "--nodes", "2")
    assert "NaN" not in run("import", "b", str(tmp_path / "a.csv"), *CHOSEN).stderr, "no row misses y"
    begin, _ = CHILD.split("insitu.grid.import_cache(")
    begin = begin.replace(
        "def kill_at", "insitu.grid.importing.import_journal.JOURNAL_BYTES = 1\n\ndef kill_at"
    )
    command = f"from insitu.cli import main\nsys.argv[1:1] = ['import', 'a', *{CHOSEN!r}]\nmain()"
    for before in (written, 3):  # the second one continues, and is killed, too
        point = f"insitu.grid.partitions.writer, '_write_all', {before}"
        child = begin.replace("{point}", point) + command
        killed = subprocess.run(
            [sys.executable, "-c", child, str(tmp_path / "a.csv"), "--resume"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    run("import", "a", str(tmp_path / "a.csv"), *CHOSEN, "--resume")

    def rows(cache: str) -> list[tuple[int, ...]]:
        found = dataset(cache, features=["id", "number", "y", "z"], paths=paths, context=Context(paths))
        ((columns),) = found.batch(9000)
        return sorted(zip(*(columns[name].tolist() for name in columns), strict=True))

    expected = rows("b")
    kept = [x for x in range(9000) if x > 700 and x != 4000 and x % 11 != 5]
    assert [row[0] for row in expected] == sorted({row[0] for row in expected}), "each id once"
    assert {row[:2] for row in expected} <= set(enumerate(kept)) and 5500 < len(expected) < 6500
    assert rows("a") == expected


@pytest.mark.parametrize("command", ["nodes", "caches"])
def test_what_a_killed_import_left_is_removed_and_told(command: str, paths: Paths, source: str) -> None:
    child = CHILD.replace("{point}", POINTS["after half of the partitions"]).replace("backups=1", "backups=0")
    killed = subprocess.run([sys.executable, "-c", child, source], timeout=DEADLINE)
    assert killed.returncode == -signal.SIGKILL and files(paths)
    listed = insitu(command, "--json")
    assert listed.returncode == 0 and json.loads(listed.stdout) is not None
    assert "Removed" in listed.stderr and "that an interrupted import had left" in listed.stderr
    assert not files(paths)
    assert insitu(command).stderr.count("Removed") == 0


def test_a_full_disk_is_told_and_leaves_nothing(paths: Paths, tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same calls fail."""
    np.save(tmp_path / "a.npy", np.zeros(200_000))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = insitu("import", "a", str(tmp_path / "a.npy"), preexec_fn=limit)
    assert done.returncode == 1 and "No room is left" in done.stderr and "Traceback" not in done.stderr
    assert files(paths) == [] and Catalog(paths).caches() == []


def test_thousands_of_columns_need_few_files_open(paths: Paths, tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(1500)]
    texts = [f"t{i}" for i in range(20)]
    rows = [[*(str(row + i) for i in range(1500)), *(f"x{row}" for _ in texts)] for row in range(40)]
    (tmp_path / "wide.csv").write_text("\n".join(map(",".join, [[*names, *texts], *rows])) + "\n")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    done = insitu("import", "a", str(tmp_path / "wide.csv"), preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    (described,) = json.loads(succeed("caches", "--json"))
    assert described["rows"] == 40 and len(described["columns"]) == 1520


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_device_that_is_really_full(paths: Paths, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(200_000))
    paths.home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(paths.home)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        done = insitu("import", "a", str(tmp_path / "a.npy"))
        assert done.returncode == 1 and "No room is left" in done.stderr
        assert files(paths) == []
        np.save(tmp_path / "a.npy", np.zeros(1000))
        succeed("import", "a", str(tmp_path / "a.npy"))
    finally:
        subprocess.run(["umount", str(paths.home)], check=True)


def test_the_second_import_of_a_cache_at_once_is_refused(paths: Paths, source: str) -> None:
    """The first is held in its first block until the second has ended: by a file, not by time."""
    child = """
import sys
from insitu.grid import import_cache
from insitu.base.paths import Paths
def hold(rows, done, total):
    print("reading", flush=True)
    sys.stdin.readline()
import_cache(Paths.default(), "a", sys.argv[1:], progress=hold)
"""
    with subprocess.Popen(
        [sys.executable, "-c", child, source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin and first.stdout and first.stdout.readline() == "reading\n"
        second = insitu("import", "a", source)
        assert second.returncode == 1 and "Another process is importing into a" in second.stderr
        succeed("import", "b", source)
        first.stdin.write("\n" * 100)
        first.stdin.close()
        assert first.wait(DEADLINE) == 0
    assert [cache.name for cache in Catalog(paths).caches()] == ["a", "b"]


def test_an_interrupt_leaves_nothing(paths: Paths, source: str) -> None:
    child = """
import os, signal, sys
from insitu.grid import import_cache
from insitu.base.paths import Paths
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it without
def interrupt(rows, done, total):
    os.kill(os.getpid(), signal.SIGINT)
import_cache(Paths.default(), "a", sys.argv[1:], progress=interrupt)
"""
    done = subprocess.run(
        [sys.executable, "-c", child, source], capture_output=True, text=True, timeout=DEADLINE
    )
    assert "KeyboardInterrupt" in done.stderr and files(paths) == []


def test_the_commands_from_end_to_end(paths: Paths, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        np.save(tmp_path / f"{name}.npy", np.zeros((100, 4, 4), np.uint8))
    succeed("up", "--nodes", "3")
    options = (
        "--label-from-filename",
        "--split",
        "train=0.8,test=0.2",
        "--partitions",
        "6",
        "--backups",
        "1",
    )
    printed = json.loads(succeed("import", "pets", str(tmp_path / "*.npy"), *options, "--json"))
    assert {cache["name"] for cache in printed} == {"pets/train", "pets/test"}
    assert sum(cache["rows"] for cache in printed) == 200
    assert json.loads(succeed("caches", "--json")) == sorted(printed, key=lambda cache: cache["name"])
    nodes = json.loads(succeed("nodes", "--json"))
    assert [node["node"] for node in nodes] == ["node-0", "node-1", "node-2"]
    assert sum(node["primaries"] for node in nodes) == sum(node["backups"] for node in nodes) == 12
    assert "pets/train" in succeed("caches") and "node-2" in succeed("nodes")
    refused = insitu("down")
    assert refused.returncode == 2 and "--force" in refused.stderr
    succeed("down", "--force")
    assert json.loads(succeed("caches", "--json")) == [] and files(paths) == []


def obey_permissions() -> None:
    """Takes from a process of root what lets it pass over the permissions of files."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def read_only_home(paths: Paths) -> None:
    paths.home.mkdir()
    paths.home.chmod(0o500)


def home_is_a_file(paths: Paths) -> None:
    paths.home.write_text("")


def home_below_a_file(paths: Paths) -> None:
    paths.home.write_text("")
    os.environ["INSITU_HOME"] = str(paths.home / "below" / "it")


def home_nowhere(paths: Paths) -> None:
    os.environ["INSITU_HOME"] = "/proc/nothing"


def read_only_store(paths: Paths) -> None:
    succeed("up", "--nodes", "1")
    paths.node("node-0").chmod(0o500)


@pytest.mark.parametrize(
    "prepare", [read_only_home, home_is_a_file, home_below_a_file, home_nowhere, read_only_store]
)
@pytest.mark.parametrize("command", ["import", "up"])
def test_a_home_that_cannot_be_used_is_named(
    prepare: Callable[[Paths], None],
    command: str,
    paths: Paths,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INSITU_HOME", str(paths.home))
    prepare(paths)
    arguments = ("import", "a", source) if command == "import" else ("up", "--nodes", "2")
    if command == "up" and prepare is read_only_store:
        paths.nodes.chmod(0o500)
    done = insitu(*arguments, preexec_fn=obey_permissions)
    assert "Traceback" not in done.stderr and done.returncode == 2, done.stderr
    assert "INSITU_HOME must be a folder that insitu can write to. Received:" in done.stderr
    if paths.staging.is_dir():
        assert not list(paths.staging.iterdir())


@pytest.mark.parametrize(
    "command", [("ps",), ("ps", "--all"), ("caches",), ("nodes",), ("describe", "a"), ("down",)]
)
def test_a_home_that_may_not_be_entered_is_told_in_a_line(command: tuple[str, ...], paths: Paths) -> None:
    succeed("up", "--nodes", "2")
    paths.home.chmod(0)
    try:
        done = insitu(*command, preexec_fn=obey_permissions)
    finally:
        paths.home.chmod(0o700)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert str(paths.home) in done.stderr


def test_a_job_of_another_user_is_left_alone(paths: Paths) -> None:
    """`controller.json` may not be read, as in the folder of another user."""
    succeed("up", "--nodes", "2")
    job = paths.job("theirs-1")
    job.root.mkdir(parents=True)
    job.controller.touch()
    job.root.chmod(0)
    try:
        done = insitu("down", preexec_fn=obey_permissions)
    finally:
        job.root.chmod(0o700)
    assert done.returncode == 0 and "Left alone, as jobs of other users: theirs-1" in done.stderr
    assert "2 nodes down" in done.stderr and job.controller.exists()


@pytest.mark.parametrize("closed", ["file", "folder", "deep folder", "parent"])
def test_a_source_without_permission_is_named(closed: str, paths: Paths, tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    np.save(tmp_path / "data" / "deep" / "a.npy", np.zeros(3))
    file = tmp_path / "data" / "deep" / "a.npy"
    what = {"file": file, "folder": tmp_path / "data", "deep folder": file.parent, "parent": file.parent}
    what[closed].chmod(0)
    try:
        given = file if closed in ("file", "parent") else tmp_path / "data"
        done = insitu("import", "a", str(given), preexec_fn=obey_permissions)
    finally:
        what[closed].chmod(0o700)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "can't be read: Permission denied" in done.stderr and str(what[closed]) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a", "nothing.npy"), "nothing.npy doesn't exist"),
        (("a", "{source}", "--partitions", "0"), "--partitions must be at least 1. Received: 0"),
        (("a", "{source}", "--backups", "1"), "--backups must be in"),
        (("a", "{source}", "--split", "train=2"), "add up to 1"),
        (("a", "{source}", "--split", "train"), "--split lists parts"),
        (("a", "{source}", "--format", "tsv"), "--format must be npy, "),
        (("../a", "{source}"), "name is made of"),
    ],
)
def test_mistakes_exit_with_2_and_a_message(
    arguments: tuple[str, ...], message: str, paths: Paths, source: str
) -> None:
    done = insitu("import", *(a.replace("{source}", source) for a in arguments))
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert files(paths) == []


SLOW_READS = """
import io, sys, time
from pathlib import Path
from insitu.grid.sources.base import SourceOptions
from insitu.grid.sources.csv import CsvTable

class SlowFile(io.FileIO):
    def read(self, size=-1):
        time.sleep(0.05)
        return super().read(size)

    def readinto(self, buffer):
        time.sleep(0.05)
        return super().readinto(buffer)

class SlowPath(type(Path())):
    def open(self, *arguments, **options):
        return SlowFile(self)

CsvTable(SlowPath(sys.argv[1]), SourceOptions())
"""


def write_wrong_table(path: Path) -> str:
    """Write a table of 12 MB whose second row has a field too many."""
    path.write_text("a,b\n" + "1,2,3\n" * 2_000_000)
    return str(path)


def test_no_thread_reads_on_after_an_error(tmp_path: Path) -> None:
    wrong = write_wrong_table(tmp_path / "wrong.csv")
    command = [sys.executable, "-c", SLOW_READS, wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 1 and "Expected 2 columns, got 3" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_an_import_that_is_refused_ends_with_its_code_each_time(paths: Paths, tmp_path: Path) -> None:
    wrong = write_wrong_table(tmp_path / "wrong.csv")
    for _ in range(12):
        done = insitu("import", "a", wrong)
        assert done.returncode == 2 and "Expected 2 columns, got 3" in done.stderr.splitlines()[-1]
