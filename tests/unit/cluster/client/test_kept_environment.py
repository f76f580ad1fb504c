from __future__ import annotations

from dataclasses import replace

import pytest

from insitu.base.errors import JobSpecError
from insitu.cluster.client.kept_environment import (
    change_variables,
    choose_variables,
    compose_environment,
    is_secret,
    name_differences,
)
from insitu.cluster.job_files import JobEnvironment
from insitu.extensions.ignite.connector import CONNECTOR

SHELL = {
    "PATH": "/bin",
    "TERM": "xterm",
    "SSH_TTY": "/dev/pts/1",
    "KERAS_BACKEND": "jax",
    "INSITU_HOME": "/data/insitu",
    "HF_TOKEN": "geheim",
    "INSITU_IGNITE_KEY": "/keys/a.pem",
    "RATE": "0.1",
}
KEPT = JobEnvironment(
    {"PATH": "/bin", "KERAS_BACKEND": "jax", "RATE": "0.1", "EMPTY": ""}, ("HF_TOKEN",), host="here"
)


def is_file(value: str) -> bool:
    return value == "/keys/a.pem"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "GITHUB_TOKEN_2", "AUTHTOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
        *("WANDB_API_KEY", "APIKEY", "api_keys", "PGPASSWORD", "DB_PASSWD", "SSHPASS", "MYSQL_PWD"),
        *("GPG_PASSPHRASE", "AZURE_CREDENTIALS", "SECRET_WORD"),
    ],
)
def test_names_say_what_is_a_secret(name: str) -> None:
    assert is_secret(name, "geheim", is_file)
    assert not is_secret(name, "/keys/a.pem", is_file), "it says where the secret is"


@pytest.mark.parametrize(
    "name",
    [
        "KERAS_BACKEND",
        "TOKENIZERS_PARALLELISM",
        "NUM_TOKENS",
        "KEYBOARD",
        "HOME",
        "PASSES",
        "KEYFILE",
        "RATE",
    ],
)
def test_other_names_are_of_no_secret(name: str) -> None:
    assert not is_secret(name, "3", is_file)


def test_an_address_with_a_password_is_a_secret() -> None:
    assert is_secret("DATABASE_URL", "postgres://me:geheim@db/x", is_file)
    assert not is_secret("DATABASE_URL", "postgres://me@db:5432/x", is_file)
    assert not is_secret("http_proxy", "http://proxy:3128/a@b", is_file)


def test_all_is_kept_but_secrets_and_what_is_of_the_session() -> None:
    variables, secrets = choose_variables(SHELL, (), is_file)
    assert variables == {
        "PATH": "/bin",
        "KERAS_BACKEND": "jax",
        "INSITU_IGNITE_KEY": "/keys/a.pem",
        "RATE": "0.1",
    }
    assert secrets == ("HF_TOKEN",)


def test_what_is_named_is_kept_whatever_its_name_says() -> None:
    variables, secrets = choose_variables({**SHELL, "SORT_KEY": "age"}, ("SORT_KEY",), is_file)
    assert variables["SORT_KEY"] == "age" and secrets == ("HF_TOKEN",)


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
        choose_variables({**SHELL, "INSITU_IGNITE_PASSWORD": "geheim"}, (name,), is_file, CONNECTOR.secrets)


def test_a_job_starts_with_each_variable_of_its_shell() -> None:
    kept = JobEnvironment(*choose_variables(SHELL, (), is_file), host="here")
    found = compose_environment(kept, SHELL, "here")
    assert found == {name: value for name, value in SHELL.items() if name != "INSITU_HOME"}


def test_a_job_goes_on_with_its_own_variables_and_the_secrets_of_the_shell() -> None:
    other = {"PATH": "/other", "TERM": "vt100", "RATE": "9", "MORE": "1", "HF_TOKEN": "new"}
    found = compose_environment(KEPT, other, "here")
    assert found == {**KEPT.variables, "TERM": "vt100", "HF_TOKEN": "new"}
    assert compose_environment(KEPT, other, "elsewhere") == {**found, "PATH": "/other"}


def test_a_secret_that_lacks_is_named_with_what_to_do() -> None:
    with pytest.raises(JobSpecError, match=r"a shell without HF_TOKEN: .*give --env HF_TOKEN"):
        compose_environment(KEPT, {"PATH": "/bin"}, "here")


def test_a_user_changes_variables_by_name() -> None:
    shell = {"RATE": "9", "NEW_KEY": "geheim", "MORE": "1"}
    changed = change_variables(KEPT, shell, ("RATE", "NEW_KEY", "HF_TOKEN", "EMPTY"), is_file)
    assert changed.variables == {"PATH": "/bin", "KERAS_BACKEND": "jax", "RATE": "9"}
    assert changed.secrets == ("NEW_KEY",), "one is added, the other isn't asked for any more"
    assert change_variables(KEPT, shell, (), is_file) == KEPT


@pytest.mark.parametrize("shell", [{"KERAS_BACKEND": "torch"}, {}])
def test_another_backend_is_refused(shell: dict[str, str]) -> None:
    with pytest.raises(JobSpecError, match="backend that it was started with: KERAS_BACKEND=jax"):
        change_variables(KEPT, shell, ("KERAS_BACKEND",), is_file)
    same = {"KERAS_BACKEND": "jax"}
    assert change_variables(KEPT, same, ("KERAS_BACKEND",), is_file) == KEPT


def test_variables_that_do_not_count_are_named() -> None:
    shell = {"RATE": "9", "MORE": "1", "TERM": "xterm", "INSITU_HOME": "/x", "HF_TOKEN": "a", "PATH": "/bin"}
    lines = name_differences(KEPT, shell, compose_environment(KEPT, shell, "here"))
    assert [line.rpartition(": ")[2] for line in lines] == ["HF_TOKEN", "MORE, RATE. --env NAME takes one"]
    assert name_differences(replace(KEPT, secrets=()), {}, {}) == []
    many = {f"V{number:02}": "1" for number in range(14)}
    assert "V09 and 4 more" in name_differences(KEPT, many, {})[1]


def test_values_are_not_shown() -> None:
    assert "0.1" not in repr(KEPT)
