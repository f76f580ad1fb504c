"""A job's specification, placement and environment in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace

from insitu.base.config import read_settings
from insitu.base.context import ALLOW_MIXED_ENV
from insitu.base.disk.access import PRIVATE_FILE
from insitu.base.disk.durable import STAGING, replace_file
from insitu.base.errors import ClusterError, InputError
from insitu.base.net.unauthenticated import ALLOW_UNAUTHENTICATED_ENV
from insitu.base.paths import JobPaths
from insitu.base.spec import CacheSpec, JobSpec, NodeId, Placement, ShardMap, TaskId, TaskSpec
from insitu.options import JobOptions


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """The environment in which a job was started, so that it resumes in the same."""

    #: Variables of the shell, but for secrets and those of its session.
    variables: Mapping[str, str] = field(repr=False)
    #: Names of the variables that are secrets: values come from the shell of each start.
    secrets: tuple[str, ...] = ()
    #: The machine, as `read_host` names it.
    host: str = ""
    #: Versions of Python, insitu, Keras and backends there.
    versions: Mapping[str, str] = field(default_factory=dict)
    #: The settings of Keras' file, keras.json.
    keras: Mapping[str, str] = field(default_factory=dict)
    #: The absolute path of JOB_DIR; empty if it is no folder that stays.
    job_dir: str = ""


def write_environment(job: JobPaths, environment: JobEnvironment) -> None:
    """Write what a job was started in, for its owner alone."""
    replace_file(job.environment, json.dumps(asdict(environment), indent=1).encode(), mode=PRIVATE_FILE)


def read_environment(job: JobPaths) -> JobEnvironment:
    """Return what the job was started in. Raises ClusterError if that can't be read."""
    try:
        data = json.loads(job.environment.read_text())
        return JobEnvironment(**{**data, "secrets": tuple(data["secrets"])})
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ClusterError(
            f"The variables that the job was started with can't be read: {error}. Start a new job",
            logs=str(job.environment),
        ) from error


def has_checkpoint(job: JobPaths) -> bool:
    """Return whether a checkpoint is in the job's folder, whole or not."""
    found = job.checkpoints.rglob("state.json")
    return any(not path.parent.name.startswith(STAGING) for path in found)


def read_spec(job: JobPaths) -> JobSpec:
    """Return the job's specification. Raises ClusterError if the folder doesn't hold a job."""
    try:
        spec = JobSpec.from_json(json.loads(job.spec.read_text()))
        # Raises for values that no job can have. Who reads a job needs no plug-in that runs it.
        _find_options(job, replace(spec, engine="local"))
        return spec
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
        raise ClusterError(
            f"The job's specification can't be read: {error}. Start a new job; this folder is of no use",
            logs=str(job.spec),
        ) from error


def read_options(job: JobPaths) -> JobOptions:
    """Return the options that start a job like one that there is, with its copy of the code. Raises
    ClusterError."""
    return _find_options(job, read_spec(job))


def _find_options(job: JobPaths, spec: JobSpec) -> JobOptions:
    """Return the options of a job, but for those of which nothing is kept. Raises InputError."""
    values = asdict(read_settings(spec.settings)) | {f.name: getattr(spec, f.name) for f in fields(spec)}
    values |= {
        "job_dir": job.code,
        # An engine in a process of its own runs tasks on this machine, too; users don't choose it.
        "engine": "local" if spec.engine == "server" else spec.engine,
        "evaluator_grace": spec.evaluator_grace if spec.evaluator else None,
        "allow_unauthenticated": spec.settings.get(ALLOW_UNAUTHENTICATED_ENV) == "1",
        "allow_mixed_processors": spec.settings.get(ALLOW_MIXED_ENV) == "1",
    }
    return JobOptions(**{f.name: values[f.name] for f in fields(JobOptions) if f.name in values})


def read_placement(job: JobPaths) -> tuple[Placement, CacheSpec]:
    """Return the placement, and the cache as it was when the job was started. Raises ClusterError."""
    try:
        data = json.loads(job.placement.read_text())
        cache = CacheSpec.from_json(data["cache"])
        shards = json.loads(job.shard_map(cache.name).read_text())["shards"]
        tasks = tuple(
            TaskSpec(TaskId.parse(t["task"]), NodeId(t["node"]), tuple(t["shards"])) for t in data["tasks"]
        )
        shard_map = ShardMap(cache.name, cache.version, tuple(map(tuple, shards)))
        return Placement(tasks, shard_map, tuple(map(NodeId, data["homes"]))), cache
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, InputError) as error:
        raise ClusterError(
            f"The job's placement can't be read: {error}. Start a new job; this folder is of no use",
            logs=str(job.placement),
        ) from error
