"""Trains random small models plainly and under a strategy, and compares them.

python random_models.py hunt [--strategy S] [--backend B] [--examples N] [--seconds N] [--seed K] ...
    draws descriptions, and prints the smallest one for each kind of difference
python random_models.py replay DESCRIPTION|FILE [--strategy S] [--backend B]
    trains as a description in JSON says, and prints how that comes out

A description is plain data: {"seed", "policy", "model", "compile", "calls"}. `random_descriptions` and
`random_calls` draw it, `described_trainings` trains as it says.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from keras_comparison import Comparer, Verdict
from random_calls import calls
from random_descriptions import Description, Draw, Setting, compilations, models, pick, rarely

Rule = tuple[str, Callable[[str], bool]]
Tell = Callable[[str], None]
ATTEMPTS = 60


@st.composite
def descriptions(draw: Draw, setting: Setting) -> Description:
    """A whole training."""
    policy = draw(pick("mixed_float16", "mixed_bfloat16")) if rarely(draw, 12) else "float32"
    half = policy != "float32"
    model = draw(models(setting))
    compiled = draw(compilations(setting, model, half))
    made = draw(calls(setting, model, compiled, half))
    return {"seed": draw(pick(1, 2, 3)), "policy": policy, "model": model, "compile": compiled, "calls": made}


# Refusals


def _holds(*texts: str) -> Callable[[str], bool]:
    """Whether the description in JSON holds one of these texts."""
    return lambda text: any(part in text for part in texts)


SUMS = ("own summed", "loss of sums", '"reduce": "sum"')
COUPLED = (*SUMS, "Dice", "Tversky", "own of all")
REFUSALS: tuple[Rule, ...] = (
    (
        "A loss over several shards must be a mean over rows",
        _holds('"reduction": "sum"', "mean_with_sample_weight"),
    ),
    ("The gradient of a global batch must be the mean over its rows", _holds(*COUPLED)),
    ("A log that a step returns", _holds(*COUPLED)),
    ("With several replicas a metric combines from parts", _holds("own Kept")),
    ("With several replicas a weight that a step moves combines", _holds("own Counter")),
)
"""What a strategy with several replicas may refuse: a part of the error's text, and what the description must
hold. One device refuses nothing."""


def is_allowed(verdict: Verdict, description: Description) -> bool:
    """Whether a strategy may come out like this."""
    if verdict.status in ("right", "no plain run", "unstable"):
        return True
    text = json.dumps(description)
    return (
        verdict.status == "refused"
        and verdict.strategy != "one"
        and any(rule in verdict.detail and holds(text) for rule, holds in REFUSALS)
    )


# Hunting


@dataclass(frozen=True)
class Failure:
    """A training that comes out in another way than it may."""

    #: the smallest description that was found
    description: Description
    verdict: Verdict

    @property
    def kind(self) -> str:
        return kind_of(self.verdict)

    def __str__(self) -> str:
        verdict, text = self.verdict, json.dumps(self.description)
        return (
            f"{verdict.status}: {verdict.detail}\n    python tests/support/random_models.py replay "
            f"--backend {verdict.backend} --strategy {verdict.strategy} '{text}'"
        )


def kind_of(verdict: Verdict) -> str:
    """Status and place of a difference, or an error without its values: failures of one cause are alike."""
    if verdict.status == "different":
        where = verdict.detail.split(": ")[0]
        return "different " + re.sub(r"\[?\d+\]?", "", where)
    return f"{verdict.status} " + re.sub(r"\d+|'[^']*'", "", verdict.detail)[:70]


@dataclass
class Hunt:
    """Draws descriptions and keeps the failures."""

    comparer: Comparer
    setting: Setting
    tell: Tell
    #: trainings that may be done to make a failing one smaller
    attempts: int = ATTEMPTS
    #: descriptions with one of these texts are left out
    without: tuple[str, ...] = ()
    #: the smallest failure of each kind
    found: dict[str, Failure] = field(default_factory=dict)
    #: how many trainings came out in which way
    counts: dict[str, int] = field(default_factory=dict)
    #: verdicts so far, by description
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    #: seconds that trainings took under the strategy and plainly
    seconds: float = 0.0
    #: seconds of trainings after which nothing more is drawn
    limit: float = math.inf

    def verdict(self, description: Description) -> Verdict:
        text = json.dumps(description)
        if text not in self.verdicts:
            begun = time.monotonic()
            setting = self.setting
            self.verdicts[text] = self.comparer.verdict_of(description, setting.strategy, setting.backend)
            self.seconds += time.monotonic() - begun
        return self.verdicts[text]

    def run(self, examples: int, seed: int) -> list[Failure]:
        """Draws so many descriptions. After each failure it makes that one smaller, and continues."""
        done = 0
        while done < examples and self.seconds < self.limit:
            done += self._run_to_failure(examples - done, seed)
            seed += 1
        return list(self.found.values())

    def _run_to_failure(self, examples: int, seed: int) -> int:
        """Draws until there is a failure of a new kind, and keeps its smallest description. Returns how many
        descriptions were drawn before shrinking began."""
        drawn, kind, attempts = 0, "", 0

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=3 * examples,  # some describe the same
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
        )
        @hypothesis.given(descriptions(self.setting))
        def check(description: Description) -> None:
            nonlocal drawn, kind, attempts
            text = json.dumps(description)
            if any(part in text for part in self.without):
                return
            is_new = text not in self.verdicts
            attempts += is_new and bool(kind)
            is_over = drawn >= examples or attempts > self.attempts or self.seconds >= self.limit
            if is_new and is_over:
                return
            verdict = self.verdict(description)
            if is_new and not kind:
                drawn += 1
                self._count(verdict, description)
            if is_allowed(verdict, description):
                return
            failure = Failure(description, verdict)
            if not kind and failure.kind not in self.found:
                kind = failure.kind
            if failure.kind == kind:
                self.found[kind] = failure
                raise AssertionError(kind)

        try:
            check()
        except AssertionError:
            self.tell(str(self.found[kind]))
        return max(drawn, 1)  # something, also where all of them were known

    def _count(self, verdict: Verdict, description: Description) -> None:
        allowed = "" if verdict.status == "right" or not is_allowed(verdict, description) else " (allowed)"
        status = verdict.status + allowed
        self.counts[status] = self.counts.get(status, 0) + 1
        if verdict.status == "no plain run":
            detail = re.sub(r"\d+", "", verdict.detail)[:90]
            self.counts[f"  {detail}"] = self.counts.get(f"  {detail}", 0) + 1


# Command line


def _replay(comparer: Comparer, options: argparse.Namespace) -> None:
    given = options.description
    description = json.loads(given if given.startswith("{") else Path(given).read_text())
    verdict = comparer.verdict_of(description, options.strategy, options.backend)
    print(f"{verdict.status}: {verdict.detail}")
    for answers in comparer.last:
        for answer in answers:
            print(answer.get("trace", ""))


def _hunt(comparer: Comparer, options: argparse.Namespace) -> None:
    setting = Setting(options.strategy, options.backend)
    hunt = Hunt(
        comparer, setting, lambda text: print(text, flush=True), options.attempts, tuple(options.without)
    )
    hunt.limit = options.seconds
    failures = hunt.run(options.examples, options.seed)
    for status, count in sorted(hunt.counts.items()):
        print(f"{count:6} {status}")
    print(f"{hunt.seconds:.0f} s, {len(hunt.verdicts)} trainings with those that shrinking made")
    if options.keep:
        options.keep.write_text("".join(json.dumps(f.description) + "\n" for f in failures))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("hunt", "replay"))
    parser.add_argument("description", nargs="?", help="JSON, or a file with it")
    parser.add_argument("--backend", default="tensorflow")
    parser.add_argument("--strategy", default="one")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=math.inf, help="of trainings, until the hunt ends")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attempts", type=int, default=ATTEMPTS, help="to make each failure smaller")
    parser.add_argument("--without", nargs="*", default=(), help="leave out descriptions with these texts")
    parser.add_argument("--keep", type=Path, help="write the failures' descriptions, one a line")
    options = parser.parse_intermixed_args()
    # This process trains nothing, and the lightest backend will do.
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    comparer = Comparer()
    try:
        (_hunt if options.what == "hunt" else _replay)(comparer, options)
    finally:
        comparer.close()


if __name__ == "__main__":
    main()
