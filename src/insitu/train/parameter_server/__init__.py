"""Training on parameter servers: the worker's side, and what a `ps` task runs.

The servers themselves are `insitu.parameters`. Begin reading with `step.py`.
"""

from insitu.train.parameter_server.async_membership import ServerMembership
from insitu.train.parameter_server.custom_loop import ServerLoopStep, ServerTrainer, optimizer_of
from insitu.train.parameter_server.hybrid import TableReplica
from insitu.train.parameter_server.layers import embeddings_of
from insitu.train.parameter_server.lookup import Lookup, find_leaves
from insitu.train.parameter_server.loss_scale import LossScale, inner_optimizer
from insitu.train.parameter_server.model_spec import Norms, norms_of
from insitu.train.parameter_server.server_task import begin_service
from insitu.train.parameter_server.session import Link, attach_tables
from insitu.train.parameter_server.step import ServerStep

__all__ = [
    "Link",
    "Lookup",
    "LossScale",
    "Norms",
    "ServerLoopStep",
    "ServerMembership",
    "ServerStep",
    "ServerTrainer",
    "TableReplica",
    "attach_tables",
    "begin_service",
    "embeddings_of",
    "find_leaves",
    "inner_optimizer",
    "norms_of",
    "optimizer_of",
]
