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


def test_devices_of_another_host_are_not_named() -> None:
    assert adapt_environment({"CUDA_VISIBLE_DEVICES": "3"}, {}) == {}
    assert adapt_environment({}, {"CUDA_VISIBLE_DEVICES": "0"}) == {"CUDA_VISIBLE_DEVICES": "0"}
