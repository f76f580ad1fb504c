"""What a checkpoint every 10 steps costs: seconds a step of two workers, with and without checkpoints.

The model is dense and has 20 million parameters; the optimizer is SGD with momentum. A checkpoint has 160
MB. It is copied in memory and then written to the job's folder while the training continues. The same
processes train alternately without checkpoints and with `insitu.BackupAndRestore(save_freq=10)`. Each
figure is a period of 10 steps, including the writing. The first checkpoint of a fit is not counted: it
takes about 0.1 s more, once, to get its memory from the system. Each task has one core, which it shares
with its writer.
"""

from __future__ import annotations

import common
import job_runs

NAMES = {"none": "no checkpoints", "checkpoints": "every 10 steps"}


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    machine = common.machine()
    model = "one layer" if options.quick else "20 M"
    rounds = options.rounds or (1 if options.quick else 5)
    with job_runs.home() as paths:
        told = {"model": model, "every": 10, "periods": 4, "rounds": rounds}
        figures = job_runs.run_job(paths, "checkpoint_task.py", **told)
    results = {
        name: common.Result(name, "ms a step", [1e3 * seconds for seconds in figures[key]])
        for key, name in NAMES.items()
    }
    print(common.machine_line(machine))
    print(f"\n{model}\n")
    print(common.results_table(results, NAMES["none"], more_is_better=False, form="{:.2f}".format))
    cost = (results[NAMES["checkpoints"]].median or 0) / (results[NAMES["none"]].median or 1) - 1
    print(f"\nCheckpoints cost {cost:.1%} of the time.")
    common.save_json(options.json, "checkpoint", machine, model=model, results=common.results_json(results))


if __name__ == "__main__":
    main()
