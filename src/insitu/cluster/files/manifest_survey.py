"""Finds out which files nodes hold, from the manifests beside their blocks, and which of them to believe.

A manifest that a metadata store has had is believed before one of a writer, unless the writer has seen that
version, or wrote later. Uncertain files are named.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from insitu.base.errors import InsituError
from insitu.base.spec import NodeId
from insitu.base.wording import format_count
from insitu.cluster.files.asking import CLIENT_SECONDS, Suspects, ask_all, ask_first
from insitu.cluster.files.client import FileClient
from insitu.cluster.files.peers import Fields, Peers, View
from insitu.grid.shared_files import (
    Entry,
    FileManifest,
    NamesState,
    NameTree,
    find_digest,
    parse_manifest,
)

_AT_ONCE = 8
Path = tuple[str, str]
"""A volume, and a path in it."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that can be put back."""

    #: Its volume.
    volume: str
    #: Its path.
    path: str
    #: Its content.
    entry: Entry


@dataclass(slots=True)
class NamesReport:
    """The files on nodes, compared with the names in the metadata store."""

    #: The content of the store.
    state: NamesState
    #: The files that are believed, and of which all blocks are there; of a store with names, those that it
    #: doesn't have, which aren't put there.
    found: list[FoundFile] = field(default_factory=list)
    #: Those of `found` that may not be the last version: they were written shortly before the loss, so that
    #: nobody knows whether they were published; or are those before such a one; or a metadata store had them
    #: that wasn't the last one, so that they may have been removed.
    unconfirmed: list[Path] = field(default_factory=list)
    #: (volume, path, why) of files that can't be put back, or not as they were last.
    incomplete: list[tuple[str, str, str]] = field(default_factory=list)
    #: (volume, path, what) of files that were passed over for another one.
    conflicts: list[tuple[str, str, str]] = field(default_factory=list)
    #: (volume, key) of manifests of versions that were replaced by those that were found.
    replaced: list[tuple[str, str]] = field(default_factory=list)
    #: When the manifests of each volume were all there and agreed with its names last, in seconds since 1970;
    #: None: nobody knows. Files that were written, moved or removed later may be as they were before.
    as_of: dict[str, float | None] = field(default_factory=dict)
    #: How many files each volume had then of which no manifest was found.
    missing: dict[str, int] = field(default_factory=dict)
    #: How many blocks of each volume belong to no file that is known: manifests of files are lost, or these
    #: were removed, replaced, or never published.
    unnamed: dict[str, int] = field(default_factory=dict)
    #: Nodes that were lost, or gave no answer. They may hold more.
    unreachable: list[NodeId] = field(default_factory=list)
    #: Manifests that can't be read, as text.
    problems: list[str] = field(default_factory=list)
    #: The highest generation of all manifests.
    generation: int = 0

    @property
    def can_rebuild(self) -> bool:
        """Whether the files that were found can be put into the metadata store: it has no names."""
        return not self.state.has_names or self.state.is_rebuilding

    @property
    def is_whole(self) -> bool:
        """Whether all manifests that nodes have held were found and can be read."""
        return not (self.unreachable or self.problems or any(self.missing.values()))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left out that nodes hold, or are known to have held."""
        if not self.can_rebuild:
            return not (self.found or self.incomplete)
        is_lost = not self.found and any(self.unnamed.values())
        return self.is_whole and not (self.incomplete or is_lost)


def survey_names(
    state: NamesState, tree: NameTree, client: FileClient, peers: Peers, view: View
) -> NamesReport:
    """Look through all nodes that answer. Raises InsituError."""
    report, suspects = NamesReport(state), Suspects()
    listed = _list(peers, view, suspects, report)
    manifests = _read(listed, peers, view, suspects, report)
    report.generation = max((each.generation for each in manifests), default=0)
    _record_volumes(manifests, report)
    own = "" if state.origin is None else state.origin.id
    manifests = [each for each in manifests if each.path and not (own and each.store == own)]
    if not report.can_rebuild:
        known = {find_digest(e) for volume in tree.list_volumes() for _, e in tree.list_files(volume)[0]}
        others = [each for each in manifests if each.is_confirmed and each.digest not in known]
        report.as_of, report.missing, manifests = {}, {}, others
    chosen = _choose(manifests, report)
    volumes = {volume for volume, _ in listed} | {each.volume for each in manifests}
    held = _list_held(volumes, peers, view, suspects)
    named = {block.key for each in manifests for block in (*each.entry.lists, *each.entry.blocks)}
    for at, order in sorted(chosen.items()):
        named |= _take_whole(at, order, held[at[0]], client, report)
    if report.can_rebuild:
        report.unnamed = {volume: len(keys - named) for volume, keys in sorted(held.items())}
    _part_folders(report)
    return report


def drop_replaced(report: NamesReport, peers: Peers, view: View) -> None:
    """Remove the manifests of versions that were replaced: they would seem to be of files that nobody knows.
    If a node fails, they do until somebody gives them up."""
    by_volume: dict[str, list[str]] = defaultdict(list)
    for volume, key in report.replaced:
        by_volume[volume].append(key)
    for volume, keys in by_volume.items():
        fields: Fields = {"volume": volume, "keys": keys}
        ask_all(
            view.alive,
            lambda node, fields=fields: peers.find(node, view).act("drop", fields),  # type: ignore[misc]
            Suspects(),
            CLIENT_SECONDS,
        )


def _list(peers: Peers, view: View, suspects: Suspects, report: NamesReport) -> dict[Path, list[NodeId]]:
    """Return which nodes hold each manifest, by volume and key."""
    answers, failures = ask_all(
        [*view.alive, *view.away],
        lambda node: peers.find(node, view).act("manifests", {}, seconds=CLIENT_SECONDS)[0]["held"],
        suspects,
        CLIENT_SECONDS,
    )
    report.unreachable = sorted(failures)
    listed: dict[Path, list[NodeId]] = defaultdict(list)
    for node, held in sorted(answers.items()):
        for volume, keys in held.items():
            for key in keys:
                listed[volume, key].append(node)
    return listed


def _read(
    listed: Mapping[Path, Sequence[NodeId]], peers: Peers, view: View, suspects: Suspects, report: NamesReport
) -> list[FileManifest]:
    def read(at: Path) -> FileManifest | str:
        fields: Fields = {"volume": at[0], "key": at[1]}

        def ask(node: NodeId) -> FileManifest:
            data = peers.find(node, view).act("get", fields, seconds=CLIENT_SECONDS)[1]
            found = parse_manifest(data)
            if (found.volume, found.key) != at:
                raise InsituError("it is the manifest of another file")
            return found

        try:
            return ask_first(listed[at], ask, suspects, CLIENT_SECONDS)
        except (InsituError, OSError) as error:
            return f"manifest {at[1]} of {at[0]} on {', '.join(listed[at])}: {error}"

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        answers = list(threads.map(read, sorted(listed)))
    report.problems = [each for each in answers if isinstance(each, str)]
    return [each for each in answers if isinstance(each, FileManifest)]


def _record_volumes(manifests: Iterable[FileManifest], report: NamesReport) -> None:
    """Note when the manifests of each volume agreed with names, and how many files of then weren't found."""
    by_volume: dict[str, list[FileManifest]] = defaultdict(list)
    for each in manifests:
        by_volume[each.volume].append(each)
    for volume, group in sorted(by_volume.items()):
        marks = [each for each in group if not each.path]
        last = max(marks, key=lambda mark: (mark.generation, mark.seen), default=None)
        report.as_of[volume] = None if last is None else last.entry.modified
        if last is not None:
            known = [each for each in group if each.path and each.store == last.store]
            there = {each.digest for each in known if each.seen <= last.seen}
            report.missing[volume] = max(0, last.files - len(there))


