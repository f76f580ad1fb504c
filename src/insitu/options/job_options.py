"""The options of `insitu start`."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from insitu.base.config import DeviceSettings, parse_virtual_devices
from insitu.base.errors import InputError, JobSpecError
from insitu.base.plugins import ENGINES
from insitu.base.tracking import check_tracking
from insitu.options.declaring import Declared, Door, command_line_only, format_options, option

_MOST = 100_000
"""Tasks and the like that a job may have."""
_MOST_MIB = 1 << 40
_MOST_CORES = 4096
_OF_PRINTING: dict[Door, str] = command_line_only("It is about what the command prints.")
_OF_TABLES: dict[Door, str] = command_line_only(
    "Reading a table may take longer than a request: import it first, and start a job on that."
)
_KEYS_OF_PODS = {
    "queue": "Queue of Kueue",
    "priority": "Priority class",
    "image": "Image, if not that of the stores",
    "toleration": "Taints that the pods tolerate, as in gpu=yes:NoSchedule",
    "select": "Labels that nodes must have, as in disk=ssd",
    "env": "Variables for the tasks, as in MODE=fast",
    "secret": "Secrets of Kubernetes whose keys are variables for the tasks",
}


@dataclass(frozen=True, slots=True)
class JobOptions(Declared):
    """Options of `insitu start`. None stands for a default that depends on the cache and the machine."""

    #: Name of the cache to train on; NO_CACHE for a script that brings its own data.
    cache: str
    #: Folder or .zip that holds the script.
    job_dir: Path
    #: JOB_CMD and its arguments.
    command: tuple[str, ...]

    # fmt: off
    workers: int | None = option(
        None, "Worker tasks.", default_text="one per node that owns data", least=1, most=_MOST,
        label="Workers", common=True
    )
    nodes: tuple[str, ...] = option(
        (), "A node to run on; may be repeated.", default_text="all", flags=("--node",), label="Nodes to use"
    )
    ps: int | None = option(
        0, "Parameter server tasks; auto: one on each node.", metavar="M|auto", words={"auto": None}, least=0,
        most=_MOST
    )
    ps_backups: int = option(
        0, "Other servers that mirror each server, so that losing one costs nothing.", least=0, most=_MOST,
        label="Mirrors of each server"
    )
    chief: bool = option(False, "Add a chief, which trains as well.")
    evaluator: bool = option(False, "Add a scorer of checkpoints.")
    evaluator_grace: float | None = option(
        None, "Grace period for the evaluator.", metavar="SEC", default_text="600", least=0, most=1e9,
        label="Seconds that the evaluator may score on"
    )
    engine: Literal["", "local", "hosts"] = option(
        "", "local, hosts, or a plug-in.", metavar="TEXT", default_text="hosts, if up",
        label="What runs the tasks", plugins=ENGINES
    )
    pod: tuple[str, ...] = option(
        (), "Of --engine k8s: queue, priority, image, toleration, select, env, secret.",
        metavar="KEY=VALUE", keys=_KEYS_OF_PODS, label="Pods of the job, if k8s runs the tasks"
    )
    name: str | None = option(None, "Beginning of the job's id.", default_text="CACHE's last part")
    detach: bool = option(
        False, "Don't stream the output.",
        not_at={"rest": "A request starts a job and doesn't wait.", "form": "The page shows the output."}
    )
    max_restarts: int = option(3, "Number of restarts of a failed job.", least=0, most=_MOST)
    seed: int = option(
        0, "Random seed.", least=0, most=(1 << 31) - 1, label="Seed", common=True
    )
    stall_timeout: float = option(
        600.0, "A job without progress for so long has failed.", metavar="SEC", least=0, most=1e9, above=True,
        label="Stall timeout in seconds"
    )
    threads: int | None = option(
        None, "Backend threads per replica.", default_text="cores / workers", least=1, most=_MOST_CORES
    )
    shards: int | None = option(
        None, "Shards to train on, spread over the workers.", default_text="--workers", least=1, most=_MOST
    )
    virtual_devices: tuple[str, int] | None = option(
        None, "Make several devices out of one: cpu:4, gpu:2.", metavar="N|KIND:N",
        parse=parse_virtual_devices, show="{0[0]}:{0[1]}".format
    )
    memory_growth: bool | None = option(
        None, "Take GPU memory as it is needed.", default_text="the backend's"
    )
    memory_limit: int | None = option(
        None, "Memory to take of each GPU.", metavar="MIB", default_text="all", least=1, most=_MOST_MIB,
        label="MiB of each GPU for a worker"
    )
    soft_placement: bool | None = option(
        None, "Use the CPU for a device that isn't there.", default_text="an error"
    )
    log_placement: bool | None = option(None, "Print where variables and operations go.", default_text="off")
    on_loss: Literal["replace", "adopt", "restart"] = option("replace", "Reaction to the loss of a worker.")
    on_rebalance: Literal["follow", "stay"] = option("follow", "Reaction of workers when their data moves.")
    standby: int | None = option(
        None, "Warmed processes that can take a lost worker's place.", default_text="1 if memory allows",
        least=0, most=_MOST
    )
    memory_checkpoint: bool = option(False, "Keep checkpoints in the memory of the other workers, too.")
    track: str | None = option(
        None, "Log the training for mlflow, trackio, wandb, or a plug-in.", parse=check_tracking,
        metavar="TRACKER[:ADDRESS][#EXPERIMENT]", default_text="none", label="Experiment tracker"
    )
    env: tuple[str, ...] = option(
        (), "A variable that is no secret, though it is named like one.", metavar="NAME",
        label="Variables of the page that are no secrets, though they are named like some"
    )
    allow_unauthenticated: bool = option(False, "Let JAX, TensorFlow connect hosts without a secret.")
    tensor: tuple[str, ...] = option(
        (), "Of Ignite: a byte[] as image=uint8[28,28].", metavar="COLUMN=DTYPE[SHAPE]", not_at=_OF_TABLES
    )
    fill: tuple[str, ...] = option(
        (), "Of Ignite: what takes the place of null.", metavar="COLUMN=VALUE", not_at=_OF_TABLES
    )
    arrow: tuple[str, ...] = option(
        (), "Of Ignite: a byte[] with Arrow IPC streams.", metavar="COLUMN", not_at=_OF_TABLES
    )
    without: tuple[str, ...] = option(
        (), "Of Ignite: a column that is left out.", metavar="COLUMN", not_at=_OF_TABLES
    )
    dtype: tuple[str, ...] = option(
        (), "Of Ignite: lists, maps, objects as text: tags=json.", metavar="COLUMN=json", not_at=_OF_TABLES
    )
    ragged: tuple[str, ...] = option(
        (), "Of Ignite: arrays of different lengths.", metavar="COLUMN", not_at=_OF_TABLES
    )
    config: Path | None = option(  # noqa: RUF009
        None, "Of Ignite: a client's Spring XML; its servers have the cache.", flags=("--config", "-c"),
        metavar="FILE", not_at=_OF_TABLES
    )
    gpus_per_worker: int = option(
        0, "GPUs that each worker has for itself.", metavar="N", default_text="any", least=0, most=_MOST
    )
    memory_per_worker: int = option(
        0, "Main memory each worker must find free.", metavar="MIB", default_text="any", least=0,
        most=_MOST_MIB, label="MiB of memory free for each worker"
    )
    cores_per_worker: int = option(
        0, "Processors each worker has for itself.", metavar="N", default_text="any", least=0,
        most=_MOST_CORES
    )
    refresh: int = option(
        0, "Of Ignite: read rows again each epoch, or every N.", metavar="never|epoch|N",
        words={"never": 0, "epoch": 1}, least=1, most=(1 << 31) - 1
    )
    allow_mixed_processors: bool = option(False, "Allow hosts with different processors.")
    prefix: bool = option(True, "Show each line's task before it.", not_at=_OF_PRINTING)
    as_json: bool = option(
        False, "Print JSON, in the form of docs/reference/json.md.", flags=("--json",), not_at=_OF_PRINTING
    )
    # fmt: on

    error: ClassVar[type[InputError]] = JobSpecError

    @property
    def settings(self) -> DeviceSettings:
        """How tasks set up devices."""
        names = {each.name for each in fields(DeviceSettings)} - {"threads"}
        return DeviceSettings(**{name: getattr(self, name) for name in names})

    @property
    def given_threads(self) -> int | None:
        """The backend threads of each replica that an option names; None: none does."""
        return self.threads if self.threads is not None else self.cores_per_worker or None

    def format_command(self) -> list[str]:
        """Return the command that starts the same job and doesn't stream its output."""
        options = format_options(replace(self, detach=False))
        return ["insitu", "start", "--detach", *options, self.cache, str(self.job_dir), *self.command]
