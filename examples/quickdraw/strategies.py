"""The strategies that answers.py trains under, and the options of `insitu start` that each needs."""

import insitu

CHOICES = {
    "OneDevice": (insitu.OneDeviceStrategy, {}, ["--workers", "1"]),
    "Mirrored": (insitu.MirroredStrategy, {}, ["--workers", "1", "--virtual-devices", "cpu:2"]),
    "MultiWorkerMirrored": (insitu.MultiWorkerMirroredStrategy, {}, ["--workers", "2"]),
    "CentralStorage": (
        insitu.CentralStorageStrategy,
        {"compute_devices": ["cpu:0", "cpu:1"], "parameter_device": "cpu:0"},
        ["--workers", "1", "--virtual-devices", "cpu:2"],
    ),
    "ParameterServer-sync": (
        insitu.ParameterServerStrategy,
        {"mode": "sync"},
        ["--workers", "2", "--ps", "1"],
    ),
    "ParameterServer-bounded": (
        insitu.ParameterServerStrategy,
        {"mode": "bounded"},
        ["--workers", "2", "--ps", "1"],
    ),
    "ParameterServer-async": (
        insitu.ParameterServerStrategy,
        {"mode": "async"},
        ["--workers", "2", "--ps", "1"],
    ),
    "ModelParallel": (insitu.ModelParallelStrategy, {}, ["--workers", "1", "--virtual-devices", "cpu:2"]),
}


def make(name):
    """Return the strategy of that name. In a `ps` task it serves, and never returns."""
    strategy, arguments, _ = CHOICES[name]
    made = strategy(**arguments)
    if name == "ModelParallel":
        made.place({"hidden": "cpu:1", "words": "cpu:1"})
    return made


def updates_of(name, train):
    """Return how many updates of the model an epoch makes: of each worker's gradient, or of their mean."""
    return train.num_steps * (train.num_shards if name.endswith(("-bounded", "-async")) else 1)