def _choose(manifests: Iterable[FileManifest], report: NamesReport) -> dict[Path, list[FileManifest]]:
    """Return the manifests of each path to believe: the first, else the one that it replaced."""
    last: dict[tuple[str, str], FileManifest] = {}
    for each in manifests:
        before = last.get((each.volume, each.digest))
        # A file is at one path. The name that was found last counts, or else that of the writer.
        if before is None or _rank_name(before) < _rank_name(each):
            last[each.volume, each.digest] = each
    by_path: dict[Path, list[FileManifest]] = defaultdict(list)
    for each in last.values():
        by_path[each.volume, each.path].append(each)
    return {at: _order(at, group, report) for at, group in by_path.items()}


def _rank_name(manifest: FileManifest) -> tuple[object, ...]:
    return manifest.is_confirmed, manifest.generation, manifest.entry.version, manifest.seen, manifest.path


def _order(at: Path, group: Collection[FileManifest], report: NamesReport) -> list[FileManifest]:
    """Return the manifests of a path, the one to be believed first."""
    confirmed = sorted(
        (each for each in group if each.is_confirmed), key=lambda each: (each.generation, each.entry.version)
    )
    writers = sorted(
        (each for each in group if not each.is_confirmed),
        key=lambda each: (each.replaces, each.entry.modified, each.digest),
    )
    base = confirmed[-1] if confirmed else None
    order = [each for each in reversed(writers) if base is None or _is_newer(each, base)]
    order += [] if base is None else [base]
    for each in group:
        if _is_replaced(each, order[0]):
            if each not in order:
                report.replaced.append((at[0], each.key))
        elif each is not order[0]:
            what = (
                f"another version of {_describe_time(each.entry)}, {each.entry.size} bytes, was passed over"
            )
            report.conflicts.append((*at, what))
    return order


