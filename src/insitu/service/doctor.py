"""Judges what `insitu doctor` finds on a machine. The functions decide alone: `insitu.cli.doctor` looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from insitu.service.formats import format_size

Level = Literal["ok", "warning", "problem"]
OK: Level = "ok"
WARNING: Level = "warning"
PROBLEM: Level = "problem"

_LEAST_DISK, _FEW_DISK = 64 << 20, 5 << 30
"""Bytes free on the disk of a home without which a job can't keep its journal and logs, and few of them."""
_FEW_SHARED = 256 << 20
"""Bytes of /dev/shm below which containers are as they are made, for programs that hardly use it."""
_LEAST_FILES, _FEW_FILES = 256, 1024
_FEW_MAPPINGS = 65_530
"""Linux's own value of vm.max_map_count."""
_FEW_PROCESSES = 1024
_SKEW = 2.0
"""Seconds by which the clocks of hosts may differ before times of a job look wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    #: Name of the check, such as `shared memory`.
    check: str
    #: `problem` prevents a training, `warning` may slow or limit one.
    level: Level
    #: The fact, as a sentence without its full stop.
    text: str
    #: What to do, with a command that can be pasted if there is one; empty if nothing is to be done.
    remedy: str = ""


def report_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings in the form of docs/reference/json.md."""
    return {"ok": can_train(findings), "checks": [asdict(each) for each in findings]}


def can_train(findings: Sequence[Finding]) -> bool:
    """Return whether nothing was found that prevents a training."""
    return all(each.level != PROBLEM for each in findings)


def judge_python(version: str, allowed: str, executable: str) -> Finding:
    """Judge the version of Python by insitu's requirement, such as `>=3.11`."""
    from packaging.specifiers import SpecifierSet

    if not SpecifierSet(allowed).contains(version, prereleases=True):
        remedy = "Install Python 3.11, 3.12 or 3.13, and insitu again with that one"
        return Finding("python", PROBLEM, f"insitu needs Python {allowed}, this is {version}", remedy)
    if tuple(map(int, version.split(".")[:2])) > (3, 13):
        remedy = "If something fails, use Python 3.13"
        return Finding("python", WARNING, f"Python {version} is newer than those insitu is tested on", remedy)
    return Finding("python", OK, f"Python {version}, {executable}")


def judge_libraries(requirements: Sequence[str], versions: Mapping[str, str]) -> Finding:
    """Judge the libraries that insitu always needs. `requirements` are those of its package, `versions` what
    is installed, by name."""
    from packaging.requirements import Requirement

    wrong, needed = [], []
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        found = versions.get(each.name)
        if found is None or not each.specifier.contains(found, prereleases=True):
            wrong.append(f"{each.name} {found or 'is missing'}")
            needed.append(f"'{each.name}{each.specifier}'")
    if wrong:
        text = f"insitu needs other versions of libraries: {', '.join(wrong)}"
        return Finding("libraries", PROBLEM, text, f"pip install {' '.join(needed)}")
    return Finding("libraries", OK, f"Keras {versions.get('keras')}, NumPy {versions.get('numpy')}")


def find_allowed(backend: str, requirements: Sequence[str]) -> str:
    """Return the versions of a backend that insitu's package allows, such as `>=0.5,<0.11`."""
    from packaging.requirements import Requirement

    for each in map(Requirement, requirements):
        if each.name == backend and each.marker is not None and each.marker.evaluate({"extra": backend}):
            return str(each.specifier)
    return ""


@dataclass(frozen=True, slots=True)
class BackendFacts:
    """What was found about a backend of Keras."""

    name: str
    #: The version that is installed; empty: none is.
    version: str
    #: Versions that insitu allows.
    allowed: str
    #: Whether Keras uses it here.
    active: bool
    #: The devices that it lists, as `insitu devices --json` prints them.
    devices: Sequence[Mapping[str, Any]] = ()
    #: Why it doesn't start; empty if it does.
    failure: str = ""


