"""What is asked of Ray: its nodes, and the actors in one namespace. Only actors import Ray elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from insitu.base.errors import ClusterError, InputError
from insitu.base.paths import HOME_ENV, Paths
from insitu.base.process.processes import identify_process, runs_raylet
from insitu.cluster.job_files import is_locked
from insitu.cluster.ray.ray_holder import (
    RAYLET_ENV,
    AgentHolder,
    HolderAnswer,
    HolderSettings,
    read_environment,
)
from insitu.exchange import connect_within, parse_address

CONNECT_SECONDS = 10.0
_END_SECONDS = 20.0
_HOLDER, _CONTROLLER, _RESERVATION = "agent-", "controller", "reserved-"
_CPUS = 0.001
"""What a holder takes of a node's processors: with nothing at all, an autoscaler would take the node away."""
_MAX_SHOWN = 300
_FRESH_SECONDS = 5.0
"""Seconds after which Ray surely knows what was given back before."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster."""

    #: Ray's id of it. A node that comes back has another one.
    id: str
    #: The name of its host.
    host: str
    #: The address that Ray reaches it by.
    address: str
    #: Whether it has processors that Ray gives away.
    has_cpus: bool
    #: Whether Ray counts it as alive.
    alive: bool


@dataclass(frozen=True, slots=True)
class Died:
    """A holder that has ended for good."""

    #: Why.
    problem: str


@dataclass(frozen=True, slots=True)
class Share:
    """What a job is to have of a node for itself."""

    #: Number of GPUs.
    gpus: int = 0
    #: Number of processors.
    cores: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """What Ray has given to a reservation."""

    #: Ray's ids of the GPUs.
    gpus: tuple[str, ...] = ()
    #: Number of processors.
    cores: int = 0


def make_namespace(cluster: str) -> str:
    """Return where the actors of the insitu cluster of this id have their names."""
    return f"insitu-{cluster[:16]}"


