"""The command line that starts the same job as a request."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from insitu.cluster import Request

_OPTIONS = {
    "workers": "--workers",
    "shards": "--shards",
    "ps_backups": "--ps-backups",
    "chief": "--chief",
    "evaluator": "--evaluator",
    "evaluator_grace": "--evaluator-grace",
    "engine": "--engine",
    "name": "--name",
    "max_restarts": "--max-restarts",
    "seed": "--seed",
    "threads": "--threads",
    "stall_timeout": "--stall-timeout",
    "on_loss": "--on-loss",
    "on_rebalance": "--on-rebalance",
    "on_take_over": "--on-take-over",
    "standby": "--standby",
    "memory_checkpoint": "--memory-checkpoint",
    "gpus_per_worker": "--gpus-per-worker",
    "memory_per_worker": "--memory-per-worker",
    "cores_per_worker": "--cores-per-worker",
    "refresh": "--refresh",
    "allow_unauthenticated": "--allow-unauthenticated",
}
"""Options by the fields of a request."""


def format_start_command(request: Request) -> list[str]:
    """Return `insitu start ...` as arguments; options that have their default are left out. Of the
    settings of devices only the limit of memory is among them."""
    parts = ["insitu", "start", "--detach"]
    if request.ps != 0:
        parts += ["--ps", "auto" if request.ps is None else str(request.ps)]
    if request.settings.memory_limit is not None:
        parts += ["--memory-limit", str(request.settings.memory_limit)]
    parts += [part for node in request.nodes for part in ("--node", node)]
    parts += [part for name in request.env for part in ("--env", name)]
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in _OPTIONS or value == field.default:
            continue
        option = _OPTIONS[field.name]
        text = str(value).removesuffix(".0")
        parts += [option] if value is True else [option, text]
    return [*parts, request.cache, str(request.job_dir), *request.command]