def judge_backend(facts: BackendFacts, others: Sequence[str]) -> Finding:
    """Judge one backend. `others` are backends that are installed beside it."""
    from packaging.specifiers import SpecifierSet

    name, worst = facts.name, PROBLEM if facts.active else WARNING
    used = ", which Keras uses here," if facts.active else ""
    install = f"pip install 'insitu[{name}]'"
    if not facts.version:
        if not facts.active:
            return Finding(name, OK, f"{name} isn't installed", "")
        instead = f"export KERAS_BACKEND={others[0]}" if others else ""
        remedy = f"{instead}    # or: {install}" if instead else install
        return Finding(name, PROBLEM, f"{name}, which Keras uses here, isn't installed", remedy)
    if facts.failure:
        return Finding(name, worst, f"{name} {facts.version}{used} doesn't start: {facts.failure}", install)
    if not SpecifierSet(facts.allowed).contains(facts.version, prereleases=True):
        text = f"insitu allows {name} {facts.allowed}, this is {facts.version}"
        return Finding(name, worst, text, install)
    listed = ", ".join(str(each["name"]) for each in facts.devices)
    return Finding(name, OK, f"{name} {facts.version}{used} has {listed}")


_GPU_WHEELS = {
    "tensorflow": "pip install 'tensorflow[and-cuda]'",
    "jax": "pip install 'jax[cuda12]'",
    "torch": "pip install --force-reinstall torch",
}


def judge_gpus(models: Sequence[str], driver: str, hidden: bool, active: BackendFacts | None) -> Finding:
    """Judge the GPUs of this machine.

    `models`: those that the driver lists. `driver`: why nvidia-smi fails; empty if it doesn't. `hidden`:
    whether CUDA_VISIBLE_DEVICES names none.
    """
    if driver:
        remedy = "sudo nvidia-smi    # if it fails, too, load the driver again, or restart the machine"
        return Finding("gpus", WARNING, f"NVIDIA's driver doesn't answer: {driver}", remedy)
    if not models:
        return Finding("gpus", OK, "none of NVIDIA's, tasks use the processors")
    listed = ", ".join(dict.fromkeys(models))
    text = f"{len(models)} of NVIDIA's: {listed}"
    if hidden:
        text += "; CUDA_VISIBLE_DEVICES hides them from tasks"
        return Finding("gpus", WARNING, text, "unset CUDA_VISIBLE_DEVICES")
    if active is not None and active.version and not active.failure:
        seen = sum(each["name"].startswith("gpu") for each in active.devices)
        if not seen:
            text += f"; {active.name} sees none, so that tasks train on processors"
            return Finding("gpus", WARNING, text, _GPU_WHEELS[active.name])
        text += f"; {active.name} sees {seen}"
    return Finding("gpus", OK, text)


def judge_compiled(failure: str) -> Finding:
    """Judge the compiled libraries. `failure`: why one can't be loaded, with what to do."""
    if failure:
        reason, _, remedy = failure.rpartition(". ")
        return Finding("compiled code", PROBLEM, reason or failure, remedy if reason else "")
    return Finding("compiled code", OK, "the exchange and the parameter servers have their libraries")


def judge_shared_memory(total: int | None, free: int, failure: str) -> Finding:
    """Judge the memory that tasks share. `total` and `free`: bytes of /dev/shm, None if there is none.
    `failure`: why the kernel gives no anonymous memory, through which tasks exchange gradients."""
    name = "shared memory"
    if failure:
        remedy = "Allow memfd_create(2) to this user or container, such as in its seccomp profile"
        return Finding(name, PROBLEM, f"tasks exchange gradients by anonymous memory: {failure}", remedy)
    if total is None:
        remedy = "sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm"
        return Finding(name, WARNING, "there is no /dev/shm, for --memory-checkpoint and insitu://", remedy)
    room = f"/dev/shm has {format_size(total)}, {format_size(free)} of them free"
    if total < _FEW_SHARED:
        remedy = "sudo mount -o remount,size=50% /dev/shm    # of a container: docker run --shm-size=8g"
        return Finding(name, WARNING, f"{room}: little for --memory-checkpoint and insitu://", remedy)
    if free < _FEW_SHARED:
        remedy = "ls -lS /dev/shm    # remove what no process uses any more"
        return Finding(name, WARNING, f"{room}: little for --memory-checkpoint and insitu://", remedy)
    return Finding(name, OK, room)


def judge_home(home: str, free: int, failure: str) -> list[Finding]:
    """Judge the folder of data and jobs. `free`: bytes on its disk. `failure`: why nobody can write there."""
    if failure:
        remedy = "export INSITU_HOME=/a/folder/of/yours"
        return [Finding("home", PROBLEM, f"{home} can't be written: {failure}", remedy)]
    found = [Finding("home", OK, f"{home} can be written")]
    text, remedy = (
        f"{format_size(free)} free on the disk of {home}",
        "insitu prune --help    # or another disk",
    )
    level = PROBLEM if free < _LEAST_DISK else WARNING if free < _FEW_DISK else OK
    return [*found, Finding("disk", level, text, "" if level == OK else f"{remedy}: export INSITU_HOME=...")]


