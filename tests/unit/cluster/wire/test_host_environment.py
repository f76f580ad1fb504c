from __future__ import annotations

from insitu.cluster.wire.host_environment import adapt_environment


def test_a_task_has_the_paths_of_its_host_and_the_settings_of_its_job() -> None:
    given = {
        "PATH": "/head/bin",
        "HOME": "/head",
        "PYTHONPATH": "/head/src",
        "XDG_RUNTIME_DIR": "/run/1",
        "KERAS_BACKEND": "jax",
        "INSITU_TASK": "worker:1",
        "OMP_NUM_THREADS": "2",
    }
    own = {"PATH": "/host/bin", "HOME": "/host", "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "64"}
    assert adapt_environment(given, own) == {
        "PATH": "/host/bin",
        "HOME": "/host",
        "KERAS_BACKEND": "jax",
        "INSITU_TASK": "worker:1",
        "OMP_NUM_THREADS": "2",
    }


def test_the_owner_of_a_host_sets_variables_for_tasks_but_none_of_insitus_own() -> None:
    own = {
        "INSITU_SET_MODE": "fast",
        "INSITU_SET_INSITU_SEED": "7",
        "INSITU_SET_TF_CONFIG": "{}",
        "OTHER": "1",
    }
    given = {"MODE": "slow", "INSITU_SEED": "1"}
    assert adapt_environment(given, own) == {"MODE": "fast", "INSITU_SEED": "1"}


def test_devices_of_another_host_are_not_named() -> None:
    assert adapt_environment({"CUDA_VISIBLE_DEVICES": "3"}, {}) == {}
    assert adapt_environment({}, {"CUDA_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": "0"}