def _is_newer(writers: FileManifest, confirmed: FileManifest) -> bool:
    """Return whether a writer's version counts as newer than one that a metadata store has had."""
    return writers.replaces >= confirmed.entry.version or writers.entry.modified > confirmed.entry.modified


def _is_replaced(manifest: FileManifest, by: FileManifest) -> bool:
    """Return whether it is certain that a version was replaced by another one."""
    if manifest is by:
        return False
    if manifest.is_confirmed:
        return by.is_confirmed or by.replaces >= manifest.entry.version
    return not by.is_confirmed and manifest.replaces < by.replaces


def _list_held(
    volumes: Iterable[str], peers: Peers, view: View, suspects: Suspects
) -> dict[str, frozenset[str]]:
    """Return the keys of all blocks of volumes."""
    held = {}
    for volume in volumes:
        answers, _ = ask_all(
            [*view.alive, *view.away],
            lambda node, volume=volume: peers.find(node, view).act("held", {"volume": volume})[0]["held"],  # type: ignore[misc]
            suspects,
            CLIENT_SECONDS,
        )
        held[volume] = frozenset(key for keys in answers.values() for key in keys)
    return held


def _take_whole(
    at: Path, order: Sequence[FileManifest], held: Collection[str], client: FileClient, report: NamesReport
) -> set[str]:
    """Take the first manifest of which all blocks are there. Return the blocks that lists name."""
    named: set[str] = set()
    for number, manifest in enumerate(order):
        if why := _find_missing(manifest, held, client, named):
            older = number + 1 < len(order)
            then = ". It may not have been published; the version before is taken" if older else ""
            report.incomplete.append((*at, f"{why}{then}"))
            continue
        report.found.append(FoundFile(*at, manifest.entry))
        is_older = manifest.generation < report.generation and report.can_rebuild
        if not manifest.is_confirmed or is_older or number:
            report.unconfirmed.append(at)
        rest = [each for each in order[number + 1 :] if _is_replaced(each, manifest)]
        report.replaced += [(at[0], each.key) for each in rest]
        break
    return named


def _find_missing(manifest: FileManifest, held: Collection[str], client: FileClient, named: set[str]) -> str:
    """Return what of a file is on no node; "": nothing. `named` gets the blocks that its lists name."""
    entry = manifest.entry
    blocks = [*entry.lists, *entry.blocks]
    missing = sum(block.key not in held for block in blocks)
    if not missing and entry.lists:
        try:
            blocks += client.list_blocks(manifest.volume, entry.lists, ())
        except (InsituError, OSError) as error:
            return str(error)
        named |= {block.key for block in blocks}
        missing = sum(block.key not in held for block in blocks)
    return (
        f"No node that answers has {missing} of {format_count(entry.block_count, 'block')}" if missing else ""
    )


def _part_folders(report: NamesReport) -> None:
    """Pass over files whose path is a folder of files that are newer, and the other way round."""
    taken: dict[Path, bool] = {}  # whether it is a file
    kept = []
    for each in sorted(report.found, key=lambda found: found.entry.modified, reverse=True):
        names = each.path.split("/")
        above = [(each.volume, "/".join(names[:count])) for count in range(1, len(names))]
        if (each.volume, each.path) in taken or any(taken.get(folder) for folder in above):
            when = _describe_time(each.entry)
            what = f"a file of {when} was passed over: a file and a folder share its path"
            report.conflicts.append((each.volume, each.path, what))
            continue
        taken |= {(each.volume, each.path): True, **dict.fromkeys(above, False)}
        kept.append(each)
    report.found = sorted(kept, key=lambda found: (found.volume, found.path))
    there = {(each.volume, each.path) for each in kept}
    report.unconfirmed = [at for at in report.unconfirmed if at in there]


def _describe_time(entry: Entry) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified))
