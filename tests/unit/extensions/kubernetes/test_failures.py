"""Answers of the API that aren't a success, as errors that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from insitu.base.errors import ClusterError, InputError
from insitu.extensions.kubernetes.failures import explain, explain_unreachable, read_failure

TERMINATING = "unable to create new content in namespace team because it is being terminated"


@pytest.mark.parametrize(
    ("code", "message", "details", "kind", "said"),
    [
        (401, "Unauthorized", {}, InputError, "Sign in again, or name another context by --context"),
        (
            403,
            'statefulsets.apps "store" is forbidden: User "ann" cannot patch resource',
            {},
            InputError,
            "Your user must be allowed to patch StatefulSet store in namespace team. Received: "
            "statefulsets.apps",
        ),
        (
            403,
            TERMINATING,
            {"causes": [{"reason": "NamespaceTerminating"}]},
            InputError,
            "A cluster needs a namespace that stays. Received: team, which is being deleted",
        ),
        (
            403,
            "pods is forbidden: exceeded quota: small",
            {},
            ClusterError,
            "The quota of namespace team must",
        ),
        (
            403,
            'user "ann" is attempting to grant RBAC permissions not currently held',
            {},
            InputError,
            "Who makes the head's Role must hold its rights",
        ),
        (404, 'namespaces "team" not found', {"kind": "namespaces"}, InputError, "Give --create-namespace"),
        (
            422,
            "updates to statefulset spec for fields other than 'replicas' are forbidden",
            {},
            InputError,
            "The size and the class of disks stay as a set was made",
        ),
        (422, "spec.x: Invalid value", {}, InputError, "Kubernetes must take StatefulSet store"),
        (409, "conflict", {}, ClusterError, "The API server must patch StatefulSet store"),
    ],
)
def test_each_answer_says_what_to_do(
    code: int, message: str, details: Any, kind: type[Exception], said: str
) -> None:
    body = json.dumps({"kind": "Status", "reason": "X", "message": message, "details": details}).encode()
    error = explain(read_failure(code, body), "patch", "StatefulSet store", "team")
    assert type(error) is kind and said in str(error)
    assert message in str(error) or "terminat" in message or code == 404


def test_a_proxy_that_answers_with_text_is_quoted() -> None:
    error = explain(read_failure(502, b"<html>bad gateway</html>"), "get", "Pod a", "team")
    assert type(error) is ClusterError and "<html>bad gateway</html>" in str(error)


def test_a_server_that_is_away_is_named() -> None:
    error = explain_unreachable("https://10.0.0.1:6443", "connection refused")
    assert "https://10.0.0.1:6443: connection refused" in str(error) and error.exit_code == 1
