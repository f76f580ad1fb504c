"""Train on parameter servers: the worker's side, and the program of a `ps` task.

The servers themselves are `insitu.parameters`. Begin reading with `step.py`.
"""

from insitu.train.parameter_server import coordinator, partitioners
from insitu.train.parameter_server.assignment_guard import AssignmentGuard
from insitu.train.parameter_server.async_membership import ServerMembership
from insitu.train.parameter_server.attached_tables import attach_tables
from insitu.train.parameter_server.custom_loop import (
    ServerAggregation,
    ServerLoopStep,
    check_coordination,
    optimizer_of,
)
from insitu.train.parameter_server.data_check import DataCheck
from insitu.train.parameter_server.ended_fits import EndedFits
from insitu.train.parameter_server.hybrid import HybridReplica
from insitu.train.parameter_server.layers import embeddings_of
from insitu.train.parameter_server.lookup import TableLookup, find_key_inputs
from insitu.train.parameter_server.loss_scale import LossScale
from insitu.train.parameter_server.model_spec import ClipNorms, clip_norms_of, refuse_recompile
from insitu.train.parameter_server.partitioners import check_partitioner
from insitu.train.parameter_server.server_marks import ServerMarks
from insitu.train.parameter_server.server_task import serve_or_configure
from insitu.train.parameter_server.session import ParameterServerSession
from insitu.train.parameter_server.shared_tests import SharedTests
from insitu.train.parameter_server.step import ServerStep
from insitu.train.parameter_server.update_count import UpdateCount, UpdatePlan
from insitu.train.parameter_server.vocabulary_check import check_vocabularies

__all__ = [
    "AssignmentGuard",
    "ClipNorms",
    "DataCheck",
    "EndedFits",
    "HybridReplica",
    "LossScale",
    "ParameterServerSession",
    "ServerAggregation",
    "ServerLoopStep",
    "ServerMarks",
    "ServerMembership",
    "ServerStep",
    "SharedTests",
    "TableLookup",
    "UpdateCount",
    "UpdatePlan",
    "attach_tables",
    "check_coordination",
    "check_partitioner",
    "check_vocabularies",
    "clip_norms_of",
    "coordinator",
    "embeddings_of",
    "find_key_inputs",
    "optimizer_of",
    "partitioners",
    "refuse_recompile",
    "serve_or_configure",
]
