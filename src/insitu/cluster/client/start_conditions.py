"""Looks at what a job depends on beside its variables: versions, Keras' file of settings, JOB_DIR.

It is written down as a job is started. When it resumes, changes are named: another version may give other
numbers, and may be what the user wants.
"""

from __future__ import annotations

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path

from insitu.base.disk.durable import read_file_size_limit
from insitu.base.errors import JobSpecError
from insitu.base.paths import JobPaths
from insitu.cluster.job_files import JobEnvironment
from insitu.cluster.wire import read_versions

_KERAS = {
    "backend": "tensorflow",
    "floatx": "float32",
    "epsilon": 1e-07,
    "image_data_format": "channels_last",
}
"""Keras' defaults if its file doesn't say it."""


LEAST_FILE_SIZE = 16 << 20
"""Bytes that a file must be allowed to have, for a job's journal and logs."""


def check_file_size_limit() -> None:
    """Raise JobSpecError if files may not become as large as those of a job."""
    limit = read_file_size_limit()
    if limit is not None and limit < LEAST_FILE_SIZE:
        raise JobSpecError(
            f"The journal and logs of a job need files of {LEAST_FILE_SIZE >> 20} MiB. Received: a limit of "
            f"{limit >> 10} KiB a file. Start it from a shell with a larger one: ulimit -f "
            f"{LEAST_FILE_SIZE >> 10}"
        )


def read_keras_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Keras' file, as text. The file is that of a process with these variables."""
    folder = environment.get("KERAS_HOME") or Path(environment.get("HOME") or "~", ".keras").expanduser()
    try:
        found = json.loads(Path(folder, "keras.json").read_text())
    except (OSError, ValueError, RuntimeError):
        found = {}
    given = found if isinstance(found, dict) else {}
    return {name: str(given.get(name, default)) for name, default in _KERAS.items()}


def find_changes(job: JobPaths, kept: JobEnvironment, environment: Mapping[str, str]) -> list[str]:
    """Return a line about each kind of thing that is other than when the job was started."""
    return [
        f"{what}: {changed}"
        for what, changed in (
            ("it was started with other versions", _compare(kept.versions, read_versions())),
            (
                "it was started with another keras.json",
                _compare(kept.keras, read_keras_settings(environment)),
            ),
            (
                "the job continues with its own copy of JOB_DIR, which differs from",
                _compare_scripts(job, kept),
            ),
        )
        if changed
    ]


def _compare(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {before.get(name, 'none')}, here {now.get(name, 'none')}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    )


def _compare_scripts(job: JobPaths, kept: JobEnvironment) -> str:
    """Return the Python files of JOB_DIR that are others than those of the job. A file that isn't there any
    more is none."""
    if not kept.job_dir:
        return ""
    names = [path.relative_to(job.code) for path in sorted(job.code.rglob("*.py"))]
    changed = [
        str(theirs)
        for name in names
        if (theirs := Path(kept.job_dir, name)).is_file()
        and not filecmp.cmp(theirs, job.code / name, shallow=False)
    ]
    return ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")
