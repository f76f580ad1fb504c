"""Turns the environment of a task into one of the host that it runs on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_OF_MACHINE = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX"),
        *("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    }
)
_OF_SESSION = frozenset(
    {
        *("_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMPDIR", "TEMP", "TMP"),
        *("DBUS_SESSION_BUS_ADDRESS", "DISPLAY", "WAYLAND_DISPLAY", "INVOCATION_ID", "JOURNAL_STREAM"),
        *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY"),
    }
)
FOR_TASKS = "INSITU_SET_"
"""Begins the names of variables by which the owner of a host sets others for the tasks there."""
_PREFIXES_OF_SESSION = ("XDG_", "SLURM_", "RAY_", "KUBERNETES_", "SYSTEMD_")


def is_of_session(name: str) -> bool:
    """Return whether a variable says something about a session on a host, so that another one has its own."""
    return name in _OF_SESSION or name.startswith(_PREFIXES_OF_SESSION)


def is_of_insitu(name: str) -> bool:
    """Return whether insitu sets a variable itself, such as to say which task a process is."""
    return name.startswith(("INSITU_", "TF_CONFIG"))


def is_of_host(name: str) -> bool:
    """Return whether a variable says something about a host, so that another one has its own."""
    return name in _OF_MACHINE or is_of_session(name)


def adapt_environment(given: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a task: what the job gives it, but paths, devices and the like of this host.

    `own` is the environment of the process that starts the task here. It may set variables for tasks, but
    none by which insitu tells a task its place.
    """
    kept = {name: value for name, value in given.items() if not is_of_host(name)}
    of_host = {name: value for name, value in own.items() if is_of_host(name)}
    chosen = {n.removeprefix(FOR_TASKS): value for n, value in own.items() if n.startswith(FOR_TASKS)}
    return kept | of_host | {n: value for n, value in chosen.items() if not is_of_insitu(n)}
