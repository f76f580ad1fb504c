from __future__ import annotations

import pytest
from k8s_fake import FakeApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    """A cluster of Kubernetes with a namespace, a storage class and a node. Looks follow each other at "
    "once."""
    monkeypatch.setattr("insitu.extensions.kubernetes.cluster._LOOK_SECONDS", 0.0)
    return FakeApi()
