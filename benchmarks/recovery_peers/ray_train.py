"""Ray Train v2 with workers that are allowed to fail: ray_train.py HIDDEN MARKS.

There are two, on this machine. With WORKERS and RAY_ADDRESS in the environment there are as many, on the
cluster that runs there. `{host}` in MARKS is the name of the worker's host.
"""

import json
import os
import socket
import sys
from pathlib import Path

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from steps import train

HIDDEN, MARKS = json.loads(sys.argv[1]), Path(sys.argv[2])
WORKERS = int(os.environ.get("WORKERS", "2"))


def rank(config: dict[str, str]) -> None:
    train(json.loads(config["hidden"]), Path(config["marks"].replace("{host}", socket.gethostname())))


if "RAY_ADDRESS" in os.environ:
    ray.init(log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": os.path.dirname(__file__)}})
else:
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    rank,
    train_loop_config={"hidden": json.dumps(HIDDEN), "marks": str(MARKS)},
    scaling_config=ScalingConfig(num_workers=WORKERS),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(
        storage_path=str(MARKS.parent / "ray"), failure_config=FailureConfig(max_failures=3)
    ),
).fit()