def judge_limits(
    files: int | None, most_files: int | None, processes: int | None, mappings: int | None, file_size: str
) -> list[Finding]:
    """Judge the limits of this shell and of the kernel; None: no limit, or unknown.

    `files`, `most_files`: of open files, the present one and the one up to which it can be raised.
    `mappings`: vm.max_map_count. `file_size`: why files can't become large enough; empty if they can.
    """
    found = []
    if files is not None and files < _FEW_FILES:
        wanted = 4096
        remedy = f"ulimit -n {wanted}"
        if most_files is not None and most_files < wanted:
            remedy = f"sudo prlimit --pid $$ --nofile={wanted}"
        level = PROBLEM if files < _LEAST_FILES else WARNING
        found.append(Finding("open files", level, f"{files} files may be open at a time", remedy))
    if processes is not None and processes < _FEW_PROCESSES:
        text = f"{processes} processes and threads may run for this user"
        found.append(Finding("processes", WARNING, text, "ulimit -u 8192"))
    if mappings is not None and mappings < _FEW_MAPPINGS:
        text = f"vm.max_map_count is {mappings}: caches of many partitions can't be mapped"
        found.append(Finding("mappings", WARNING, text, "sudo sysctl -w vm.max_map_count=262144"))
    if file_size:
        text, _, remedy = file_size.rpartition(". ")
        found.append(Finding("file size", PROBLEM, text, remedy.rpartition(": ")[2]))
    if found:
        return found
    count = "any number of" if files is None else f"{files:,}"
    return [Finding("limits", OK, f"{count} open files, {mappings or 'unknown':,} mappings")]


def judge_ports(failure: str) -> Finding:
    """Judge whether tasks can listen on ports of this machine, and reach each other there. `failure`: why
    not."""
    if failure:
        remedy = "sudo ip link set lo up    # and let local firewalls accept 127.0.0.1"
        return Finding("ports", PROBLEM, f"tasks can't reach a port of 127.0.0.1: {failure}", remedy)
    return Finding("ports", OK, "tasks can listen on 127.0.0.1, and reach each other there")


def judge_clock(now: float, built: float) -> Finding:
    """Judge the clock. `now`: seconds since 1970 by it; `built`: when this insitu was compiled."""
    if now < built:
        text = "the clock is before the day on which insitu was built, so that certificates don't count yet"
        return Finding("clock", WARNING, text, "sudo timedatectl set-ntp true")
    return Finding("clock", OK, "plausible")


def judge_cluster(nodes: Sequence[Mapping[str, Any]], notice: str) -> list[Finding]:
    """Judge the nodes of the cluster that this home belongs to, as `list_nodes` returns them. `notice`: why
    they may be old."""
    agents = [each for each in nodes if each["state"] is not None]
    if not agents:
        return [Finding("cluster", OK, "none, jobs run on this machine")]
    if notice:
        return [Finding("cluster", WARNING, notice.rstrip("."), "insitu up --help")]
    away = [f"{each['node']} ({each['state']})" for each in agents if each["state"] not in ("alive", "left")]
    found = []
    if away:
        text = f"the head answers; nodes are away: {', '.join(away)}"
        found.append(Finding("cluster", WARNING, text, "insitu nodes"))
    skewed = [each for each in agents if abs(each["clock_skew"] or 0.0) > _SKEW]
    if skewed:
        listed = ", ".join(f"{each['node']} by {each['clock_skew']:+.1f} s" for each in skewed)
        remedy = "sudo timedatectl set-ntp true    # on each of them"
        found.append(Finding("cluster", WARNING, f"clocks differ: {listed}", remedy))
    return found or [Finding("cluster", OK, f"the head answers, with {len(agents)} nodes")]


def judge_late(check: str, seconds: float) -> Finding:
    """Return the finding of a check that didn't end within `seconds`."""
    text = f"the check didn't end within {seconds:g} s: a disk, a network or a driver doesn't answer"
    return Finding(check, PROBLEM, text, "sudo dmesg | tail -n 30")
