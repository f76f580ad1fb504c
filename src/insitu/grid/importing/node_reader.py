"""Has nodes read the sources of an import themselves: files that all of them see, or URLs.

Sources are cut into units, and each node takes the next unit when it has read one. The rows go from there to
the owners of their partitions, which put them into the order of the units (`row_receiver.py`).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from insitu.base.errors import DamagedImages, SourceError
from insitu.base.spec import NodeId
from insitu.grid.importing.import_journal import ImportJournal, Place
from insitu.grid.intake import FileState, ImportPlan, Unit
from insitu.grid.sources import Source, SourceOptions, address_of, counts_rows

if TYPE_CHECKING:
    from insitu.grid.transfer import RemoteStores

UNIT_BYTES = 64 << 20
"""About the bytes of a unit, if files can be read from any row on."""
_SLOTS = 2
"""Units that a node reads at the same time: one is read while the other one begins or ends."""
_MOST_NAMED = 5
"""Problems of a host that a message names."""
_NAMES_AT_ONCE = 200
"""Names of sources in one question: a group of files has a long one."""

Counts = npt.NDArray[np.int64]
T = TypeVar("T")


def name_of(source: Source) -> str:
    """Return what other hosts open a source by."""
    return address_of(source.path)


def check_seen(remote: RemoteStores, sources: Sequence[Source], states: Sequence[FileState]) -> None:
    """Raise SourceError unless all nodes see the files as this host does. Raises TransferError."""
    names = [name_of(source) for source in sources]
    shown = {name: str(source.path) for name, source in zip(names, sources, strict=True)}
    problems: dict[NodeId, list[str]] = {}
    for node in remote.all_nodes:
        for first in range(0, len(names), _NAMES_AT_ONCE):
            some = names[first : first + _NAMES_AT_ONCE]
            answers = remote.imports.see_files(node, some)
            for name, answer, state in zip(some, answers, states[first:], strict=False):
                if isinstance(answer, str):
                    problems.setdefault(node, []).append(answer)
                elif tuple(answer) != (state.size, state.mtime_ns):
                    problems.setdefault(node, []).append(f"{shown[name]} is another file there")
    if not problems:
        return
    seeing = [node for node in remote.all_nodes if node not in problems]
    named = "; ".join(
        f"{node}: {'; '.join(found[:_MOST_NAMED])}" + (" ..." if len(found) > _MOST_NAMED else "")
        for node, found in problems.items()
    )
    raise SourceError(
        f"Nodes that read sources themselves must all see them. Received: files that this host sees"
        f"{' and ' + ', '.join(seeing) if seeing else ''}, but not {', '.join(problems)} ({named}). Put them "
        f"where all hosts see them under the same path, or give `--read-on here` to read them on this host"
    )


def cut_units(sources: Sequence[Source], states: Sequence[FileState]) -> list[Unit]:
    """Return the units of all sources, with `first_row` counted as if `expected_rows` were right."""
    units: list[Unit] = []
    before = 0
    for source, state in zip(sources, states, strict=True):
        starts = _row_starts(source, state)
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            whole = stop is None and not (source.format in ("npy", "parquet") and counts_rows(source))
            end = None if whole else (source.expected_rows if stop is None else stop)
            name = name_of(source)
            units.append(Unit(len(units), name, source.format, state, start, end, before + start))
        before += source.expected_rows
    return units


def _row_starts(source: Source, state: FileState) -> list[int]:
    """Return the first row of each unit of a source."""
    size = max(1, source.expected_rows * UNIT_BYTES // max(1, state.size))
    if source.format == "npy" and counts_rows(source):
        return list(range(0, source.expected_rows, size))
    if source.format != "parquet":
        return [0]
    starts = [0]
    for start in getattr(source, "row_starts", []):  # a row group is decoded from its beginning
        if start - starts[-1] >= size:
            starts.append(start)
    return starts


class NodeReading:
    """The reading of one import by the nodes of its cluster."""

    def __init__(self, remote: RemoteStores, plan: ImportPlan) -> None:
        self._nodes, self._imports = remote.all_nodes, remote.imports
        self._options = plan.node_options or SourceOptions()
        self._sources, self._states = plan.sources, plan.states
        self._plan = plan
        self._lock = threading.Lock()
        self._rows = {name_of(source): source.expected_rows for source in plan.sources}
        #: What is wrong with each image that was passed over, in the order of the units.
        self.skipped: list[str] = []
        #: Bytes of all sources.
        self.source_bytes = plan.source_bytes
        #: All units, in the order of their rows.
        self.units = cut_units(plan.sources, plan.states)

    def number_rows(self) -> None:
        """Find the index of the first row of each unit, if it decides about the rows' partitions.

        Files that don't say how many rows they have are read once for that, all but the last one. Raises
        SourceError, TransferError.
        """
        rows = [source.expected_rows for source in self._sources]
        unsure = [i for i, source in enumerate(self._sources[:-1]) if not counts_rows(source)]
        plan = self._plan.rows
        decides = plan.key is None or plan.row_id is not None or plan.sample is not None
        if decides and not plan.primaries and unsure:
            whole = {i: self._whole(i) for i in unsure}

            def count(node: NodeId, unit: Unit) -> int:
                return self._imports.count_unit(node, unit, self._options, lambda size: None)

            found = self._run([whole[i] for i in unsure], count)
            for i, counted in zip(unsure, found, strict=True):
                rows[i] = counted
        firsts = dict(zip(map(name_of, self._sources), [0, *itertools.accumulate(rows)], strict=False))
        self.units = [
            replace(unit, first_row=self._plan.first_row + firsts[unit.path] + unit.start)
            for unit in self.units
        ]

    def _run(self, units: Sequence[Unit], run: Callable[[NodeId, Unit], T]) -> list[T]:
        return run_in_turn(self._nodes, units, run, self._imports.stopped.set)

    def _whole(self, number: int) -> Unit:
        source = self._sources[number]
        return Unit(number, name_of(source), source.format, self._states[number], 0, None, 0)

    def _bytes_of(self, unit: Unit) -> int:
        """Return about the bytes of a unit in its file."""
        rows = self._rows[unit.path]
        return unit.state.size * ((rows if unit.stop is None else unit.stop) - unit.start) // max(1, rows)

    def read(
        self,
        place: Place,
        journal: ImportJournal | None,
        note: Callable[[Counts], None],
        on_read: Callable[[int], None],
    ) -> None:
        """Have the nodes read all units from `place` on. `note` receives the rows of each, by destination,
        and `on_read` the number of bytes read from sources: from threads, one at a time.

        Raises SourceError, TransferError, TextsTooLong.
        """
        rows = self._plan.rows
        owners = [node for node in self._nodes if rows.held_by(node)]
        pending: dict[int, Counts] = {}
        counts, done = np.array(place.counts, np.int64), place.source
        skips: dict[int, list[str]] = {}
        bytes_done = list(itertools.accumulate(self._bytes_of(unit) for unit in self.units))

        def count(size: int) -> None:
            with self._lock:
                on_read(size)

        def read(node: NodeId, unit: Unit) -> None:
            nonlocal counts, done
            found, skipped = self._imports.read_unit(node, rows, unit, self._options, owners, count)
            with self._lock:
                note(found)
                skips[unit.number] = skipped
                self.skipped = [problem for number in sorted(skips) for problem in skips[number]]
                pending[unit.number] = found
                while done in pending:
                    counts = counts + pending.pop(done)
                    done += 1
                    if journal is not None:
                        journal.note(done, 0, int(counts.sum()), bytes_done[done - 1], counts)

        try:
            self._run(self.units[place.source :], read)
        except DamagedImages as error:
            waiting = [unit for unit in self.units[done:] if unit.number not in pending]
            raise self._find_damaged(waiting, error) from error

    def _find_damaged(self, units: Sequence[Unit], found: DamagedImages) -> DamagedImages:
        """Return the error for damaged images with those of all of `units`."""
        problems = list(found.problems)
        self._imports.stopped.clear()

        def look(node: NodeId, unit: Unit) -> list[str]:
            try:
                self._imports.count_unit(node, unit, self._options, lambda size: None)
            except DamagedImages as error:
                return list(error.problems)
            return []

        for more in self._run(units, look):
            problems += more
        return DamagedImages(tuple(sorted(set(problems))))


def run_in_turn(
    nodes: Sequence[NodeId],
    units: Sequence[Unit],
    run: Callable[[NodeId, Unit], T],
    stop: Callable[[], None],
) -> list[T]:
    """Run something for each unit on some node: a node that has ended one takes the next one.

    Returns the results in the order of the units. The first failure is raised; `stop` ends the others.
    """
    waiting, results = deque(range(len(units))), {}
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work(node: NodeId) -> None:
        while True:
            with lock:
                if failures or not waiting:
                    return
                number = waiting.popleft()
            try:
                results[number] = run(node, units[number])
            except BaseException as error:
                with lock:
                    failures.append(error)
                stop()
                return

    threads = [
        threading.Thread(target=work, args=(node,), name=f"insitu-read-on-{node}", daemon=True)
        for _ in range(_SLOTS)
        for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[number] for number in range(len(units))]