@contextlib.contextmanager
def connect_to_ray(address: str, namespace: str) -> Iterator[RayCluster]:
    """Connect this process to a Ray cluster: "auto" is the one that runs on this machine.

    Raises InputError if Ray isn't installed, or the address is none; ClusterError where no
    cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        if error.name != "ray":
            raise
        raise InputError(
            "--engine ray needs Ray. Received: a Python without it. Install it in the version that the "
            "cluster has: pip install 'insitu[ray]'"
        ) from error
    _check_address(address)
    if not runs_raylet():  # Ray itself would look for one for two minutes
        raise ClusterError(_describe_failure(address, ConnectionError("no raylet runs on this machine")))
    # Ray would print a notice about GPUs that its own tasks don't see.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    pipe_action = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        try:
            ray.init(address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ClusterError(_describe_failure(address, error)) from error
        yield RayCluster(namespace)
    finally:
        ray.shutdown()
        signal.signal(signal.SIGPIPE, pipe_action)


def _check_address(address: str) -> None:
    """Raise InputError for what is no address of Ray, ClusterError where nothing listens there."""
    if address == "auto":
        return
    if "://" in address:
        raise InputError(
            f"--address is auto or HOST:PORT of the cluster's head. Received: {address}, which is of Ray's "
            f"client. Run the command on a machine that is a node of the Ray cluster"
        )
    parse_address(address)
    reason = find_gcs_obstacle(address)
    if reason is not None:
        raise ClusterError(
            f"A Ray cluster must run at --address. Received: {address} ({reason.strerror or reason}). `ray "
            f"start --head` starts one; `ray status` on its machine shows its address"
        )


def find_gcs_obstacle(address: str) -> OSError | None:
    """Return why nothing can be reached at the address of a Ray cluster; None where something listens."""
    try:
        connect_within(*parse_address(address), CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


def _describe_failure(address: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    if "Version mismatch" in said:
        return (
            f"All nodes need the same versions of Ray and Python. Received: {said}. Run the command by the "
            f"Python that Ray runs with"
        )
    if isinstance(error, ConnectionError) or "Could not find any running Ray" in said:
        return (
            f"--engine ray needs a Ray cluster that this machine is a node of. Received: --address {address} "
            f"({said:.{_MAX_SHOWN}}). Start it with `ray start --head`, or `ray start --address HOST:PORT` "
            f"to join one"
        )
    return (
        f"Ray must take this machine in. Received: --address {address} ({said:.{_MAX_SHOWN}}). Run the "
        f"command on a machine that is a node of the Ray cluster"
    )


class RayCluster:
    """A Ray cluster, as seen from a process that is connected to it."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        #: Questions to holders that haven't been answered, by node.
        self._asked: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """The address of the cluster, as host:port."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def list_nodes(self) -> list[RayNode]:
        """Return the nodes, also those that Ray counts as dead."""
        import ray

        return [
            RayNode(
                str(each["NodeID"]),
                str(each.get("NodeManagerHostname") or each["NodeManagerAddress"]),
                str(each["NodeManagerAddress"]),
                each.get("Resources", {}).get("CPU", 0) > 0,
                bool(each["Alive"]),
            )
            for each in ray.nodes()
        ]

    def list_draining(self) -> dict[str, float | None]:
        """Return the nodes that Ray takes away, with the deadline of each in seconds since 1970; None: it
        names none."""
        from ray._private.state import state  # there is no public function; Ray Train asks this one, too

        if not hasattr(state, "get_draining_nodes"):
            return {}  # Ray knows no notices before 2.9
        return {str(node): ms / 1000 or None for node, ms in state.get_draining_nodes().items()}

    def _get(self, name: str) -> Any:
        """Return an actor. Raises ValueError if there is none."""
        import ray

        return ray.get_actor(name, namespace=self._namespace)

    # Holders

    def list_holders(self) -> set[str]:
        """Return the nodes whose holders there are, whether or not they run yet."""
        return {name.removeprefix(_HOLDER) for name in self._list_names() if name.startswith(_HOLDER)}

    def _list_names(self) -> list[str]:
        from ray.util import list_named_actors

        named = list_named_actors(all_namespaces=True)
        return [each["name"] for each in named if each["namespace"] == self._namespace]

    def start_holder(self, node: RayNode, settings: HolderSettings) -> None:
        """Start a holder on a node, if there is none yet."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(AgentHolder).options(
            **self._name(f"{_HOLDER}{node.id}"),
            num_cpus=_CPUS if node.has_cpus else 0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        with contextlib.suppress(ValueError):  # somebody else has started it meanwhile
            # Asked at once, since one that can't begin has no name any more, by which it could be found.
            self._asked[node.id] = actor.remote(settings).status.remote()

    def _name(self, name: str) -> dict[str, Any]:
        """Return the options of an actor that outlives this process, and comes back where it fails."""
        return {
            "name": name,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": -1,
            "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
        }

    def end_holder(self, node: str) -> None:
        """End a holder, and its agent with it."""
        self._asked.pop(node, None)
        self._kill(f"{_HOLDER}{node}")

    def _kill(self, name: str) -> None:
        import ray

        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(self._get(name), no_restart=True)

    def ask_holders(self, nodes: Collection[str], seconds: float) -> Mapping[str, HolderAnswer | Died]:
        """Return what holders answer within `seconds`. One that says nothing is asked no second time."""
        import ray

        for node in self._asked.keys() - set(nodes):
            del self._asked[node]
        for node in set(nodes) - self._asked.keys():
            with contextlib.suppress(ValueError):
                self._asked[node] = self._get(f"{_HOLDER}{node}").status.remote()
        references = list(self._asked.values())
        if not references:
            return {}
        ready, _ = ray.wait(references, num_returns=len(references), timeout=seconds)
        found: dict[str, HolderAnswer | Died] = {}
        for node, reference in list(self._asked.items()):
            if reference in ready:
                del self._asked[node]
                answer = _take(reference)
                if answer is not None:
                    found[node] = answer
        return found

    def start_agent_again(self, node: str) -> None:
        """Let a holder start an agent that has ended."""
        with contextlib.suppress(ValueError):
            self._get(f"{_HOLDER}{node}").start_again.remote()

    # Reservations

    def list_reservations(self) -> list[str]:
        """Return the reservations, as JOB/NODE/..."""
        names = sorted(self._list_names())
        return [name.removeprefix(_RESERVATION) for name in names if name.startswith(_RESERVATION)]

    def read_reservation(self, name: str, seconds: float) -> Given:
        """Return what a reservation has; nothing where it has nothing yet, or has ended."""
        try:
            actor = self._get(f"{_RESERVATION}{name}")
        except ValueError:
            return Given()
        return self.read_given(actor, seconds) or Given()

    def start_reservation(
        self, name: str, node: str, job: str, job_node: str, share: Share, seconds: float
    ) -> Given | None:
        """Reserve a share of a node. Returns what was given; None if Ray hasn't so much free.

        Raises ClusterError if Ray doesn't give within `seconds` what it has free.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # The node's holder has its part of the processors, so that all of them can be reserved.
        cpus = max(0.0, share.cores - _CPUS)
        until = time.monotonic() + _FRESH_SECONDS
        while self.count_free(node, "GPU")[0] < share.gpus or self.count_free(node, "CPU")[0] < cpus:
            if time.monotonic() > until:
                return None
            time.sleep(0.1)
        actor = ray.remote(Reservation).options(
            name=f"{_RESERVATION}{name}",
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=cpus,
            num_gpus=share.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        found = self.read_given(actor.remote(job, job_node, share.cores), seconds)
        if found is None:
            self.end_reservation(name)
            raise ClusterError(
                f"Ray gave nothing within {seconds:.0f} s, although it had enough free: the node is busy, "
                f"or other "
                f"work came first"
            )
        return found

    def read_given(self, actor: Any, seconds: float) -> Given | None:
        """Return what a reservation has been given within `seconds`."""
        import ray

        try:
            gpus, cores = ray.get(actor.read.remote(), timeout=seconds)
        except ray.exceptions.RayError:
            return None
        return Given(tuple(gpus), cores)

    def end_reservation(self, name: str) -> None:
        """Give back what a reservation has."""
        self._kill(f"{_RESERVATION}{name}")

    def count_free(self, node: str, resource: str) -> tuple[float, float]:
        """Return how much of "GPU" or "CPU" of a node Ray has free, and how much there is in all."""
        from ray._private.state import available_resources_per_node, total_resources_per_node

        free, known = (
            found().get(node, {}) for found in (available_resources_per_node, total_resources_per_node)
        )
        return float(free.get(resource, 0)), float(known.get(resource, 0))

    # The controller

    def find_controller(self) -> Any:
        """Return the controller; None if there is none."""
        try:
            return self._get(_CONTROLLER)
        except ValueError:
            return None

    def start_controller(self, kind: type, settings: HolderSettings) -> Any:
        """Start the controller on the head of the Ray cluster, and return it."""
        import ray

        actor = ray.remote(kind).options(
            **self._name(_CONTROLLER), num_cpus=0, resources={"node:__internal_head__": 0.001}
        )
        try:
            return actor.remote(self._namespace, settings)
        except ValueError:  # somebody else has started it meanwhile
            return self._get(_CONTROLLER)

    def call(self, method: Any, *arguments: Any, seconds: float) -> Any:
        """Call a method of an actor. Raises ClusterError if no answer comes in time, or it has ended."""
        import ray

        try:
            return ray.get(method.remote(*arguments), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(
                f"insitu's controller in Ray must answer within {seconds:g} s. Received: nothing. `ray "
                f"status` shows whether the cluster has a head; then run the command again"
            ) from None
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"insitu's controller must run on the head of the Ray cluster. Received: "
                f"{describe_death(error)}. Install the same version of insitu there"
            ) from None

    def end_controller(self) -> None:
        """End the controller, so that nothing starts holders any more."""
        self._kill(_CONTROLLER)
        self._wait_until_ended({_CONTROLLER})

    def end_all(self) -> set[str]:
        """End all actors of this namespace. Return the names of those that are still there after a while."""
        names = set(self._list_names())
        for name in names:
            self._kill(name)
        return self._wait_until_ended(names)

    def _wait_until_ended(self, names: set[str]) -> set[str]:
        deadline = time.monotonic() + _END_SECONDS
        while (left := names & set(self._list_names())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _take(reference: Any) -> HolderAnswer | Died | None:
    """Return what a holder has answered; None where it is away for a moment."""
    import ray

    try:
        answer = ray.get(reference)
    except ray.exceptions.ActorUnavailableError:
        return None
    except ray.exceptions.RayError as error:
        return Died(describe_death(error))
    if not isinstance(answer, HolderAnswer):
        return Died(f"it answered {type(answer).__name__}")
    return answer


def describe_death(error: BaseException) -> str:
    """Return in a line why an actor has ended: the last line of Ray's text, which says the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    if "ModuleNotFoundError" in last or "AttributeError" in last or "ImportError" in last:
        return f"Ray's Python there can't load this version of insitu ({last:.{_MAX_SHOWN}})"
    return f"{last:.{_MAX_SHOWN}}"


