"""Options of a cluster: what Kubernetes wouldn't take is refused before it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from insitu.base.errors import InputError
from insitu.extensions.kubernetes.options import ClusterOptions, parse_quantity


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 0}, "--nodes must be at least 1. Received: 0"),
        ({"gpus": -1}, "--gpus must be at least 0"),
        ({"namespace": "Team"}, "Received: --namespace Team. Choose another"),
        ({"namespace": "a" * 64}, "at most 63 small letters"),
        ({"namespace": "-a"}, "begins and ends with"),
        ({"storage": "50"}, "--storage is a quantity of Kubernetes, such as 512Mi or 50Gi"),
        ({"storage": "50GB"}, "Received: '50GB'"),
        ({"memory": "-1Gi"}, "--memory is a quantity"),
        ({"head_storage": ""}, "--head-storage is a quantity"),
        ({"cpu": "0"}, "--cpu is a quantity of Kubernetes, such as 2 or 500m"),
        ({"storage_class": "Fast"}, "Received: --storage-class Fast. Give the name of one that exists"),
        ({"queue": "a_b"}, "Received: --queue a_b"),
        ({"image": "Insitu"}, "--image is the name of an image"),
        ({"image": "a b"}, "Received: 'a b'"),
        ({"page_url": "http://a"}, "--page-url is the address that users open, such as https://"),
    ],
)
def test_what_kubernetes_does_not_take_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        ClusterOptions(**given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "number"), [("2", 2), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("1k", 1000), ("2Ti", 2**41)]
)
def test_quantities_are_numbers(text: str, number: float) -> None:
    assert float(parse_quantity(text)) == number
