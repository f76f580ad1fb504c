"""insitu's exchange (ring) compared with XLA's collectives on JAX: what `communication="auto"` goes by.

  ring              MultiWorkerMirroredStrategy("ring"): two compiled functions, and the exchange between them
  xla               MultiWorkerMirroredStrategy("xla"): one program over a mesh of both processes, gloo
  JAX + gloo, bare  a loop in JAX alone over such a mesh

Two processes, one core each, on the CPU. The figure is the rows per second of both. There are three models:
a tiny dense one, which shows the cost of each step, a convolutional one with 225,034 parameters, and a
dense one with 19,643,370, which shows the cost of moving data. SGD with momentum, 64 rows a step for each
process.

Between CPUs "auto" selects ring. If JAX has accelerators it selects xla, whose collectives move data between
accelerators without a copy through the host. This benchmark measures CPUs only.
"""

from __future__ import annotations

from typing import Any

import common
from training import contender

MODELS = ("tiny", "cnn", "mlp")
CONTENDERS = {
    "ring": ("insitu_rank.py", "insitu", ("ring",)),
    "xla": ("insitu_rank.py", "insitu", ("xla",)),
    "JAX + gloo, bare": ("jax_rank.py", "jax", ()),
}


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="these alone")
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else 2)
    machine = common.machine()
    print(common.machine_line(machine), flush=True)
    figures: dict[str, Any] = {}
    for model in options.models[: 1 if options.quick else None]:
        common.say(f"{model}:")
        contenders = {
            name: contender(script, 2, module, "jax", model, *more)
            for name, (script, module, more) in CONTENDERS.items()
        }
        results = common.alternate(contenders, "rows/s", rounds)
        print(f"\n{model}\n\n{common.results_table(results, 'ring', form='{:,.0f}'.format)}", flush=True)
        figures[model] = common.results_json(results)
        # At once: a run of all takes long, and may be cut short.
        common.save_json(options.json, "communication", machine, models=figures)


if __name__ == "__main__":
    main()