# The reservation: an actor of Ray that has the GPUs and processors of one job on one node, so that Ray
# gives them to nobody else.
#
# It outlives who has made it, and ends by itself once the process that runs the job's tasks there has
# ended, however that ends: it watches the lock that this process holds


POLL_SECONDS = 1.0
BEGIN_SECONDS = 60.0
"""Seconds within which the process that is watched begins."""
END_SECONDS = 10.0
"""Seconds without that process after which all is free again: another one may take its place."""


class Reservation:
    """What Ray runs. Ray says which GPUs it has been given."""

    def __init__(self, job: str, node: str, cores: int) -> None:
        self._cores = cores
        environment = read_environment(identify_process(int(os.environ.get(RAYLET_ENV) or 0)))
        home = Path(environment.get(HOME_ENV) or "~/.insitu").expanduser().absolute()
        lock = Paths(home).job(job).engine_lock(node)
        threading.Thread(target=_end_after, args=(lock,), daemon=True).start()

    def read(self) -> tuple[list[str], int]:
        """Return Ray's ids of the GPUs, and the number of processors."""
        import ray

        return [str(each) for each in ray.get_gpu_ids()], self._cores


def _end_after(lock: Path) -> None:
    """End this process once nobody holds the lock any more."""
    watch_lock(lock)
    os._exit(0)


def watch_lock(
    lock: Path, begin: float = BEGIN_SECONDS, end: float = END_SECONDS, pause: float = POLL_SECONDS
) -> None:
    """Return once nobody has held the lock for `end` seconds, or for `begin` seconds from the start."""
    until = time.monotonic() + begin
    while time.monotonic() < until:
        if is_locked(lock):
            until = time.monotonic() + end
        time.sleep(pause)
