"""A rank under torchrun: torchrun_rank.py HIDDEN MARKS. `{host}` in MARKS is the name of the rank's host."""

import json
import socket
import sys
from pathlib import Path

import torch.distributed as dist
from steps import train

dist.init_process_group("gloo")
train(json.loads(sys.argv[1]), Path(sys.argv[2].replace("{host}", socket.gethostname())))
