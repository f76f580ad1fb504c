"""Check the subjects of commits: `room: imperative subject`, at most 72 characters.

    python tools/check_commits.py

`make check` runs it. It looks at the commits after `BASE` and skips merges and reverts, whose subjects git
writes. CONTRIBUTING.md states the rule.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "23eb791c10f5a16aa4500ff4e2d58b73cb3089ef"
"""The last commit from before the rule."""

LONGEST = 72
ROOMS = (
    "base",
    "options",
    "grid",
    "exchange",
    "metadata",
    "parameters",
    "cluster",
    "train",
    "extensions",
    "service",
    "ui",
    "cli",
    "ground",
    "docs",
    "tests",
    "benchmarks",
    "examples",
    "build",
)
"""What a subject begins with. `ground` is the modules directly in src/insitu; `build` is the Makefile,
pyproject.toml, tools/ and the lock file."""

_PREFIX = re.compile(r"([a-z][a-z0-9_/.-]*(?:, [a-z][a-z0-9_/.-]*)*): (\S.*)")
_MADE_BY_GIT = ("Merge ", 'Revert "')

# Words that end like another form of a verb, but are imperatives.
_IMPERATIVES = {
    "bring",
    "ping",
    "ring",
    "spring",
    "string",
    "swing",
    "embed",
    "shed",
    "shred",
    "focus",
    "alias",
}


def problem_of(subject: str) -> str | None:
    """Return what is wrong with a commit's subject, or None."""
    if subject.startswith(_MADE_BY_GIT):
        return None
    if len(subject) > LONGEST:
        return f"has {len(subject)} characters; at most {LONGEST} are allowed"
    parts = _PREFIX.fullmatch(subject)
    if parts is None:
        return "doesn't have the form `room: imperative subject`"
    # An inner room may be renamed or removed later, so its name isn't compared with today's folders.
    unknown = [room for room in parts[1].split(", ") if room.split("/")[0] not in ROOMS]
    if unknown:
        return f"begins with {unknown[0]!r}, which is none of {', '.join(ROOMS)}"
    word = parts[2].split()[0]
    if not is_imperative(word):
        return f"must begin with an imperative after the room, such as `add` or `refuse`; received {word!r}"
    return None


def is_imperative(word: str) -> bool:
    """Return False for a word that looks like `added`, `adds` or `adding`."""
    word = word.lower()
    if word in _IMPERATIVES or word.endswith(("ss", "eed")):
        return True
    return not word.endswith(("ed", "s", "ing"))


def subjects_after(base: str, repository: Path) -> list[tuple[str, str]] | None:
    """Return (short hash, subject) of each commit after `base`, or None where `base` isn't in the history."""
    git = ["git", "-C", str(repository)]
    try:
        ancestor = subprocess.run([*git, "merge-base", "--is-ancestor", base, "HEAD"], capture_output=True)
    except FileNotFoundError:
        return None
    if ancestor.returncode:
        return None
    command = [*git, "log", "--format=%h %s", f"{base}..HEAD"]
    log = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = (line.partition(" ") for line in log.splitlines())
    return [(commit, subject) for commit, _, subject in lines]


def main() -> int:
    commits = subjects_after(BASE, ROOT)
    if commits is None:
        print(f"Commit subjects not checked: {BASE[:7]} is not in the history (a shallow clone, or no git).")
        return 0
    problems = [(commit, subject, problem_of(subject)) for commit, subject in commits]
    wrong = [f"{commit} {subject!r} {problem}" for commit, subject, problem in problems if problem]
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        print("Reword these commits: see CONTRIBUTING.md.", file=sys.stderr)
    else:
        print(f"Commit subjects checked: {len(commits)}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
