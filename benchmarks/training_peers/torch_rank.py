"""torch DistributedDataParallel over gloo: a bare loop, without the metrics and callbacks of a `fit`."""

import json
import os
import sys
import time

import models

index, size = models.me()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].rsplit(":", 1)
dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=index, world_size=size)
kind = sys.argv[1]
if kind == "cnn":
    net = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
else:
    net = nn.Sequential(
        *(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4000), nn.ReLU(), nn.Linear(4000, 10))
    )
parallel = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(parallel.parameters(), lr=models.LEARNING_RATE, momentum=0.9)
loss_of = nn.CrossEntropyLoss()
x, y = models.data(kind, size)
x = x.reshape(-1, 1, 28, 28) if kind == "cnn" else x
own = slice(index * models.ROWS, (index + 1) * models.ROWS)
batches = [
    (
        torch.from_numpy(x[s : s + models.ROWS * size][own]),
        torch.from_numpy(y[s : s + models.ROWS * size][own]),
    )
    for s in range(0, len(x), models.ROWS * size)
]
seconds = []
for _epoch in range(3):
    started = time.perf_counter()
    for images, labels in batches:
        optimizer.zero_grad(set_to_none=True)
        loss_of(parallel(images), labels).backward()
        optimizer.step()
    seconds.append(time.perf_counter() - started)
if index == 0:
    print(f"RATE {len(x) / min(seconds[1:])}", flush=True)
dist.destroy_process_group()
