"""Says what an answer of the Kubernetes API means for the user, and what to do. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from insitu.base.errors import ClusterError, InputError, InsituError

FORBIDDEN, NOT_FOUND, CONFLICT, INVALID, UNAUTHORIZED = 403, 404, 409, 422, 401
_LONGEST = 600


@dataclass(frozen=True, slots=True)
class ApiFailure(Exception):
    """An answer of the API server that isn't a success."""

    #: The status of HTTP.
    status: int
    #: The reason, a word of Kubernetes such as Forbidden.
    reason: str = ""
    #: The message for people.
    message: str = ""
    #: Details: kind, name, causes.
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def read_failure(status: int, body: bytes) -> ApiFailure:
    """Return what an answer says, which is a Status of Kubernetes or, of a proxy before it, any text."""
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        return ApiFailure(status, "", body[:_LONGEST].decode(errors="replace").strip())
    details = found.get("details")
    return ApiFailure(
        status,
        str(found.get("reason") or ""),
        str(found.get("message") or "")[:_LONGEST],
        details if isinstance(details, dict) else {},
    )


def explain(failure: ApiFailure, verb: str, what: str, namespace: str) -> InsituError:
    """Return the error for a call that failed: `verb` is what was to be done with `what`, such as
    `StatefulSet store`."""
    said = failure.message or f"HTTP status {failure.status}"
    if failure.status == UNAUTHORIZED:
        return InputError(
            f"The API server must know the user of the kubeconfig. Received: {said}. Sign in again, or name "
            f"another context by --context; `kubectl auth whoami` shows who you are"
        )
    if _is_terminating(failure):
        return InputError(
            f"A cluster needs a namespace that stays. Received: {namespace}, which is being deleted. Wait "
            f"until `kubectl get namespace {namespace}` finds it no more, or choose another by --namespace"
        )
    if failure.status == FORBIDDEN and "exceeded quota" in said:
        return ClusterError(
            f"The quota of namespace {namespace} must have room. Received: no room to {verb} {what}: {said}. "
            "Ask "
            f"for fewer nodes, processors or less storage, or have an administrator raise the quota"
        )
    if failure.status == FORBIDDEN and "not currently held" in said:
        return InputError(
            f"Who makes the head's Role must hold its rights. Received: {said}. Have an administrator of "
            f"namespace {namespace} run the same command, or apply what `insitu k8s render` prints"
        )
    if failure.status == FORBIDDEN:
        return InputError(
            f"Your user must be allowed to {verb} {what} in namespace {namespace}. Received: {said}. Have an "
            "administrator grant it, such as by the ClusterRole admin in this namespace, or choose another "
            "one by --namespace"
        )
    if failure.status == NOT_FOUND and failure.details.get("kind") == "namespaces":
        return InputError(
            f"The namespace must be there. Received: {namespace}, which isn't. Give --create-namespace, or "
            f"run `kubectl create namespace {namespace}`"
        )
    if failure.status == INVALID and _is_fixed(said):
        return InputError(
            f"The size and the class of disks stay as a set was made. Received: {what}: {said}. Give the "
            "same "
            "--storage, --head-storage and --storage-class as before; or `insitu k8s down` first, which "
            "keeps "
            f"the disks that are there"
        )
    if failure.status == INVALID:
        return InputError(
            f"Kubernetes must take {what}. Received: {said}. Correct the option that this names"
        )
    return ClusterError(f"The API server must {verb} {what}. Received: {said}. Try again")


def explain_unreachable(server: str, why: str) -> InsituError:
    """Return the error for an API server that doesn't answer."""
    return ClusterError(
        f"The API server must answer. Received: {server}: {why}. Check the network and the context of the "
        f"kubeconfig: `kubectl cluster-info`"
    )


def _is_terminating(failure: ApiFailure) -> bool:
    causes = failure.details.get("causes") or ()
    return any(each.get("reason") == "NamespaceTerminating" for each in causes if isinstance(each, dict)) or (
        failure.status in (FORBIDDEN, CONFLICT) and "being terminated" in failure.message
    )


def _is_fixed(message: str) -> bool:
    return bool(re.search(r"updates to statefulset spec .* are forbidden", message)) or (
        "field is immutable" in message
    )
