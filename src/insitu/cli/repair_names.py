"""The part of `insitu repair` that puts names of `insitu://` back which were lost with a head."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import typer

from insitu.base.paths import Paths
from insitu.base.wording import format_count, inflect
from insitu.cli.console import format_size, print_notice, print_table

if TYPE_CHECKING:
    from insitu.cluster import NamesReport

_SHOWN = 1000
"""Files that are shown; `--json` has all."""


class NamesRepair:
    """What is to be done about names in the home of a head."""

    def __init__(self, paths: Paths, *, dry_run: bool, forgets: bool) -> None:
        """Look through the nodes. Raises InsituError."""
        from insitu.cluster import find_lost_names

        self._paths = paths
        self._dry_run = dry_run
        self._forgets = forgets
        #: The report on lost names; None: the home has no head.
        self.report: NamesReport | None = find_lost_names(paths)
        #: Whether files are to be put back, or given up.
        self.is_due = False
        if self.report is not None:
            is_open = self.report.state.is_rebuilding or bool(self.report.found)
            self.is_due = not dry_run and (forgets or (is_open and self.report.can_rebuild))
        #: Whether that was done.
        self.is_done = False

    @property
    def is_complete(self) -> bool:
        """Whether all files that are known of can be read now."""
        if self.report is None or (self.is_done and self._forgets):
            return True
        return self.report.is_complete and self.is_done == self.is_due

    def ask(self, yes: bool) -> None:
        """Do it, if the user agrees: on a terminal, or by `yes`."""
        if not self.is_due or self.report is None:
            return
        if not yes and not is_terminal():
            print_notice("Nothing was changed in insitu://: there is no terminal to ask on. Give --yes.")
            return
        what = "Give up the files that the head doesn't know?" if self._forgets else "Put these files back?"
        if yes or typer.confirm(what, err=True):
            self._do(self.report)

    def _do(self, report: NamesReport) -> None:
        from insitu.cluster import forget_lost_names, put_names_back

        if self._forgets:
            forget_lost_names(self._paths, report)
        else:
            put_names_back(self._paths, report)
        self.is_done = True

    def show(self) -> None:
        """Print what was found."""
        report = self.report
        if report is None:
            return
        marks = set(report.unconfirmed)
        state = "would be put back" if report.can_rebuild else "not known to the head, left out"
        rows = [
            (
                _url(each.volume, each.path),
                format_size(each.entry.size),
                _time(each.entry.modified),
                f"{state}, may not be its last version" if (each.volume, each.path) in marks else state,
            )
            for each in report.found[:_SHOWN]
        ]
        rows += [(_url(v, path), "-", "-", f"incomplete: {why}") for v, path, why in report.incomplete]
        rows += [(_url(v, path), "-", "-", what) for v, path, what in report.conflicts]
        if rows:
            print_table(("FILE", "SIZE", "WRITTEN", "STATE"), sorted(rows))
        if (more := len(report.found) - _SHOWN) > 0:
            print_notice(f"{format_count(more, 'more file')}: --json lists all.")
        _warn(report)

    def say_done(self) -> None:
        """Print what was done."""
        report = self.report
        if report is None:
            return
        if self.is_done and self._forgets:
            print_notice("Files that the head doesn't know were given up. Their blocks go within an hour.")
        elif self.is_done:
            files, were = format_count(len(report.found), "file"), inflect(len(report.found), "was", "were")
            print_notice(f"{files} of insitu:// {were} put back.")
        elif report.found and not report.can_rebuild:
            print_notice(
                "The head has names already, so none is added. `insitu repair --forget-files` gives these "
                "files up. Until then their blocks stay."
            )
        elif report.state.origin is None and not report.found and any(report.unnamed.values()):
            print_notice(
                "No file of insitu:// can be put back. Bring up the other nodes, or give up what is there by "
                "`insitu repair --forget-files`."
            )

    def to_json(self) -> dict[str, Any] | None:
        """Return it as docs/reference/json.md says; None: the home has no head."""
        report = self.report
        if report is None:
            return None
        return {
            "empty": report.can_rebuild,
            "done": self.is_done,
            "found": [
                {
                    "url": _url(each.volume, each.path),
                    "bytes": each.entry.size,
                    "modified": each.entry.modified,
                }
                for each in report.found
            ],
            "unconfirmed": [_url(*each) for each in report.unconfirmed],
            "incomplete": [{"url": _url(v, path), "reason": why} for v, path, why in report.incomplete],
            "conflicts": [{"url": _url(v, path), "reason": what} for v, path, what in report.conflicts],
            "as_of": report.as_of,
            "missing": report.missing,
            "unnamed": report.unnamed,
            "unreachable": list(report.unreachable),
            "problems": report.problems,
        }


def is_terminal() -> bool:
    """Return whether somebody can answer a question."""
    return sys.stdin.isatty()


def _warn(report: NamesReport) -> None:
    for volume, at in report.as_of.items():
        since = "at a time that nobody knows" if at is None else _time(at)
        print_notice(
            f"insitu://{volume}: names are as they were {since}. What was written, moved or removed after "
            f"that may be as it was before."
        )
    for volume, count in report.missing.items():
        if count:
            files, were = format_count(count, "more file"), inflect(count, "was", "were")
            print_notice(f"insitu://{volume}: {files} {were} there, of which no node says anything.")
    for volume, count in report.unnamed.items():
        if count:
            blocks, belong = format_count(count, "block"), inflect(count, "belongs", "belong")
            print_notice(
                f"insitu://{volume}: {blocks} {belong} to no file that is known: manifests are lost, or "
                f"files were removed, replaced or never published."
            )
    if report.unreachable:
        print_notice(
            f"{', '.join(report.unreachable)} can't be asked, and may hold more: bring these nodes up before "
            f"names are put back."
        )
    for problem in report.problems:
        print_notice(f"passed over: {problem}")


def _url(volume: str, path: str) -> str:
    return f"insitu://{volume}/{path}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
