"""How often a job was brought to another machine, or with etcd got a supervisor: its *term*.

The servers of its hosts keep it, and accept the supervisor of the highest term that their host has seen. So
one on a machine that was given up, and that comes back, can start nothing there.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import replace_file
from insitu.base.errors import ClusterError
from insitu.base.paths import JobPaths
from insitu.cluster.decide import Claim, may_accept

SECRET_BYTES = 32
_MOST = 1 << 31


def draw_term(number: int) -> Claim:
    """Return a new term with this number."""
    return Claim(number, secrets.token_hex(8))


def encode_term(term: Claim) -> list[Any]:
    """Return a term as a message carries it."""
    return [term.number, term.instance]


def parse_term(value: Any) -> Claim:
    """Return what `encode_term` was given; None stands for the first term. Raises ClusterError."""
    if value is None:
        return Claim()
    if not isinstance(value, list) or len(value) != 2:
        raise ClusterError(f"A term is a number and an instance. Received: {value!r:.100}")
    number, instance = value
    if type(number) is not int or not 0 <= number < _MOST or type(instance) is not str:
        raise ClusterError(f"A term is a number and an instance. Received: {value!r:.100}")
    return Claim(number, instance[:64])


def read_term(path: Path) -> Claim:
    """Return the term in a file; the first one if there is no such file. Raises ClusterError."""
    try:
        return parse_term(json.loads(path.read_text()))
    except FileNotFoundError:
        return Claim()
    except (OSError, ValueError, RecursionError) as error:
        raise ClusterError(
            f"{path} must say the term of a job. Received: what can't be read ({error})"
        ) from error


def write_term(path: Path, term: Claim) -> None:
    """Keep a term, so that it survives a power cut. Raises OSError."""
    replace_file(path, json.dumps(encode_term(term)).encode(), sync=True)


def begin_term(job: JobPaths, term: Claim) -> None:
    """Have a job's folder be that of another term, in which tasks prove another secret to each other. The
    job's signing secret stays the same. Raises OSError."""
    if job.secret.exists() and not job.signing_secret.exists():
        replace_file(job.signing_secret, job.secret.read_bytes(), sync=True, mode=PRIVATE_FILE)
    replace_file(job.secret, secrets.token_bytes(SECRET_BYTES), sync=True, mode=PRIVATE_FILE)
    write_term(job.term, term)


def accept_term(path: Path, term: Claim, job: str) -> None:
    """Keep the term of a supervisor that this host will serve. Raises ClusterError if a higher one, or
    another one with the same number, has been seen here."""
    seen = read_term(path) if path.exists() else None
    if not may_accept(seen, term):
        raise ClusterError(
            f"The hosts of a job accept the supervisor of its highest term. Received: term {term.number} of "
            f"{job}, after term {seen.number if seen else 0}: the job was brought to another machine"
        )
    if seen != term:
        write_term(path, term)
