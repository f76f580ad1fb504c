"""Decides which variables of a shell are a job's own, and which ones it has when it resumes. Pure.

A job keeps the variables of the shell that starts it, in its folder and in the copies on hosts. It resumes
with these on any machine. Two kinds aren't kept, and come from each shell again:

- secrets, by their names: a word in it ends with TOKEN, KEY, KEYS, PASS or PWD, or the name holds SECRET,
  PASSW, PASSPHRASE or CREDENTIAL. By its value, a URL with a password is one. The path of a file isn't: it
  names the place of a secret;
- what says something about a session, such as TERM, and on another machine what says something about that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from insitu.base.errors import JobSpecError
from insitu.base.paths import HOME_ENV
from insitu.cluster.job_files import JobEnvironment
from insitu.cluster.wire import is_of_host, is_of_session

_SECRET_NAME = re.compile(r"SECRET|PASSW|PASSPHRASE|CREDENTIAL|(TOKEN|KEYS?|PASS|PWD)(?![A-Z0-9])")
_SECRET_VALUE = re.compile(r"://[^/\s@]*:[^/\s@]+@")
_OWN_SECRET = "INSITU_SECRET"
_BACKEND = "KERAS_BACKEND"
_MOST_NAMES = 10
"""Names in a line for the user."""


def is_secret(name: str, value: str, is_file: Callable[[str], bool]) -> bool:
    """Return whether a variable holds a secret."""
    if _SECRET_VALUE.search(value):
        return True
    return bool(_SECRET_NAME.search(name.upper())) and not is_file(value)


def choose_variables(
    shell: Mapping[str, str],
    names: Collection[str],
    is_file: Callable[[str], bool],
    surely_secret: Collection[str] = (),
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that are kept with a job that this shell starts, and the names of its secrets.

    `names`: variables that the user wants kept, whatever their names say. Raises JobSpecError for one that
    isn't set, or that surely is a secret, as `surely_secret` are.
    """
    for name in names:
        if name == _OWN_SECRET or name in surely_secret:
            raise JobSpecError(
                f"--env keeps a variable on disks, so it isn't for secrets. Received: {name}. Leave it out: "
                f"`insitu resume` takes secrets from its shell"
            )
        if name not in shell:
            raise JobSpecError(f"--env names a variable of this shell. Received: {name}, which isn't set")
    own = {n: value for n, value in shell.items() if n != HOME_ENV and not is_of_session(n)}
    secrets = tuple(sorted(n for n, v in own.items() if n not in names and is_secret(n, v, is_file)))
    return {n: value for n, value in sorted(own.items()) if n not in secrets}, secrets


def change_variables(
    kept: JobEnvironment, shell: Mapping[str, str], names: Collection[str], is_file: Callable[[str], bool]
) -> JobEnvironment:
    """Return what a job keeps once it has taken the variables `names` as they are in another shell: set, or
    not set. Raises JobSpecError for another backend."""
    variables, secrets = dict(kept.variables), set(kept.secrets)
    for name in names:
        before = variables.pop(name, None)
        if name == _BACKEND and shell.get(name) != before:
            raise JobSpecError(
                f"A job continues with the backend that it was started with: {_BACKEND}={before or ''}. "
                f"Received: --env {_BACKEND}, which is {shell.get(name, 'not set')!r} here. Leave it out, or "
                f"start a new job"
            )
        if name not in shell:
            secrets.discard(name)
        elif name in secrets or is_secret(name, shell[name], is_file):
            secrets.add(name)
        else:
            variables[name] = shell[name]
    return replace(kept, variables=dict(sorted(variables.items())), secrets=tuple(sorted(secrets)))


def compose_environment(kept: JobEnvironment, shell: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables of a job that `shell` starts or resumes, on the machine `host`.

    Raises JobSpecError for secrets that the job was started with, and that this shell hasn't.
    """
    if missing := [name for name in kept.secrets if name not in shell]:
        raise JobSpecError(
            f"A job continues with the variables that it was started with. Received: a shell without "
            f"{', '.join(missing)}: secrets by their names, which aren't kept. Set them here. Or give "
            f"{' '.join(f'--env {name}' for name in missing)}: the job takes them as your shell has them, "
            f"set or not, also through a head or a page"
        )
    is_foreign = is_of_session if host == kept.host else is_of_host
    of_host = {name: value for name, value in shell.items() if is_foreign(name)}
    own = {name: value for name, value in kept.variables.items() if not is_foreign(name)}
    return of_host | own | {name: shell[name] for name in kept.secrets}


def name_differences(
    kept: JobEnvironment, shell: Mapping[str, str], environment: Mapping[str, str]
) -> list[str]:
    """Return lines that name the secrets that a job takes again, and the variables of the user's shell, if
    that is known, which it doesn't take. `environment`: what it finds."""
    ignored = sorted(
        name
        for name, value in shell.items()
        if name != HOME_ENV and not is_of_session(name) and environment.get(name) != value
    )
    lines = []
    if kept.secrets:
        lines.append(f"secrets aren't kept with a job; it takes these from this shell: {_list(kept.secrets)}")
    if ignored:
        lines.append(
            f"the job keeps the variables that it was started with. These of this shell don't count: "
            f"{_list(ignored)}. --env NAME takes one"
        )
    return lines


def _list(names: Collection[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more
