"""Compares the cases of `keras_cases` under strategies with plain Keras, and says where they differ.

python keras_comparison.py [--backend B] [--strategy S ...] [--case NAME ...] [--json FILE] [--plain FILE]
    compares and prints a table
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from keras_case_processes import DEADLINE, Outcomes, Processes, case_of, members

TOLERANCE = 1e-4
HALF_TOLERANCE = 5e-2
STABLE = (TOLERANCE / 20, HALF_TOLERANCE / 4)
"""A training is stable where a rounding error in inputs and first weights moves no number by more than these.
Replicas round in many places."""


@dataclass(frozen=True)
class Verdict:
    """How a case came out under a strategy, beside plain Keras."""

    case: str
    strategy: str
    backend: str
    #: "right", "different", "refused", "crash" or "endless"; "no plain run" where plain Keras fails itself;
    #: "unstable" where it differs, but so does plain Keras after a rounding error
    status: str
    #: the first difference, or the first line of the error
    detail: str = ""
    #: whether every number has the same bits; False unless right
    bits: bool = False
    seconds: float = 0.0


class Comparer:
    """Runs cases when they are asked for, and keeps the processes and the answers for the next ones."""

    def __init__(self, plain: dict[str, Outcomes] | None = None) -> None:
        """`plain` are answers of plain Keras from a run before, by backend and name."""
        self._root = Path(tempfile.mkdtemp(prefix="insitu-cases-"))
        self._groups: dict[tuple[str, str], Processes] = {}
        self._answers: dict[tuple[str, str, str], Outcomes] = {}
        #: answers of plain Keras and of the strategy to the last description
        self.last: tuple[Outcomes, Outcomes] = ([], [])
        for name, answers in (plain or {}).items():
            backend, case = name.split(" ")
            self._answers[case, "plain", backend] = answers

    def plain(self) -> dict[str, Outcomes]:
        """The answers of plain Keras so far, by backend and name."""
        return {f"{key[2]} {key[0]}": value for key, value in self._answers.items() if key[1] == "plain"}

    def verdict(self, name: str, strategy: str, backend: str) -> Verdict:
        """How the case of this name comes out."""
        from keras_cases import CASES

        plain = self.answers(name, "plain", backend)
        others = self.answers(name, strategy, backend) if _is_done(plain) else []
        return judge(CASES[name], strategy, backend, plain, others)

    def verdict_of(self, description: dict[str, Any], strategy: str, backend: str) -> Verdict:
        """How the training that `random_models` describes comes out."""
        command = {"description": description}
        plain = self._run(command, "plain", backend)
        others = self._run(command, strategy, backend) if _is_done(plain) else []
        self.last = plain, others
        verdict = judge(case_of(command), strategy, backend, plain, others)
        if verdict.status == "different" and not self._is_stable(description, backend, plain):
            return replace(verdict, status="unstable")
        return verdict

    def _is_stable(self, description: dict[str, Any], backend: str, plain: Outcomes) -> bool:
        nudged = self._run({"description": {**description, "nudged": True}}, "plain", backend)
        if not _is_done(nudged):
            return False
        return not first_difference(plain[0]["result"], nudged[0]["result"], "", *STABLE)

    def answers(self, name: str, strategy: str, backend: str) -> Outcomes:
        """What each process says of the case; fewer where some never came to an end."""
        key = (name, strategy, backend)
        if key not in self._answers:
            self._answers[key] = self._run({"case": name}, strategy, backend)
        return self._answers[key]

    def _run(self, command: dict[str, Any], strategy: str, backend: str) -> Outcomes:
        # A machine that stood still for a while looks like a case that never ends: once more.
        return self._run_once(command, strategy, backend) or self._run_once(command, strategy, backend)

    def _run_once(self, command: dict[str, Any], strategy: str, backend: str) -> Outcomes:
        group = self._group(strategy, backend)
        answers = group.run(command)
        if not group.is_sound_after(answers):
            self._groups.pop((strategy, backend)).stop()
        return answers

    def _group(self, strategy: str, backend: str) -> Processes:
        for key in [key for key in self._groups if key[1] != backend]:
            self._groups.pop(key).stop()
        if (strategy, backend) not in self._groups:
            self._groups[strategy, backend] = Processes(strategy, backend, self._root)
        return self._groups[strategy, backend]

    def close(self) -> None:
        """Ends all processes."""
        while self._groups:
            self._groups.popitem()[1].stop()
        shutil.rmtree(self._root, ignore_errors=True)


def _is_done(plain: Outcomes) -> bool:
    return bool(plain) and plain[0]["status"] == "done"


def first_difference(
    plain: Any, other: Any, where: str = "", tolerance: float = TOLERANCE, half: float = HALF_TOLERANCE
) -> str:
    """Where two results differ first, or an empty text. `half` is the tolerance below a key of that name."""
    if isinstance(plain, dict) and isinstance(other, dict):
        if plain.keys() != other.keys():
            lost, new = sorted(plain.keys() - other.keys()), sorted(other.keys() - plain.keys())
            return f"{where or 'result'}: lost {lost}, new {new}"
        for name, value in plain.items():
            kind = half if name == "half" else tolerance
            inner = f"{where}.{name}".lstrip(".")
            if found := first_difference(value, other[name], inner, kind, half):
                return found
        return ""
    if isinstance(plain, list) and isinstance(other, list):
        return _list_difference(plain, other, where, tolerance)
    if _is_number(plain) and _is_number(other):
        return _list_difference([plain], [other], where, tolerance)
    return "" if plain == other else f"{where}: {plain!r} became {other!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _list_difference(plain: list[Any], other: list[Any], where: str, tolerance: float) -> str:
    try:
        left, right = np.asarray(plain, "float64"), np.asarray(other, "float64")
    except (TypeError, ValueError):
        if len(plain) != len(other):
            return f"{where}: length {len(plain)} became {len(other)}"
        pairs = enumerate(zip(plain, other, strict=True))
        return next(
            (d for i, (a, b) in pairs if (d := first_difference(a, b, f"{where}[{i}]", tolerance))), ""
        )
    if left.shape != right.shape:
        return f"{where}: shape {left.shape} became {right.shape}"
    if left.size == 0:
        return ""
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return f"{where}: {_shown(left)} became {_shown(right)}"
    exact = all(_is_whole(value) for value in _flat(plain))
    room = 0.0 if exact else tolerance * max(float(np.abs(left[finite]).max(initial=0.0)), 1e-3)
    if np.abs(left[finite] - right[finite]).max(initial=0.0) > room:
        return f"{where}: {_shown(left)} became {_shown(right)}"
    return ""


def _flat(values: Any) -> Iterable[Any]:
    if not isinstance(values, list):
        return [values]
    return [leaf for value in values for leaf in _flat(value)]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int)


def _shown(values: Any) -> str:
    shown = ", ".join(f"{value:.6g}" for value in values.reshape(-1)[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]"


def judge(case: Any, strategy: str, backend: str, plain: Outcomes, others: Outcomes) -> Verdict:
    """What the answers of a group mean beside the answer of plain Keras."""

    def verdict(status: str, detail: str = "", bits: bool = False) -> Verdict:
        seconds = max((answer.get("seconds", 0.0) for answer in others), default=DEADLINE)
        return Verdict(case.name, strategy, backend, status, detail, bits, round(seconds, 2))

    if not _is_done(plain):
        return verdict("no plain run", plain[0]["detail"] if plain else "endless")
    for status in ("endless", "crash", "refused"):
        for answer in others:
            if answer["status"] == status:
                alone = "" if len(others) == members(strategy) else " (the others continue)"
                return verdict(status, answer["detail"] + alone)
    if len(others) < members(strategy):
        return verdict("endless", f"not done after {DEADLINE:g} s")
    bits = True
    for index, answer in enumerate(others):
        keys = case.compared(strategy, backend, index, plain[0]["result"])
        left, right = ({k: v for k, v in a["result"].items() if k in keys} for a in (plain[0], answer))
        if found := first_difference(left, right):
            return verdict("different", found if not index else f"on worker {index}: {found}")
        bits = bits and left == right
    return verdict("right", bits=bits)


def compare(
    comparer: Comparer, backend: str, strategies: Iterable[str], names: Collection[str] = (), tell: Any = None
) -> list[Verdict]:
    """Runs the cases (all, or those with these names) plainly and under each strategy."""
    from keras_cases import CASES

    chosen = [c for n, c in CASES.items() if backend in c.backends and (n in names or not names)]
    verdicts = []
    for strategy in strategies:
        for case in chosen:
            if strategy in case.strategies:
                verdicts.append(comparer.verdict(case.name, strategy, backend))
                if tell is not None:
                    tell(verdicts[-1])
    return verdicts


def table(verdicts: Iterable[Verdict]) -> str:
    """Counts by strategy and backend, then each case that isn't right."""
    verdicts = list(verdicts)
    states = ("right", "different", "refused", "crash", "endless", "no plain run")
    lines = [f"{'':24}" + "".join(f"{state:>14}" for state in (*states, "same bits"))]
    for group in dict.fromkeys((v.backend, v.strategy) for v in verdicts):
        own = [v for v in verdicts if (v.backend, v.strategy) == group]
        counts = [sum(v.status == state for v in own) for state in states]
        lines.append(
            f"{' '.join(group):24}" + "".join(f"{n:>14}" for n in (*counts, sum(v.bits for v in own)))
        )
    lines.append("")
    lines += [
        f"{v.backend:10} {v.strategy:8} {v.status:9} {v.case}: {v.detail}"
        for v in verdicts
        if v.status != "right"
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="tensorflow")
    parser.add_argument("--strategy", nargs="*", default=["one", "mirrored"])
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="write all verdicts")
    parser.add_argument("--plain", type=Path, help="answers of plain Keras: read if it exists, and written")
    options = parser.parse_args()

    def tell(verdict: Verdict) -> None:
        print(f"{verdict.strategy:8} {verdict.status:9} {verdict.case} {verdict.detail}", flush=True)

    # This process trains nothing, and the lightest backend will do.
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    known = options.plain is not None and options.plain.exists()
    comparer = Comparer(json.loads(options.plain.read_text()) if known else None)
    try:
        verdicts = compare(comparer, options.backend, options.strategy, options.case, tell)
    finally:
        comparer.close()
        if options.plain is not None:
            options.plain.write_text(json.dumps(comparer.plain()))
    print(table(verdicts))
    if options.json:
        options.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))


if __name__ == "__main__":
    main()
