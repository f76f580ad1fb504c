"""Checks the cluster resolver that a script passes to a strategy against the job that it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from insitu.context import Context
from insitu.errors import InputError, TrainingError


def check_resolver(resolver: Any, context: Context) -> None:
    """Raise TrainingError where `resolver` describes another cluster than the job's, InputError where it is
    no resolver.

    Outside a job a resolver may describe servers that the script has started itself, in its own process. They
    aren't needed: the process is the only worker, and its server a thread of it.
    """
    if resolver is None:
        return
    if not callable(getattr(resolver, "cluster_spec", None)):
        raise InputError(
            "cluster_resolver is an object with the method cluster_spec(), such as TFConfigClusterResolver()."
            f" Received: {resolver!r}. Leave it out, or name the argument that you mean, such as mode='sync'."
        )
    if not (context.job_id or context.workers):
        return
    described, own = _count_tasks(resolver), (len(context.workers), len(context.servers))
    if described != own:
        raise TrainingError(
            f"A strategy runs on the job's tasks: {own[0]} workers and {own[1]} ps tasks. Received: a "
            f"cluster_resolver that describes {described[0]} workers and {described[1]} ps tasks. Leave it "
            "out, or pass TFConfigClusterResolver(), which reads the job's TF_CONFIG."
        )


def _count_tasks(resolver: Any) -> tuple[int, int]:
    """Return the numbers of workers and ps tasks that a resolver describes."""
    spec = resolver.cluster_spec()
    cluster: Mapping[str, Any] = spec.as_dict() if hasattr(spec, "as_dict") else dict(spec or {})
    return len(cluster.get("worker", ())), len(cluster.get("ps", ()))
