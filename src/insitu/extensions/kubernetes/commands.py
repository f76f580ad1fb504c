"""The commands of `insitu k8s`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from insitu.base.wording import format_count
from insitu.cli import (
    JsonOption,
    VersionedGroup,
    ask_to_delete,
    parse_duration,
    print_json,
    print_notice,
    print_table,
    take_options,
)
from insitu.extensions.kubernetes.options import (
    ClusterOptions,
    RenderRequest,
    ScaleRequest,
    UpRequest,
    check_namespace,
)

if TYPE_CHECKING:
    from insitu.extensions.kubernetes.client import Client
    from insitu.extensions.kubernetes.waits import PodState

app = typer.Typer(
    cls=VersionedGroup,
    help="Run a cluster on Kubernetes.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)

_RENDER_HELP = """
Print the objects of a cluster as YAML, for `kubectl apply`, kustomize or a look at them.

The secret with the cluster's token isn't printed. `insitu k8s up` makes it; without it, make it first by the
command in the first lines. It needs `pip install 'insitu[kubernetes]'`.

Examples:

    insitu k8s render --nodes 3 --storage-class local-path
    insitu k8s render --nodes 3 --gpus 4 --namespace team > cluster.yaml
    insitu k8s render --nodes 3 --storage-class local-path --helm chart
"""
_UP_HELP = """
Bring up a cluster in a namespace, or change it, and wait until it's ready.

All is checked by the API server before anything is applied. Objects that are there are changed by
server-side apply, with the field manager insitu. Fewer --nodes than there are is for `insitu k8s scale`.
Ctrl-C ends the waiting alone.

Examples:

    insitu k8s up --nodes 3 --image registry.example.com/insitu:0.1.0
    insitu k8s up --nodes 3 --gpus 4 --storage 500Gi --storage-class topolvm --namespace team
    insitu k8s up --nodes 3 --context staging --no-wait
"""
_SCALE_HELP = """
Add stores to a cluster, or drain and then remove some: those with the highest numbers.

What is on stores that go moves to the others first, and tasks with it. Their disks stay.

Examples:

    insitu k8s scale --nodes 5
    insitu k8s scale --nodes 2 --timeout 1h
"""
ContextOption = Annotated[
    str,
    typer.Option(metavar="NAME", help="Context of the kubeconfig.", show_default="the current one"),
]
NamespaceOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Namespace of the cluster.", show_default="that of the context, else default"
    ),
]
TimeoutOption = Annotated[str, typer.Option(metavar="TIME", help="Longest time to wait.")]


def render(request: RenderRequest) -> None:
    from insitu.extensions.kubernetes.chart import make_chart, write_chart
    from insitu.extensions.kubernetes.rendering import format_objects

    options = _take_cluster_options(request)
    if not request.helm:
        sys.stdout.write(format_objects(options))
        return
    write_chart(Path(request.helm), make_chart(options))
    print_notice(f"The chart is in {request.helm}. Its values.yaml has the options.")


def up(request: UpRequest) -> None:
    from insitu.extensions.kubernetes.cluster import bring_up, preview, wait_until
    from insitu.extensions.kubernetes.waits import all_ready

    seconds = parse_duration("--timeout", request.timeout)
    client = open_client(request.context, request.namespace)
    options = replace(_take_cluster_options(request), namespace=client.namespace)
    if request.dry_run:
        sys.stdout.write(
            "".join(f"{line}\n" for line in preview(client, options, print_notice, waits=not request.no_wait))
        )
        return
    bring_up(client, options, print_notice, waits=not request.no_wait)
    print_notice(f"{format_count(options.nodes, 'store')} and the head are applied to {client.namespace}.")
    if request.no_wait:
        return
    wait_until(client, all_ready, seconds, _Progress())
    print_notice(
        f"The cluster is ready. Run commands by `kubectl --namespace {client.namespace} exec head-0 -c head "
        "-- "
        f"insitu nodes`"
    )


def status(namespace: NamespaceOption = "", context: ContextOption = "", as_json: JsonOption = False) -> None:
    """Say how each pod of a cluster is, and in words what it waits for. Exit with 1 if one does.

    Examples:

        insitu k8s status
        insitu k8s status --namespace team --json
    """
    from insitu.extensions.kubernetes.cluster import read_states
    from insitu.extensions.kubernetes.waits import all_ready

    states = read_states(open_client(context, namespace))
    if as_json:
        print_json([asdict(each) for each in states])
    else:
        rows = [(each.name, each.state, each.node or "-", each.disk or "-") for each in states]
        print_table(("POD", "STATE", "NODE", "DISK ON"), rows)
        for each in states:
            if each.waits:
                print_notice(f"{each.name} waits for {each.waits}")
    if not all_ready(states):
        raise typer.Exit(1)


def scale(request: ScaleRequest) -> None:
    from insitu.extensions.kubernetes.cluster import scale as scale_cluster

    seconds = parse_duration("--timeout", request.timeout)
    client, nodes = open_client(request.context, request.namespace), request.nodes or 1
    scale_cluster(client, nodes, seconds, _Progress(), _print_once())
    print_notice(
        f"The cluster has {format_count(nodes, 'store')}. `insitu rebalance` spreads data over new ones."
    )


def down(
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    claims: Annotated[
        bool, typer.Option("--claims", help="Delete the disks, too, with all data, jobs and models.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    timeout: TimeoutOption = "5m",
    as_json: JsonOption = False,
) -> None:
    """Remove a cluster. Unless --claims is given its disks stay: the next `insitu k8s up` resumes its jobs.

    Examples:

        insitu k8s down
        insitu k8s down --namespace team --claims --yes
    """
    from insitu.extensions.kubernetes.cluster import list_claims, take_down

    seconds = parse_duration("--timeout", timeout)
    client = open_client(context, namespace)
    found = list_claims(client)
    if claims and found and not yes:
        named = ", ".join(f"{name} ({size})" for name, size in found.items())
        ask_to_delete(
            "k8s down --claims", f"the disks of {client.namespace} with all that is on them: {named}"
        )
    deleted = take_down(client, seconds, _Progress(), with_claims=found if claims else {})
    kept = [] if claims else [*found]
    if as_json:
        print_json({"namespace": client.namespace, "deleted": deleted, "kept": kept})
        return
    if not deleted:
        print_notice(f"Namespace {client.namespace} has no cluster.")
    else:
        print_notice(f"The cluster in {client.namespace} is removed.")
    if kept:
        print_notice(f"Disks that stay: {', '.join(kept)}. --claims deletes them.")


def prepare() -> None:
    """Prepare the home on the pod's disk."""
    from insitu.base.paths import Paths
    from insitu.extensions.kubernetes.pods import prepare_home

    prepare_home(Paths.default().home)


