from __future__ import annotations

import pytest

from insitu.cluster.client.kept_environment import choose_environment, restrict_environment
from insitu.errors import JobSpecError

SHELL = {
    "PATH": "/bin",
    "HOME": "/root",
    "KERAS_BACKEND": "jax",
    "INSITU_HOME": "/data/insitu",
    "INSITU_IGNITE_PASSWORD": "geheim",
    "AWS_SECRET_ACCESS_KEY": "geheim",
    "RATE": "0.1",
}


def test_what_is_named_and_what_says_how_insitu_runs_a_job_is_kept() -> None:
    assert choose_environment(SHELL, ()) == {"KERAS_BACKEND": "jax"}
    assert choose_environment(SHELL, ("RATE",)) == {"KERAS_BACKEND": "jax", "RATE": "0.1"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NONE", "NONE, which isn't set"),
        ("INSITU_IGNITE_PASSWORD", "isn't for secrets"),
        ("IGNITE_DATASET_PASSWORD", "isn't for secrets"),
        ("IGNITE_DATASET_CERT_PASSWORD", "isn't for secrets"),
    ],
)
def test_what_cannot_be_kept_is_named(name: str, why: str) -> None:
    with pytest.raises(JobSpecError, match=why):
        choose_environment(SHELL, (name,))


def test_a_job_gets_nothing_of_the_shell_but_what_is_kept_and_what_is_about_the_host() -> None:
    found = restrict_environment({**SHELL, "RATE": "9"}, {"RATE": "0.1"})
    assert found == {"PATH": "/bin", "HOME": "/root", "INSITU_HOME": "/data/insitu", "RATE": "0.1"}
