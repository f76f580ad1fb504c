"""What being able to recover costs while nothing fails: seconds a step of two workers, with and without.

  with     a step as `fit` does it: it runs as a unit of the group, reports its position to the controller,
           looks for a newer roster, and enters its rows in the ledger
  without  the same calls of the replica and of the group, and nothing else

Both alternate in the same processes, in the middle of a fit. `check` is the comparison of all replicas'
hashes, once in 1000 steps.
"""

from __future__ import annotations

import statistics

import common
import job_runs

STEPS = {"one layer": 20, "20 M": 1}
"""Steps of a turn: short turns, so that what slows the machine for a while slows both."""
ROUNDS = {"one layer": 200, "20 M": 60}
EVERY = 1000
"""Steps between two checks."""


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    rows, saved = [], {}
    with job_runs.home() as paths:
        for model in list(STEPS)[: 1 if options.quick else None]:
            rounds = options.rounds or (3 if options.quick else ROUNDS[model])
            told = {"model": model, "steps": STEPS[model], "rounds": rounds}
            figures = saved[model] = job_runs.run_job(paths, "overhead_task.py", **told)
            through, bare, check = (statistics.median(figures[k]) for k in ("with", "without", "check"))
            rows.append(
                [
                    model,
                    f"{1e3 * through:.3f}",
                    f"{1e3 * bare:.3f}",
                    f"{1e6 * (through - bare):.0f} us ({through / bare - 1:.2%})",
                    f"{1e3 * check:.2f} ms ({check / EVERY / bare:.2%})",
                ]
            )
    print(common.machine_line(machine))
    print()
    print(common.table(["model", "with (ms)", "without (ms)", "cost of a step", "check"], rows))
    common.save_json(options.json, "overhead", machine, models=saved)


if __name__ == "__main__":
    main()
