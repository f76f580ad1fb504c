"""The variables of the shell that are kept with a job, so that it can go on where that shell isn't known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from insitu.cluster.agents import is_of_host
from insitu.errors import JobSpecError
from insitu.paths import HOME_ENV

ALWAYS = ("KERAS_BACKEND", "INSITU_HOST_TIMEOUT", "INSITU_TLS", "INSITU_NATIVE", "INSITU_FULL_TRACEBACKS")
"""Kept where they are set: they say how insitu runs a job. The settings of devices are kept with each job."""
_SECRET = (
    *("INSITU_SECRET", "INSITU_IGNITE_PASSWORD", "INSITU_IGNITE_KEY_PASSWORD"),
    *("IGNITE_DATASET_PASSWORD", "IGNITE_DATASET_CERT_PASSWORD"),
)


def choose_environment(shell: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the variables that are kept with a job: those of `names`, and what says how insitu runs it.

    Raises JobSpecError for a name that isn't set, or that stands for a secret.
    """
    for name in names:
        if name in _SECRET:
            raise JobSpecError(
                f"--env keeps a variable on the disks of hosts, so it isn't for secrets. Received: {name}. "
                f"Leave out --on-take-over resume: `insitu resume` takes the variables of its shell"
            )
        if name not in shell:
            raise JobSpecError(f"--env names a variable of this shell. Received: {name}, which isn't set")
    return {name: shell[name] for name in sorted({*names, *ALWAYS}) if name in shell}


def restrict_environment(shell: Mapping[str, str], kept: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job that keeps variables: these, and those that are about this host."""
    return {n: value for n, value in shell.items() if is_of_host(n) or n == HOME_ENV} | dict(kept)
