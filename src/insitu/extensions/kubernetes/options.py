"""Options of `insitu k8s`: those of a cluster, and those of the commands about it. Pure."""

import re
from dataclasses import dataclass
from decimal import Decimal

from insitu.base._version import __version__
from insitu.base.errors import InputError
from insitu.options import Declared, option

_MOST_NODES = 1000
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
QUANTITY = r"([0-9]{1,12}(?:\.[0-9]{1,3})?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_SCALES = {"": Decimal(1), "m": Decimal("0.001")} | {
    f"{letter}{end}": Decimal(base) ** (power + 1)
    for end, base, letters in (("", 1000, "kMGTP"), ("i", 1024, "KMGTP"))
    for power, letter in enumerate(letters)
}
_IMAGE = r"[a-z0-9]([-a-z0-9._:/]*[a-z0-9])?(:[\w][\w.-]{0,127})?(@sha256:[0-9a-f]{64})?"
_OF_CONTEXT = "that of the context, else default"
DEFAULT_IMAGE = f"insitu:{__version__}"


def parse_quantity(text: str) -> Decimal:
    """Return the number that a quantity of Kubernetes names, such as 50Gi or 500m. Raises ValueError."""
    found = re.fullmatch(QUANTITY, text)
    if found is None:
        raise ValueError(text)
    return Decimal(found[1]) * _SCALES[found[2] or ""]


@dataclass(frozen=True, slots=True)
class ClusterOptions(Declared):
    """Options of a cluster: all of its objects follow from them."""

    # fmt: off
    nodes: int = option(
        1, "Number of stores, each on a node of its own.", least=1, most=_MOST_NODES, common=True)
    gpus: int = option(0, "GPUs of each store, as nvidia.com/gpu.", least=0, most=64, common=True)
    cpu: str = option("2", "Processors that each store requests.", metavar="QUANTITY")
    memory: str = option(
        "8Gi", "Memory of each store, with its tasks and files in memory.", metavar="QUANTITY")
    storage: str = option("50Gi", "Size of the disk of each store.", metavar="QUANTITY", common=True)
    head_storage: str = option(
        "20Gi", "Size of the disk of the head, which holds the catalogue and the jobs.", metavar="QUANTITY")
    storage_class: str = option(
        "", "Storage class of the disks.", metavar="NAME", common=True,
        default_text="that of the Kubernetes cluster")
    image: str = option(DEFAULT_IMAGE, "Container image with insitu.", metavar="IMAGE", common=True)
    namespace: str = option(
        "", "Namespace of the cluster.", metavar="NAME", common=True, default_text=_OF_CONTEXT)
    create_namespace: bool = option(False, "Make the namespace, too.")
    queue: str = option("", "Queue of Kueue that admits the stores.", metavar="NAME", common=True)
    page_url: str = option(
        "", "URL of the page behind an Ingress that ends TLS.", metavar="URL",
        default_text="the page makes a certificate")
    log_format: str = option(
        "text", "Lines that head and stores log: text, or JSON.", choices=("text", "json"))
    monitor: bool = option(False, "Serve metrics, with a ServiceMonitor and a dashboard for Grafana.")
    # fmt: on

    def __post_init__(self) -> None:
        # `super()` doesn't work in a dataclass with slots.
        Declared.__post_init__(self)
        for flag, text in (
            ("--cpu", self.cpu),
            ("--memory", self.memory),
            ("--storage", self.storage),
            ("--head-storage", self.head_storage),
        ):
            _check_quantity(flag, text, least=Decimal("0.001") if flag == "--cpu" else 2**20)
        check_namespace(self.namespace)
        for flag, name in (("--storage-class", self.storage_class), ("--queue", self.queue)):
            if name and not is_name(name):
                raise InputError(
                    f"A name of Kubernetes has small letters, digits, dashes and dots. Received: {flag} "
                    f"{name}. Give the name of one that exists"
                )
        if not re.fullmatch(_IMAGE, self.image):
            raise InputError(
                f"--image is the name of an image, such as registry.example.com/insitu:1.0. Received: "
                f"{self.image!r}. Names have small letters alone"
            )
        if self.page_url and not re.fullmatch(r"https://[-\w.]+(:\d{1,5})?/?", self.page_url):
            raise InputError(
                f"--page-url is the address that users open, such as https://insitu.example.com. Received: "
                f"{self.page_url}. Leave it out without an Ingress"
            )


def is_name(text: str) -> bool:
    """Return whether an object of Kubernetes, such as a queue, can have this name."""
    return re.fullmatch(_SUBDOMAIN, text) is not None


def check_namespace(name: str) -> None:
    """Raise InputError for a name that no namespace can have."""
    if name and not re.fullmatch(_LABEL, name):
        raise InputError(
            f"A namespace's name has at most 63 small letters, digits and dashes, and begins and ends with "
            f"a letter or digit. Received: --namespace {name}. Choose another"
        )


def _check_quantity(flag: str, text: str, *, least: Decimal | int) -> None:
    try:
        if parse_quantity(text) < least:
            raise ValueError
    except ValueError:
        example = "2 or 500m" if flag == "--cpu" else "512Mi or 50Gi, at least 1Mi"
        raise InputError(
            f"{flag} is a quantity of Kubernetes, such as {example}. Received: {text!r}"
        ) from None


@dataclass(frozen=True, slots=True)
class RenderRequest(ClusterOptions):
    """Options of `insitu k8s render`."""

    # fmt: off
    helm: str = option(
        "", "Folder to make, with a Helm chart instead of YAML.", metavar="FOLDER", default_text="none")
    # fmt: on


@dataclass(frozen=True, slots=True)
class UpRequest(ClusterOptions):
    """Options of `insitu k8s up`."""

    # fmt: off
    context: str = option(
        "", "Context of the kubeconfig.", metavar="NAME", common=True, default_text="the current one")
    dry_run: bool = option(
        False, "Say what would change, and change nothing.",
        not_at={"form": "The page shows that before."})
    no_wait: bool = option(
        False, "Return once all is applied.", label="Don't wait: nodes with GPUs may come later")
    timeout: str = option("15m", "Longest time to wait.", metavar="TIME")
    # fmt: on


@dataclass(frozen=True, slots=True)
class ScaleRequest(Declared):
    """Options of `insitu k8s scale`."""

    # fmt: off
    nodes: int | None = option(
        None, "New number of stores.", default_text="required", least=1, most=_MOST_NODES)
    namespace: str = option(
        "", "Namespace of the cluster.", metavar="NAME", default_text=_OF_CONTEXT)
    context: str = option(
        "", "Context of the kubeconfig.", metavar="NAME", default_text="the current one")
    timeout: str = option("15m", "Longest time to wait.", metavar="TIME")
    # fmt: on

    def __post_init__(self) -> None:
        Declared.__post_init__(self)
        check_namespace(self.namespace)
        if self.nodes is None:
            raise InputError(
                "A cluster is scaled to a number of stores. Received: no --nodes. Give it, such as --nodes 3"
            )