def run_head() -> None:
    """Be the head, in its pod."""
    from insitu.extensions.kubernetes.pods import end_process, run_head_here

    end_process(run_head_here(os.environ))


def run_store(
    head: Annotated[str, typer.Option(metavar="HOST:PORT", help="The head's address.")],
) -> None:
    """Be the agent of a store, in its pod."""
    from insitu.extensions.kubernetes.pods import end_process, run_store_here

    run_store_here(head, os.environ)
    end_process(0)


def run_tasks(
    job: Annotated[str, typer.Option(metavar="JOB", help="The job's id.")],
    node: Annotated[str, typer.Option(metavar="NODE", help="The node of the store beside the pod.")],
) -> None:
    """Run the tasks of a job, in a pod of its own."""
    from insitu.extensions.kubernetes.pods import end_process, run_tasks_here

    end_process(run_tasks_here(job, node, os.environ))


def _take_cluster_options(request: ClusterOptions) -> ClusterOptions:
    """Return the options of a cluster alone, without those of a command."""
    return ClusterOptions(**{name: getattr(request, name) for name in ClusterOptions.__slots__})


def open_client(context: str, namespace: str) -> Client:
    """Return the API that a context names. Raises InputError."""
    from insitu.extensions.kubernetes.client import Client, KubeconfigTransport

    check_namespace(namespace)
    return Client(KubeconfigTransport(context), namespace)


class _Progress:
    """Prints what each pod waits for, once for each reason."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def __call__(self, states: Sequence[PodState]) -> None:
        for each in states:
            text = f"{each.name}: waits for {each.waits}" if each.waits else f"{each.name}: {each.state}"
            if text not in self._shown:
                self._shown.add(text)
                print_notice(text)


def _print_once() -> Callable[[str], None]:
    said: list[str] = []

    def notify(text: str) -> None:
        if [text] != said[-1:]:
            said.append(text)
            print_notice(text)

    return notify


app.command("render", help=_RENDER_HELP)(take_options(RenderRequest, {}, render))
app.command("up", help=_UP_HELP)(take_options(UpRequest, {}, up))
app.command("status")(status)
app.command("scale", help=_SCALE_HELP)(take_options(ScaleRequest, {}, scale))
app.command("down")(down)
app.command("prepare", hidden=True)(prepare)
app.command("run-head", hidden=True)(run_head)
app.command("run-store", hidden=True)(run_store)
app.command("run-tasks", hidden=True)(run_tasks)
