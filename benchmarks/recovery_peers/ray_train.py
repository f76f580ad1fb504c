"""Ray Train v2 with two workers, each allowed to fail: ray_train.py HIDDEN MARKS."""

import json
import os
import sys
from pathlib import Path

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from steps import train

HIDDEN, MARKS = json.loads(sys.argv[1]), Path(sys.argv[2])


def rank(config: dict[str, str]) -> None:
    train(json.loads(config["hidden"]), Path(config["marks"]))


ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    rank,
    train_loop_config={"hidden": json.dumps(HIDDEN), "marks": str(MARKS)},
    scaling_config=ScalingConfig(num_workers=2),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(
        storage_path=str(MARKS.parent / "ray"), failure_config=FailureConfig(max_failures=3)
    ),
).fit()
