"""What `communication="auto"` chooses by: insitu's exchange (ring) beside XLA's collectives, on JAX.

  ring              MultiWorkerMirroredStrategy("ring"): two compiled functions, the exchange between them
  xla               MultiWorkerMirroredStrategy("xla"): one program over a mesh of both processes, gloo
  JAX + gloo, bare  a loop of JAX alone over such a mesh

Two processes, one core each, on the CPU: rows per second of both. Three models: a tiny dense one, where the
cost of each step shows, a convolutional one of 225,034 parameters, and a dense one of 19,643,370, where what
has to be moved shows. SGD with momentum, 64 rows a step for each process.

Between CPUs "auto" takes ring; where JAX has accelerators it takes xla, whose collectives then move what lies
on them without a copy through the host. This benchmark can tell of the first only.
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
