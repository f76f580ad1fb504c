"""Sends hosts what the tasks of a job have written into its folder on the head's machine."""

from __future__ import annotations

from pathlib import Path

from insitu.cluster.agents.folder_copies import STATISTICS, list_changes, read_parts, scan_folder
from insitu.cluster.agents.host_link import HostLink

_OF_LEADER = ("checkpoints/", "export/", "summaries/")


def push_files(root: Path, link: HostLink, *, whole: bool) -> None:
    """Send a host what tasks on others have written and it doesn't have. `root` is the job's folder.

    Unless `whole`, without what only the task that leads the others reads, which may be large.
    """
    if link.shares_folder:
        return
    found = scan_folder(root, link.held)
    if not whole:
        found = {path: mark for path, mark in found.items() if not path.startswith(_OF_LEADER)}
    known = {p: mark for p, mark in link.held.items() if whole or not p.startswith(_OF_LEADER)}
    changed, removed = list_changes(found, known)
    if removed:
        link.tell({"do": "removed", "paths": removed})
    for path, _ in changed:
        link.send_all({"do": "file", **part} for part in read_parts(root, path))
    link.held = {p: mark for p, mark in link.held.items() if p not in known} | found


def push_statistics(root: Path, link: HostLink) -> None:
    """Send a host the statistics that tasks on others have found: its own wait for them."""
    found = {} if link.shares_folder else scan_folder(root, link.held, (STATISTICS,))
    for path, _ in list_changes(found, link.held)[0]:
        link.send_all({"do": "file", **part} for part in read_parts(root, path))
        link.held[path] = found[path]
