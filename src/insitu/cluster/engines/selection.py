"""The engines by their names in a job's specification."""

from __future__ import annotations

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import JobPaths
from insitu.base.plugins import ENGINES, load_plugin
from insitu.cluster.engines.engine import Engine
from insitu.cluster.engines.local import LocalEngine
from insitu.cluster.engines.remote import start_engine_server


def open_engine(name: str, job: JobPaths, wake: int) -> Engine:
    """Return the engine `name` for `job`. It returns from `wait` when `wake` becomes readable.

    `server` is that of this machine in another process; no user can choose it. Others are plug-ins: what a
    package registers under the name is called with `job` and `wake`. Raises ClusterError.
    """
    match name:
        case "local":
            return LocalEngine(job, wake, reap_orphans=True)
        case "server":
            return start_engine_server(job, wake)
    try:
        engine: Engine = load_plugin(ENGINES, name)(job, wake)
    except InputError as error:
        raise ClusterError(error.message) from error
    return engine
